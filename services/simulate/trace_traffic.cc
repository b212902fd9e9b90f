#include "services/simulate/trace_traffic.h"

#include <algorithm>
#include <utility>

#include "nlohmann/json.hpp"
#include "runtime/base/status.h"
#include "runtime/model/json_reader.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<TraceTraffic>> TraceTraffic::Open(const std::string& path) {
  std::unique_ptr<TraceTraffic> trace(new TraceTraffic(path));
  if (!trace->file_) return NotFound("%s: cannot be opened; name a trace of JSON lines", path);
  trace->ReadLine();
  RETURN_IF_ERROR(trace->status_);
  if (!trace->next_) return InvalidArgument("%s: has no requests", path);
  return trace;
}

TraceTraffic::TraceTraffic(std::string path) : path_(std::move(path)), file_(path_) {}

absl::StatusOr<TraceTraffic::Line> TraceTraffic::Parse(const std::string& text) const {
  const std::string where = absl::StrFormat("%s:%d", path_, line_);
  ASSIGN_OR_RETURN(const nlohmann::json parsed, ParseStrictJson(text, where));
  JsonReader reader(parsed, where, "");
  Line line;
  line.at = reader.Number("timestamp", 0, 1e15) / 1000;
  line.input = reader.Int("input_length", 1, kPromptTokensMax);
  line.output = std::max<int64_t>(1, reader.Int("output_length", 0, kPromptTokensMax));
  for (const int64_t id : reader.Ints("hash_ids", 0, int64_t{1} << 56)) {
    line.names.push_back(static_cast<uint64_t>(id));
  }
  RETURN_IF_ERROR(reader.status());
  const int64_t blocks = (line.input + kTraceBlockTokens - 1) / kTraceBlockTokens;
  const auto named = static_cast<int64_t>(line.names.size());
  if (named > blocks || named < blocks - 1) {
    return InvalidArgument("%s: %d hash_ids for %d tokens, which are %d blocks of %d", where, named,
                           line.input, blocks, kTraceBlockTokens);
  }
  return line;
}

void TraceTraffic::ReadLine() {
  const double before = next_ ? next_->at : 0;
  next_.reset();
  std::string text;
  while (std::getline(file_, text)) {
    ++line_;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (static_cast<int64_t>(text.size()) > kLineBytesMax) {
      status_ = InvalidArgument("%s:%d: %d bytes in a line; at most %d", path_, line_, text.size(),
                                kLineBytesMax);
      return;
    }
    absl::StatusOr<Line> line = Parse(text);
    if (!line.ok()) {
      status_ = line.status();
    } else if (line->at < before) {
      status_ = InvalidArgument("%s:%d: timestamp %g goes back; sort the trace", path_, line_,
                                line->at * 1000);
    } else {
      next_ = *std::move(line);
    }
    return;
  }
}

std::optional<double> TraceTraffic::NextAt() const {
  if (!next_) return std::nullopt;
  return next_->at;
}

Turn TraceTraffic::Next() {
  uint64_t slot = live_.size();
  if (free_.empty()) {
    live_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  live_[slot] = std::make_unique<ContentPath>();
  ContentPath& text = *live_[slot];
  int64_t left = next_->input;
  for (const uint64_t name : next_->names) {
    text.Append(name << 1, std::min(left, kTraceBlockTokens));
    left -= std::min(left, kTraceBlockTokens);
  }
  const uint64_t own = (uint64_t{5} << 60) | made_++ << 2;
  text.Append(own | 1, left);  // tokens that no name covers are nobody else's
  text.Append(own | 3, next_->output);
  Turn turn;
  turn.at = next_->at;
  turn.prompt_tokens = next_->input;
  turn.output_tokens = next_->output;
  turn.answer_seconds = 2 + static_cast<double>(turn.output_tokens) * 0.02;
  turn.keys = &text.keys();
  turn.source = slot;
  ReadLine();
  return turn;
}

void TraceTraffic::Finished(const Turn& turn, double) {
  live_[turn.source].reset();
  free_.push_back(turn.source);
}

}  // namespace deltamesh
