#include "services/common/quantities.h"

#include <cmath>
#include <iterator>

#include "absl/strings/str_format.h"

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

}  // namespace deltamesh
