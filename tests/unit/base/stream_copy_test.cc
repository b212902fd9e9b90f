#include "runtime/base/stream_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace deltamesh {
namespace {

// Any offset within a line at either end, lengths around whole lines: all bytes, and none besides.
TEST(StreamCopy, WritesExactlyTheBytesGiven) {
  constexpr std::byte kUntouched{0xEE};
  std::vector<std::byte> from(512);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  alignas(64) std::byte to[512];
  for (const size_t length : {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 300}) {
    for (size_t at = 0; at < 64; ++at) {
      const size_t source = (at * 5) % 64;
      std::fill(std::begin(to), std::end(to), kUntouched);
      StreamCopy({to + at, std::size(to) - at}, {from.data() + source, length});
      for (size_t i = 0; i < std::size(to); ++i) {
        const bool inside = i >= at && i < at + length;
        ASSERT_EQ(to[i], inside ? from[source + i - at] : kUntouched)
            << "byte " << i << " of " << length << " at " << at;
      }
    }
  }
}

}  // namespace
}  // namespace deltamesh
