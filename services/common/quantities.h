// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace deltamesh {

// 1559965606912 as "1,559,965,606,912".
std::string Grouped(int64_t value);
// Decimal, as links and disks are sold: "449.4 MB".
std::string DecimalBytes(double bytes);
// "12 us", "3.40 ms", "1.25 s", "2.1 h".
std::string ReadableSeconds(double seconds);

}  // namespace deltamesh
