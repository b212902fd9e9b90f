// How long a state takes to read from a worker's disk or object store, and whether it is read or computed:
// what the worker decides by (StateTier), and what routers therefore expect of it.
#pragma once

#include <cstdint>

namespace deltamesh {

inline constexpr double kStoreFileSeconds = 0.002;  // before the first byte of a file
// Until a worker has measured its own.
inline constexpr double kAssumedStoreBytesPerSecond = 5e8;

struct StoreRead {
  int64_t bytes = 0;  // the snapshot and the latents that memory lacks
  int64_t files = 1;
  int64_t ahead = 0;  // reads before it, taken to be of as many bytes
};

// `bytes_per_second`: 0 where none is measured.
inline double StoreReadSeconds(const StoreRead& read, double bytes_per_second) {
  const double rate = bytes_per_second > 0 ? bytes_per_second : kAssumedStoreBytesPerSecond;
  return static_cast<double>(read.bytes) * static_cast<double>(read.ahead + 1) / rate +
         kStoreFileSeconds * static_cast<double>(read.files);
}

// Both rates are the worker's own. While it lacks one it reads, and learns how long that takes.
inline bool ReadsFromStore(const StoreRead& read, int64_t saved_tokens, double bytes_per_second,
                           double tokens_per_second) {
  if (bytes_per_second <= 0 || tokens_per_second <= 0) return true;
  return StoreReadSeconds(read, bytes_per_second) <=
         static_cast<double>(saved_tokens) / tokens_per_second;
}

}  // namespace deltamesh
