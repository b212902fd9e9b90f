// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), the checksum of every region that moves.
// Crc32c("123456789") == 0xE3069283.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace deltamesh {

// Checksum of `bytes` continued from `seed` (a previous result, 0 to start).
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);

// The ways to compute it, slowest first; Crc32c takes the last one that this processor has.
enum class Crc32cWay { kTable, kLanes, kFolding };
std::vector<Crc32cWay> Crc32cWays();
uint32_t Crc32cBy(Crc32cWay way, std::span<const std::byte> bytes, uint32_t seed);  // for tests

}  // namespace deltamesh
