// Whose request is placed next while workers have no room for all: deficit round robin between tenants, by
// what requests cost, in tokens.
//
// Between tenants. They stand in a ring. A tenant whose turn it is may place requests worth `turn_tokens`
// and what it had left from before; then the next one's turn comes. So while two tenants wait, what one was
// given in turn never exceeds what the other was by more than turn_tokens + 2 * the costliest request,
// however much one of them asks for.
//
// Within a tenant. A request stands where it would have come had it arrived its handicap later: costly ones
// let cheap ones pass. The handicap is at most `ageing_max`, so nobody is passed by a request that arrived
// more than ageing_max after it.
//
// When the one whose turn it is finds no room, the first requests of other tenants may pass it - they use
// what it cannot, so it costs them no more than they have left - until it has waited ageing_max. From then
// on it holds back what would use the room that it lacks: room gathers, and it is placed. That is everything,
// or, where it lacks a prefill worker alone, only who would use one (RouterCore::Impl::PlaceWaiting).
//
// A state machine: no clock, no threads.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "runtime/base/ids.h"

namespace deltamesh {

struct FairQueueOptions {
  int64_t turn_tokens = 8192;
  absl::Duration ageing_max = absl::Seconds(5);
};

struct QueuedRequest {
  RequestId id;
  std::string tenant;
  int64_t cost = 0;                                // tokens, at least 0
  absl::Time since;                                // when it began to wait
  absl::Duration handicap = absl::ZeroDuration();  // cut to ageing_max
};

class FairQueue {
 public:
  explicit FairQueue(const FairQueueOptions& options) : options_(options) {}

  // The id must not be in the queue.
  void Push(QueuedRequest request);
  // It left without being placed. Unknown ids are ignored.
  void Remove(const RequestId& id);
  // It was placed, at its tenant's cost.
  void Take(const RequestId& id);

  // In the order in which they are to be tried: the one whose turn it is, then the first of other tenants.
  // Bounded: at most kPassersMax of these.
  std::vector<RequestId> Candidates();
  // It holds back those behind it that would use what it lacks.
  bool Aged(const RequestId& id, absl::Time now) const;

  bool empty() const { return by_id_.empty(); }
  int64_t size() const { return static_cast<int64_t>(by_id_.size()); }
  int64_t tokens() const { return tokens_; }
  int64_t tenants() const { return static_cast<int64_t>(ring_.size()); }
  int64_t SizeOf(const std::string& tenant) const;
  int64_t TokensOf(const std::string& tenant) const;
  // Cost that is placed until the last of the tenant's requests, and `more`, are: the others take turns.
  int64_t TokensUntilServed(const std::string& tenant, int64_t more) const;

  static constexpr size_t kPassersMax = 64;

 private:
  using Key = std::pair<absl::Time, uint64_t>;  // arrival and handicap, then order of arrival
  struct Tenant {
    std::map<Key, QueuedRequest> requests;
    int64_t deficit = 0;  // tokens it may still place
    int64_t tokens = 0;   // cost of its requests
  };
  struct Place {
    std::string tenant;
    Key key;
  };

  // The tenant whose turn it is. Asking twice gives the same.
  const std::string& Turn();
  void Drop(const Place& place);

  const FairQueueOptions options_;
  std::map<std::string, Tenant> tenants_;  // with requests
  std::deque<std::string> ring_;           // of these; the front's turn it is
  bool granted_ = false;                   // the front got its turn_tokens
  std::map<RequestId, Place> by_id_;
  int64_t tokens_ = 0;
  uint64_t next_ = 0;
};

}  // namespace deltamesh
