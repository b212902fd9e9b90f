#include "kernels/gemm/gemm.h"

namespace deltamesh::kernels {

void Gemm(const GemmParams& p) { GemmRef(p); }

}  // namespace deltamesh::kernels
