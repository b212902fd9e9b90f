// Checksums of expert calls: over everything that decides what is computed, not only over the rows. A bit
// flipped in a layer or an expert id would otherwise give rows that look right.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "deltamesh/mesh/expert.pb.h"
#include "runtime/base/crc32c.h"

namespace deltamesh {

inline uint32_t Checksum(const std::vector<uint32_t>& words, std::span<const std::byte> payload) {
  return Crc32c(payload, Crc32c(std::as_bytes(std::span(words))));
}

inline uint32_t DispatchChecksum(const mesh::ExpertDispatch& d,
                                 std::span<const std::byte> payload) {
  std::vector<uint32_t> words = {static_cast<uint32_t>(d.call_id()),
                                 static_cast<uint32_t>(d.call_id() >> 32), d.layer(), d.rows(),
                                 d.width()};
  words.insert(words.end(), d.experts_per_row().begin(), d.experts_per_row().end());
  words.insert(words.end(), d.experts().begin(), d.experts().end());
  return Checksum(words, payload);
}

inline uint32_t CombineChecksum(uint64_t call_id, uint32_t rows, uint32_t width,
                                std::span<const std::byte> payload) {
  return Checksum(
      {static_cast<uint32_t>(call_id), static_cast<uint32_t>(call_id >> 32), rows, width}, payload);
}

}  // namespace deltamesh
