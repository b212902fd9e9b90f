// What narrower weights cost: logits of every position of a text against those of the weights as stored.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace deltamesh {

struct QualityOptions {
  std::string model;     // checkpoint folder
  std::string text;      // file with the text to read
  int64_t tokens = 512;  // at most, from its front
  int threads = 2;
  std::string packed_dir = "auto";  // see PackedFolder
  bool json = false;
};

// Prints per width: relative RMS error of the logits, worst error, how often the likeliest token is the
// same, and the perplexity of the text.
absl::Status RunQuality(const QualityOptions& options, std::ostream& out);

}  // namespace deltamesh
