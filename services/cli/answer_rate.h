// How fast an answer's text came, for the line of figures below it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"

namespace deltamesh {

// A shorter time is that of a packet and of threads waking up, not of the model: an answer that arrives in
// one burst would show millions of tokens a second.
inline constexpr absl::Duration kAnswerRateMin = absl::Milliseconds(100);

// "12.3 tokens/s", of which the first came at the beginning of `rest`; empty when that says nothing.
inline std::string DescribeAnswerRate(int64_t tokens, absl::Duration rest) {
  if (tokens < 2 || rest < kAnswerRateMin) return "";
  return absl::StrFormat("%.1f tokens/s",
                         static_cast<double>(tokens - 1) / absl::ToDoubleSeconds(rest));
}

}  // namespace deltamesh
