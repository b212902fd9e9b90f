// What who computes a prompt may fetch from others first: a part of RouterCore::Impl.
#include <algorithm>
#include <tuple>

#include "runtime/base/log.h"
#include "services/common/store_read.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {
namespace {

// From asking to the first byte and from the last to computing, beside what is estimated.
constexpr double kFetchSeconds = 0.002;
// Holders of states of the same depth that are offered: the second is for the first itself.
constexpr int kOffersOfDepthMax = 2;
// Of one request by decode workers. Whoever has it then computes.
constexpr size_t kFetchTriesMax = 2;

// Until the worker's thread, which also computes its steps, looks around.
double StepSeconds(const Worker& worker) {
  const WorkerLoad& load = worker.load;
  const double rate =
      load.prompt_tokens_per_second > 0 ? load.prompt_tokens_per_second : load.tokens_per_second;
  if (rate <= 0) return 0;
  const auto step = static_cast<int64_t>(worker.registration.capacity().step_tokens());
  return static_cast<double>(std::min(load.waiting_tokens, step)) / rate;
}

}  // namespace

int64_t RouterCore::Impl::ReadBytes(const Worker& worker, const IndexMatch& match,
                                    SnapshotBlocks snapshot) {
  const mesh::Capacity& c = worker.registration.capacity();
  return static_cast<int64_t>(c.slab_bytes()) +
         (snapshot.value() - match.warm.value()) * static_cast<int64_t>(c.block_bytes());
}

LatentBlocks RouterCore::Impl::WarmLatents(const Worker& worker, const IndexMatch& match) {
  return worker.registration.session_store() ? LatentBlocks(match.warm.value()) : match.latents;
}

double RouterCore::Impl::MoveSeconds(const Worker& from, const Worker& to, int64_t bytes) const {
  return static_cast<double>(bytes) / links.Between(from.link, ReceiverOf(to));
}

// A few are enough: who holds the most, and of these who can send it the soonest.
void RouterCore::Impl::FindFetchSources(const RouterRequest& r) {
  fetch_from_.clear();
  if (r.fetched_in_vain.size() >= kFetchTriesMax) return;
  for (const auto& [link, match] : r.held) {
    if (std::count(r.fetched_in_vain.begin(), r.fetched_in_vain.end(), link) > 0) continue;
    const Worker* worker = members.Find(link);
    if (worker == nullptr || !worker->registration.state_fetch()) continue;
    const double step = StepSeconds(*worker);
    if (match.warm.value() > 0) {
      fetch_from_.push_back({.worker = worker, .blocks = match.warm.value(), .delay = step});
    }
    if (!match.cold()) continue;
    const double read = StoreReadSeconds({.bytes = ReadBytes(*worker, match, match.snapshot)},
                                         worker->load.store_bytes_per_second);
    fetch_from_.push_back(
        {.worker = worker, .blocks = match.snapshot.value(), .delay = step + read, .cold = true});
  }
  const auto better = [](const FetchFrom& a, const FetchFrom& b) {
    return std::tuple(-a.blocks, a.delay, a.worker->link) <
           std::tuple(-b.blocks, b.delay, b.worker->link);
  };
  std::sort(fetch_from_.begin(), fetch_from_.end(), better);
  // Of many that hold the same, as those that share a folder do, the others cannot be better.
  size_t kept = 0;
  int of_depth = 0;
  for (size_t i = 0; i < fetch_from_.size() && kept < kFetchOffersMax; ++i) {
    of_depth = kept > 0 && fetch_from_[kept - 1].blocks == fetch_from_[i].blocks ? of_depth + 1 : 1;
    if (of_depth <= kOffersOfDepthMax) fetch_from_[kept++] = fetch_from_[i];
  }
  // Deeper ones on disks must not hide the deepest in memory, which may be there sooner.
  const auto warm = [](const FetchFrom& from) { return !from.cold; };
  const auto kept_end = fetch_from_.begin() + static_cast<ptrdiff_t>(kept);
  if (std::none_of(fetch_from_.begin(), kept_end, warm)) {
    const auto first = std::find_if(kept_end, fetch_from_.end(), warm);
    if (first != fetch_from_.end()) *(kept_end - 1) = *first;
  }
  fetch_from_.resize(kept);
}

void RouterCore::Impl::AddFetches(const Worker& worker, const IndexMatch& match,
                                  Holding& holding) const {
  if (!worker.registration.state_fetch()) return;
  const mesh::Capacity& c = worker.registration.capacity();
  for (size_t i = 0; i < fetch_from_.size(); ++i) {
    const FetchFrom& from = fetch_from_[i];
    // What lies on its own disk is slower than memory elsewhere, or not: that is for the price to say.
    if (from.worker == &worker || from.blocks <= match.warm.value()) continue;
    FetchOffer& offer = holding.fetches[holding.fetch_count++];
    offer.source = i;
    offer.tokens = from.blocks * BlockTokens();
    offer.bytes = static_cast<int64_t>(c.slab_bytes()) +
                  std::max<int64_t>(0, from.blocks - WarmLatents(worker, match).value()) *
                      static_cast<int64_t>(c.block_bytes());
    offer.seconds = kFetchSeconds + from.delay + MoveSeconds(*from.worker, worker, offer.bytes);
    offer.cold = from.cold;
  }
}

void RouterCore::Impl::OnFetchGaveUp(RouterRequest& r, absl::Time now) {
  r.fetched_in_vain.push_back(r.fetch_from);
  LogInfo("request.fetched_in_vain", {{"request", r.spec.request_id},
                                      {"attempt", r.attempt},
                                      {"decode", r.decode_name},
                                      {"tries", r.fetched_in_vain.size()}});
  Requeue(r, now);
}

void RouterCore::Impl::AwaitFetch(const RouterRequest& r, LinkId by) {
  if (Decision* d = decisions.At(r.decision)) d->fetches_open.push_back({by, r.attempt});
}

std::optional<mesh::FetchSource> RouterCore::Impl::FetchSourceOf(const RouterRequest& r) const {
  const Worker* from = r.fetch_from == 0 ? nullptr : members.Find(r.fetch_from);
  if (from == nullptr) return std::nullopt;
  mesh::FetchSource source;
  source.set_worker(from->registration.name());
  source.set_epoch(from->registration.epoch());
  source.set_transport_address(from->registration.transport_address());
  source.set_position(static_cast<uint64_t>(r.fetch_tokens));
  return source;
}

}  // namespace deltamesh
