// What narrower weights and activations cost: logits of every position of a text against those of the
// weights as stored with float activations.
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
  // What is compared with weights as stored and float activations.
  std::string weights = "8bit";
  std::string activations = "float";
  std::string packed_dir = "auto";  // see PackedFolder
  bool json = false;
};

// Prints: relative RMS error of the logits, worst error, how often the likeliest token is the
// same, and the perplexity of the text.
absl::Status RunQuality(const QualityOptions& options, std::ostream& out);

}  // namespace deltamesh
