#include "kernels/conv/conv.h"

namespace deltamesh::kernels {

void ShortConv(const ShortConvParams& p) { ShortConvRef(p); }

}  // namespace deltamesh::kernels
