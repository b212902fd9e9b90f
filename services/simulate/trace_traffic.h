// Traces in Mooncake's format: one JSON object a line,
//   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}
// where hash_ids name blocks of 512 tokens of the prompt, equal names meaning equal prefixes up to there. The
// last may name a shorter block. Times must not go back. Read line by line: a trace may be of any length.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/simulate/content_path.h"
#include "services/simulate/traffic.h"

namespace deltamesh {

class TraceTraffic final : public Traffic {
 public:
  static constexpr int64_t kTraceBlockTokens = 512;
  static constexpr int64_t kLineBytesMax = int64_t{16} << 20;
  static constexpr int64_t kPromptTokensMax = int64_t{1} << 24;

  static absl::StatusOr<std::unique_ptr<TraceTraffic>> Open(const std::string& path);

  std::optional<double> NextAt() const override;
  Turn Next() override;
  void Finished(const Turn& turn, double now) override;
  absl::Status status() const override { return status_; }

 private:
  struct Line {
    double at = 0;
    int64_t input = 0, output = 0;
    std::vector<uint64_t> names;
  };
  explicit TraceTraffic(std::string path);
  void ReadLine();
  absl::StatusOr<Line> Parse(const std::string& text) const;

  const std::string path_;
  std::ifstream file_;
  int64_t line_ = 0;  // of the one in next_, from 1
  std::optional<Line> next_;
  absl::Status status_;
  std::vector<std::unique_ptr<ContentPath>> live_;  // by Turn::source
  std::vector<uint64_t> free_;
  uint64_t made_ = 0;
};

}  // namespace deltamesh
