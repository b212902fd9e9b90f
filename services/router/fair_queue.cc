#include "services/router/fair_queue.h"

#include <algorithm>

#include "runtime/base/status.h"

namespace deltamesh {

void FairQueue::Push(QueuedRequest request) {
  CHECK(!by_id_.contains(request.id) && request.cost >= 0, "%s of %d tokens", request.id,
        request.cost);
  Tenant& tenant = tenants_[request.tenant];
  if (tenant.requests.empty()) ring_.push_back(request.tenant);
  const Key key = {request.since + std::min(request.handicap, options_.ageing_max), next_++};
  by_id_[request.id] = {request.tenant, key};
  tenant.tokens += request.cost;
  tokens_ += request.cost;
  tenant.requests.emplace(key, std::move(request));
}

void FairQueue::Drop(const Place& place) {
  const auto found = tenants_.find(place.tenant);
  Tenant& tenant = found->second;
  const auto at = tenant.requests.find(place.key);
  tokens_ -= at->second.cost;
  tenant.tokens -= at->second.cost;
  tenant.requests.erase(at);
  if (!tenant.requests.empty()) return;
  // What it did not use of its turn is not kept for later.
  if (ring_.front() == place.tenant) granted_ = false;
  std::erase(ring_, place.tenant);
  tenants_.erase(found);
}

void FairQueue::Remove(const RequestId& id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  const Place place = found->second;
  by_id_.erase(found);
  Drop(place);
}

void FairQueue::Take(const RequestId& id) {
  const auto found = by_id_.find(id);
  CHECK(found != by_id_.end(), "%s does not wait", id);
  const bool passes = found->second.tenant != Turn();
  Tenant& tenant = tenants_.at(found->second.tenant);
  tenant.deficit -= tenant.requests.at(found->second.key).cost;
  if (passes) tenant.deficit = std::max<int64_t>(tenant.deficit, 0);
  Remove(id);
}

const std::string& FairQueue::Turn() {
  while (true) {
    Tenant& tenant = tenants_.at(ring_.front());
    if (!std::exchange(granted_, true)) tenant.deficit += options_.turn_tokens;
    if (tenant.deficit >= tenant.requests.begin()->second.cost) return ring_.front();
    ring_.push_back(std::move(ring_.front()));
    ring_.pop_front();
    granted_ = false;
  }
}

std::vector<RequestId> FairQueue::Candidates() {
  std::vector<RequestId> out;
  if (empty()) return out;
  Turn();
  for (const std::string& name : ring_) {
    if (out.size() > kPassersMax) break;
    out.push_back(tenants_.at(name).requests.begin()->second.id);
  }
  return out;
}

bool FairQueue::Aged(const RequestId& id, absl::Time now) const {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return false;
  const QueuedRequest& request = tenants_.at(found->second.tenant).requests.at(found->second.key);
  return now - request.since >= options_.ageing_max;
}

int64_t FairQueue::SizeOf(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : static_cast<int64_t>(found->second.requests.size());
}

int64_t FairQueue::TokensOf(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.tokens;
}

int64_t FairQueue::TokensUntilServed(const std::string& tenant, int64_t more) const {
  const int64_t own = TokensOf(tenant) + more;
  int64_t sum = own;
  for (const auto& [name, other] : tenants_) {
    if (name != tenant) sum += std::min(other.tokens, own);
  }
  return sum;
}

}  // namespace deltamesh
