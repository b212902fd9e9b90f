#include "services/common/flag_range.h"

#include <cmath>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"

namespace deltamesh {

CLI::Validator NumberIn(double low, double high, std::string unit) {
  const auto check = [=](const std::string& text) {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    const std::string problem = OutsideOf(low, high, unit, number ? value : std::nan(""));
    return problem.empty() ? "" : absl::StrFormat("\"%s\" %s", text, problem);
  };
  return CLI::Validator(check,
                        absl::StrFormat("%s to %s", ReadableNumber(low), ReadableNumber(high)));
}

CLI::Validator NumberIn(const NumberRange& range) {
  return NumberIn(range.low, range.high, range.unit);
}

CLI::Validator WholeIn(int64_t low, int64_t high, std::string unit) {
  const auto check = [=](const std::string& text) -> std::string {
    int64_t value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return "";
    double number = 0;
    const bool far = CLI::detail::lexical_cast(text, number) && (number < low || number > high);
    return absl::StrFormat("\"%s\" %s; %s", text, far ? "is out of range" : "is no whole number",
                           WholeRange(low, high, unit));
  };
  return CLI::Validator(check, absl::StrFormat("%s to %s", Grouped(low), Grouped(high)));
}

}  // namespace deltamesh
