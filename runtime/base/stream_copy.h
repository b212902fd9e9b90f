// Copies to memory that nobody reads soon.
#pragma once

#include <cstddef>
#include <span>

namespace deltamesh {

// As memcpy of `from.size()` bytes to `to`, which is at least as long; the two do not overlap. What is
// written goes past the caches: its lines need not be read first, and push nothing else out. A thread that
// synchronises with this one afterwards sees it, as after any write.
void StreamCopy(std::span<std::byte> to, std::span<const std::byte> from);

}  // namespace deltamesh
