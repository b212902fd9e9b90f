// Checksums of expert calls: over everything that decides what is computed, not only over the rows. A bit
// flipped in a layer or an expert id would otherwise give rows that look right.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "deltamesh/mesh/expert.pb.h"
#include "runtime/base/crc32c.h"

namespace deltamesh {

// Over `words`, then `payload`; `before` continues a checksum.
inline uint32_t Checksum(std::span<const uint32_t> words, std::span<const std::byte> payload,
                         uint32_t before = 0) {
  return Crc32c(payload, Crc32c(std::as_bytes(words), before));
}

inline uint32_t DispatchChecksum(const mesh::ExpertDispatch& d,
                                 std::span<const std::byte> payload) {
  const std::array words = {static_cast<uint32_t>(d.call_id()),
                            static_cast<uint32_t>(d.call_id() >> 32), d.layer(), d.rows(),
                            d.width()};
  const auto all = [](const auto& field) {
    return std::span<const uint32_t>(field.data(), static_cast<size_t>(field.size()));
  };
  return Checksum(all(d.experts()), payload,
                  Checksum(all(d.experts_per_row()), {}, Checksum(words, {})));
}

inline uint32_t CombineChecksum(uint64_t call_id, uint32_t rows, uint32_t width,
                                std::span<const std::byte> payload) {
  return Checksum(
      std::array{static_cast<uint32_t>(call_id), static_cast<uint32_t>(call_id >> 32), rows, width},
      payload);
}

}  // namespace deltamesh
