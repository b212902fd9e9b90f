// How fast state moves between workers, in bytes a second.
//
// Most transfers are timed, but a prompt's blocks are sent while it computes, which makes a link look slow
// and never fast: of timed ones the best of late counts. For a single pair of workers that is too little to
// call it slow. So a pair counts as the best of the mesh until its sender has measured the connection with
// nothing to compute meanwhile, as workers do once for each that they open; then as that, or as the best that
// was timed on it since, should the measurement have met a busy minute. A pair that counts as slow is not
// used and so not timed: what was measured rises with each of its sender's other transfers, until it is
// tried.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "services/common/link.h"

namespace deltamesh {

// One life of a worker, as its senders name it.
struct Receiver {
  const std::string& name;
  uint64_t epoch = 0;
};

class LinkRates {
 public:
  static constexpr size_t kReceiversMax = 4096;  // that are known of one sender
  static constexpr double kAssumed = 1e9;        // before any transfer was timed

  // A transfer was timed. `from` may be 0: not known.
  void Moved(LinkId from, const Receiver& to, double rate) {
    if (!IsRate(rate)) return;
    best_ = std::max(kFade * best_, rate);
    const auto sender = senders_.find(from);
    if (sender == senders_.end()) return;
    ++sender->second.moved;
    if (Pair* pair = sender->second.Find(to)) {
      pair->best = std::max(kFade * pair->best, rate);
      pair->since = sender->second.moved;
    }
  }
  // The sender has measured its connection to this worker.
  void Measured(LinkId from, const Receiver& to, double rate) {
    if (!IsRate(rate)) return;
    Sender& sender = senders_[from];
    auto& pairs = sender.pairs;
    if (pairs.size() >= kReceiversMax && !pairs.contains(to.name)) pairs.erase(pairs.begin());
    pairs[to.name] = {.epoch = to.epoch, .measured = rate, .best = 0, .since = sender.moved};
  }
  void Forget(LinkId from) { senders_.erase(from); }

  double Between(LinkId from, const Receiver& to) const {
    const double mesh = known() ? best_ : kAssumed;
    const auto sender = senders_.find(from);
    const Pair* pair = sender == senders_.end() ? nullptr : sender->second.Find(to);
    if (pair == nullptr) return mesh;
    const auto others = static_cast<double>(sender->second.moved - pair->since);
    return std::min(mesh, std::max(pair->best, pair->measured * std::exp(kRise * others)));
  }
  // Some transfer was timed.
  bool known() const { return best_ > 0; }
  // Who sends, and to whom, may make a difference.
  bool differ() const { return !senders_.empty(); }
  int64_t pairs() const {
    int64_t pairs = 0;
    for (const auto& [from, sender] : senders_) pairs += static_cast<int64_t>(sender.pairs.size());
    return pairs;
  }

 private:
  static constexpr double kFade = 0.99;  // with each transfer
  static constexpr double kRise = 0.01;

  struct Pair {
    uint64_t epoch = 0;  // of the receiver
    double measured = 0, best = 0;
    uint64_t since = 0;  // transfers of its sender when it was measured or used last
  };
  struct Sender {
    uint64_t moved = 0;
    absl::flat_hash_map<std::string, Pair> pairs;

    const Pair* Find(const Receiver& to) const {
      const auto pair = pairs.find(to.name);
      return pair == pairs.end() || pair->second.epoch != to.epoch ? nullptr : &pair->second;
    }
    Pair* Find(const Receiver& to) {
      return const_cast<Pair*>(static_cast<const Sender*>(this)->Find(to));
    }
  };

  // What is neither would make sums of seconds that are no numbers.
  static bool IsRate(double rate) { return rate >= 1 && rate <= 1e15; }

  double best_ = 0;  // of late, of all
  absl::flat_hash_map<LinkId, Sender> senders_;
};

}  // namespace deltamesh
