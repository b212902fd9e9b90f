#include "runtime/text/text_stream.h"

#include <algorithm>
#include <utility>

namespace deltamesh {

absl::StatusOr<StopFilter> StopFilter::Create(std::vector<std::string> stops) {
  if (stops.size() > kMaxStopStrings) {
    return InvalidArgument("stop: %d strings; use at most %d", stops.size(), kMaxStopStrings);
  }
  StopFilter filter;
  for (size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty() || stops[i].size() > kMaxStopStringBytes) {
      return InvalidArgument("stop[%d]: %d bytes; use 1 to %d", i, stops[i].size(),
                             kMaxStopStringBytes);
    }
    if (const auto at = FirstInvalidUtf8(stops[i])) {
      return InvalidArgument("stop[%d]: byte %d is not UTF-8; send well-formed UTF-8", i, *at);
    }
    filter.longest_ = std::max(filter.longest_, stops[i].size());
  }
  filter.stops_ = std::move(stops);
  return filter;
}

StopFilter::Match StopFilter::FirstMatch() const {
  Match first = {held_.npos, 0};
  for (size_t i = 0; i < stops_.size(); ++i) {
    const size_t at = held_.find(stops_[i]);
    if (at == held_.npos) continue;
    const bool shorter = at == first.start && stops_[i].size() < stops_[first.stop].size();
    if (first.start == held_.npos || at < first.start || shorter) first = {at, i};
  }
  return first;
}

size_t StopFilter::FirstPartial() const {
  if (longest_ == 0) return held_.size();
  size_t at = held_.size() - std::min(held_.size(), longest_ - 1);
  for (; at < held_.size(); ++at) {
    const std::string_view tail = std::string_view(held_).substr(at);
    for (const std::string& stop : stops_) {
      if (tail.size() < stop.size() && std::string_view(stop).starts_with(tail)) return at;
    }
  }
  return at;
}

std::string StopFilter::StopAt(const Match& match) {
  matched_ = stops_[match.stop];
  held_.resize(match.start);
  return std::exchange(held_, {});
}

std::string StopFilter::Push(std::string_view text) {
  if (stopped()) return "";
  held_ += text;
  const Match match = FirstMatch();
  const size_t partial = FirstPartial();
  // A match counts once nothing that starts before it can still become one.
  if (match.start != held_.npos && match.start <= partial) return StopAt(match);
  std::string out = held_.substr(0, partial);
  held_.erase(0, partial);
  return out;
}

std::string StopFilter::Finish() {
  if (const Match match = FirstMatch(); match.start != held_.npos) return StopAt(match);
  return std::exchange(held_, {});
}

absl::StatusOr<TextStream> TextStream::Create(const Tokenizer& tokenizer, Options options) {
  ASSIGN_OR_RETURN(StopFilter filter, StopFilter::Create(std::move(options.stops)));
  return TextStream(tokenizer, std::move(filter), options.show_special);
}

std::string TextStream::Push(std::span<const TokenId> tokens) {
  std::string text;
  for (const TokenId token : tokens) {
    if (!show_special_ && tokenizer_->is_special(token)) continue;
    text += assembler_.Push(tokenizer_->TokenBytes(token));
  }
  return filter_.Push(text);
}

std::string TextStream::Finish() {
  std::string out = filter_.Push(assembler_.Finish());
  return out += filter_.Finish();
}

}  // namespace deltamesh
