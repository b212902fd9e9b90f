#include "kernels/residual/residual.h"

namespace deltamesh::kernels {

void Add(const AddParams& p) { AddRef(p); }
void AttnRes(const AttnResParams& p) { AttnResRef(p); }

}  // namespace deltamesh::kernels
