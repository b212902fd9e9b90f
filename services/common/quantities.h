// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace deltamesh {

// 1559965606912 as "1,559,965,606,912".
std::string Grouped(int64_t value);
// Decimal, as links and disks are sold: "449.4 MB".
std::string DecimalBytes(double bytes);
// "12 us", "3.40 ms", "1.25 s", "2.1 h".
std::string ReadableSeconds(double seconds);
// 1000000 as "1,000,000", 0.001 as "0.001".
std::string ReadableNumber(double value);

// What a number may be: from `low` to `high`, both included.
struct NumberRange {
  const char* name;  // of its flag, without dashes
  double low, high;
  const char* unit;  // "GB per second"
};
// INVALID_ARGUMENT with name, value and range for all else, NaN and infinity among it.
absl::Status CheckNumber(const NumberRange& range, double value);
// The same for a whole number.
absl::Status CheckWhole(const char* name, int64_t value, int64_t low, int64_t high,
                        const char* unit);
// CheckNumber's words without the name: "is out of range; use 0 to 9 GB", or empty.
std::string OutsideOf(double low, double high, const std::string& unit, double value);
// The end of CheckWhole's: "use 1 to 1,000 tokens".
std::string WholeRange(int64_t low, int64_t high, const std::string& unit);

}  // namespace deltamesh
