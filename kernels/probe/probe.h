// What the hardware can do at most: the loops behind every "fraction of the ceiling". Each runs on the
// calling thread; a caller runs one per core and adds the rates.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltamesh::kernels {

// Reads `bytes` (a multiple of 256) once, as `streams` (1, 2, 4 or 8) regions side by side. The result
// depends on every byte, so that no read can be left out.
uint64_t ReadProbe(const std::byte* data, int64_t bytes, int streams);

// Float32 multiply-adds in registers; returns the operations done (2 per multiply-add and lane).
double FmaProbe(int64_t rounds, float* sink);

}  // namespace deltamesh::kernels
