#include "kernels/norm/norm.h"

namespace deltamesh::kernels {

void RmsNorm(const RmsNormParams& p) { RmsNormRef(p); }
void L2Norm(const L2NormParams& p) { L2NormRef(p); }
void GatedNorm(const GatedNormParams& p) { GatedNormRef(p); }

}  // namespace deltamesh::kernels
