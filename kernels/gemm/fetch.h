// Asking for weights before they are read. A panel is contiguous for the length of some pages only, and a
// hardware prefetcher begins anew at each page; so the kernels that read weights once ask themselves.
#pragma once

#include <cstdint>

#include "hwy/base.h"

namespace deltamesh::kernels {

// How far ahead of what is read: covers the time that memory takes, and some panels side by side still find
// room in the first-level cache.
constexpr int64_t kAheadBytes = 3072;

// Bytes past the end of the weights may be asked for: that does nothing. The empty statement is an effect: a
// compiler that finds none in a function takes calls of it away, and all this with them.
HWY_INLINE void FetchAhead(const void* at) {
  __builtin_prefetch(static_cast<const char*>(at) + kAheadBytes, 0, 3);
  asm volatile("");
}

}  // namespace deltamesh::kernels
