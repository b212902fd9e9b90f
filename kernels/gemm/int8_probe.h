// What the hardware can do at most of the products that Int8Gemm is made of: the loop behind a "fraction of
// the 8-bit product peak" (kernels/probe has the others).
#pragma once

#include <cstdint>

namespace deltamesh::kernels {

// In registers, by the instructions that Int8Gemm uses here for MXFP4 matrices or else for 8-bit ones;
// returns the operations done (2 per product). For the calling thread.
double Int8Probe(int64_t rounds, bool mxfp4, float* sink);

}  // namespace deltamesh::kernels
