#include "runtime/base/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deltamesh {

void StreamCopy(std::span<std::byte> to, std::span<const std::byte> from) {
  std::byte* out = to.data();
  const std::byte* in = from.data();
  size_t left = from.size();
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  // Only whole lines are written at once.
  const size_t head = std::min(left, -reinterpret_cast<uintptr_t>(out) % kLine);
  if (head > 0) std::memcpy(out, in, head);
  out += head, in += head, left -= head;
  for (; left >= kLine; out += kLine, in += kLine, left -= kLine) {
    for (size_t i = 0; i < kLine; i += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    }
  }
  _mm_sfence();  // such writes are ordered before nothing by themselves
#endif
  if (left > 0) std::memcpy(out, in, left);
}

}  // namespace deltamesh
