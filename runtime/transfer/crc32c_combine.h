// The CRC-32C of two byte strings put together, from theirs.
#pragma once

#include <cstdint>

namespace deltamesh {

// Crc32c(A + B) given Crc32c(A), Crc32c(B) and the length of B in bytes. Takes about log2(length)
// steps, so a region's checksum comes from its segments' without reading the region again.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

}  // namespace deltamesh
