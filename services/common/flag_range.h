// Checks for numbers of flags, from `low` to `high`, both included: what they refuse is told with value,
// range and unit. NaN and infinity are refused. WholeIn is for flags that hold integers.
#pragma once

#include <cstdint>
#include <string>

#include "services/common/quantities.h"

namespace CLI {
class Validator;
}

namespace deltamesh {

CLI::Validator NumberIn(const NumberRange& range);
CLI::Validator NumberIn(double low, double high, std::string unit);
CLI::Validator WholeIn(int64_t low, int64_t high, std::string unit);

}  // namespace deltamesh
