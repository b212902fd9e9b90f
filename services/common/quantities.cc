#include "services/common/quantities.h"

#include <cmath>
#include <iterator>

#include "absl/strings/str_format.h"
#include "runtime/base/status.h"

namespace deltamesh {

std::string Grouped(int64_t value) {
  std::string digits = std::to_string(value);
  const int64_t sign = value < 0 ? 1 : 0;
  for (int64_t at = std::ssize(digits) - 3; at > sign; at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string DecimalBytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 999.95 && unit + 1 < std::size(kUnits)) bytes /= 1000, ++unit;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, bytes, kUnits[unit]);
}

std::string ReadableSeconds(double seconds) {
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1) return absl::StrFormat("%.2f ms", seconds * 1e3);
  if (seconds < 3600) return absl::StrFormat("%.2f s", seconds);
  return absl::StrFormat("%.1f h", seconds / 3600);
}

std::string ReadableNumber(double value) {
  constexpr double kExact = 1e15;  // every whole number below it is a double
  if (std::abs(value) < kExact && value == std::floor(value)) {
    return Grouped(static_cast<int64_t>(value));
  }
  return absl::StrFormat("%.6g", value);
}

std::string OutsideOf(double low, double high, const std::string& unit, double value) {
  if (value >= low && value <= high) return "";
  return absl::StrFormat("%s; use %s to %s %s",
                         std::isnan(value) ? "is no number" : "is out of range",
                         ReadableNumber(low), ReadableNumber(high), unit);
}

absl::Status CheckNumber(const NumberRange& range, double value) {
  const std::string problem = OutsideOf(range.low, range.high, range.unit, value);
  if (problem.empty()) return absl::OkStatus();
  return InvalidArgument("%s: %s %s", range.name, ReadableNumber(value), problem);
}

std::string WholeRange(int64_t low, int64_t high, const std::string& unit) {
  return absl::StrFormat("use %s to %s %s", Grouped(low), Grouped(high), unit);
}

absl::Status CheckWhole(const char* name, int64_t value, int64_t low, int64_t high,
                        const char* unit) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidArgument("%s: %d is out of range; %s", name, value, WholeRange(low, high, unit));
}

}  // namespace deltamesh
