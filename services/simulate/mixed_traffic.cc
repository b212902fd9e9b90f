#include "services/simulate/mixed_traffic.h"

#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

MixedTraffic::MixedTraffic(std::vector<std::unique_ptr<Traffic>> parts)
    : parts_(std::move(parts)) {}

std::optional<double> MixedTraffic::NextAt() const {
  std::optional<double> first;
  for (const auto& part : parts_) {
    const std::optional<double> at = part->NextAt();
    if (at && (!first || *at < *first)) first = at;
  }
  return first;
}

// A session's and a turn's own numbers are those of its part, times the parts, plus the part's own.
Turn MixedTraffic::Next() {
  const auto first = NextAt();
  for (size_t p = 0; p < parts_.size(); ++p) {
    if (parts_[p]->NextAt() != first) continue;
    Turn turn = parts_[p]->Next();
    turn.source = turn.source * parts_.size() + p;
    if (turn.session != 0) turn.session = turn.session * parts_.size() + p;
    return turn;
  }
  CHECK(false, "no part has the turn that NextAt told of");
  return {};
}

void MixedTraffic::Finished(const Turn& turn, double now) {
  Turn own = turn;
  own.source /= parts_.size();
  own.session /= parts_.size();
  parts_[turn.source % parts_.size()]->Finished(own, now);
}

absl::Status MixedTraffic::status() const {
  for (const auto& part : parts_) RETURN_IF_ERROR(part->status());
  return absl::OkStatus();
}

}  // namespace deltamesh
