// How fast state moves between workers, in bytes a second.
//
// Most transfers are timed, but a prompt's blocks are sent while it computes, which makes a link look slow
// and never fast: of timed ones the best of late counts. For a single pair of workers that is too little to
// call it slow. So a pair counts as the best of the mesh until its sender has measured the connection with
// nothing to compute meanwhile, as workers do once for each that they open; then as that, or as the best that
// was timed on it since, should the measurement have met a busy minute.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "services/common/link.h"

namespace deltamesh {

class LinkRates {
 public:
  static constexpr size_t kReceiversMax = 4096;  // that are known of one sender
  static constexpr double kAssumed = 1e9;        // before any transfer was timed

  // A transfer was timed. `from` may be 0: not known.
  void Moved(LinkId from, const std::string& to, double rate) {
    if (!IsRate(rate)) return;
    best_ = std::max(kFade * best_, rate);
    if (Pair* pair = Find(from, to)) pair->best = std::max(kFade * pair->best, rate);
  }
  // The sender has measured its connection to the worker of this name.
  void Measured(LinkId from, const std::string& to, double rate) {
    if (!IsRate(rate)) return;
    auto& receivers = pairs_[from];
    if (receivers.size() >= kReceiversMax && !receivers.contains(to)) return;
    receivers[to] = {.measured = rate, .best = 0};
  }
  void Forget(LinkId from) { pairs_.erase(from); }

  double Between(LinkId from, const std::string& to) const {
    const double mesh = known() ? best_ : kAssumed;
    const Pair* pair = const_cast<LinkRates*>(this)->Find(from, to);
    return pair == nullptr ? mesh : std::max(pair->best, std::min(pair->measured, mesh));
  }
  // Some transfer was timed.
  bool known() const { return best_ > 0; }
  // Who sends, and to whom, may make a difference.
  bool differ() const { return !pairs_.empty(); }

 private:
  static constexpr double kFade = 0.99;  // with each transfer

  struct Pair {
    double measured = 0, best = 0;
  };

  static bool IsRate(double rate) { return std::isfinite(rate) && rate > 0; }
  Pair* Find(LinkId from, const std::string& to) {
    const auto sender = pairs_.find(from);
    if (sender == pairs_.end()) return nullptr;
    const auto pair = sender->second.find(to);
    return pair == sender->second.end() ? nullptr : &pair->second;
  }

  double best_ = 0;  // of late, of all
  absl::flat_hash_map<LinkId, absl::flat_hash_map<std::string, Pair>> pairs_;
};

}  // namespace deltamesh
