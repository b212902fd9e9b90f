#include "services/simulate/mesh_run.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <queue>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/base/status.h"
#include "services/router/router_core.h"

namespace deltamesh {
namespace {

constexpr double kTickSeconds = 5;
constexpr int64_t kTriesMax = 8;
constexpr int64_t kContextTokens = 1 << 20;
constexpr int64_t kLeastMaxTokens = 4096;  // clients ask for more than they get
constexpr double kNever = std::numeric_limits<double>::infinity();

absl::Time At(double second) { return absl::UnixEpoch() + absl::Seconds(second); }

RouterOptions RouterOf(const MeshRunOptions& o) {
  RouterOptions options;
  options.name = "simulated";
  options.links_max = o.prefill_workers + o.decode_workers;
  options.live_requests_max = int64_t{1} << 24;
  options.waiting_requests_max = int64_t{1} << 20;
  options.waiting_tokens_max = int64_t{1} << 40;
  // Virtual workers send heartbeats only when there is something to say, and are never lost.
  options.lease = absl::Hours(24 * 365 * 100);
  options.disaggregation = o.disaggregation;
  return options;
}

struct Live {
  Turn turn;
  int64_t tries = 0;
  bool answered = false;  // the first token is there, since
  double first_at = 0;
};

struct Event {
  double at;
  uint64_t number;  // order of ties
  enum Kind { kWorker, kArrival, kFetched, kRetry, kTick } kind;
  size_t index = 0;     // of the worker or the transfer
  std::string request;  // to try again

  bool operator<(const Event& other) const {
    return std::pair(other.at, other.number) < std::pair(at, number);
  }
};

class MeshRun {
 public:
  MeshRun(Traffic& traffic, const MeshRunOptions& options)
      : traffic_(traffic), options_(options), router_(RouterOf(options)) {
    const int64_t all = options.prefill_workers + options.decode_workers;
    for (int64_t i = 0; i < all; ++i) AddWorker(i);
  }

  absl::StatusOr<MeshRunResult> Run() {
    for (size_t w = 0; w < workers_.size(); ++w) {
      const LinkId link = workers_[w]->options().link;
      router_.OnLinkOpened(link, At(0));
      router_.OnWorkerMessage(link, workers_[w]->Registration(), At(0));
    }
    RETURN_IF_ERROR(Pump(0));
    for (;;) {
      const double arrival = traffic_.NextAt().value_or(kNever);
      const double event = events_.empty() ? kNever : events_.top().at;
      if (arrival == kNever && live_.empty()) break;
      if (arrival == kNever && event == kNever) {
        return Internal("%d requests are never finished", live_.size());
      }
      const double now = std::min(arrival, event);
      if (arrival <= event) {
        Begin(now);
      } else {
        Event next = events_.top();
        events_.pop();
        Handle(next, now);
      }
      RETURN_IF_ERROR(Pump(now));
      result_.last_second = std::max(result_.last_second, now);
    }
    RETURN_IF_ERROR(traffic_.status());
    return Summary();
  }

 private:
  struct Transfer {
    VirtualHandoff handoff;
    size_t receiver = 0;
    double seconds = 0;
  };
  struct FetchTransfer {
    VirtualFetch fetch;
    size_t receiver = 0;
    bool held = false;
    double asked = 0, seconds = 0;
  };

  void AddWorker(int64_t i) {
    const bool prefill = i < options_.prefill_workers;
    VirtualWorkerOptions o;
    o.role = prefill ? mesh::ROLE_PREFILL : mesh::ROLE_DECODE;
    o.name = absl::StrFormat("%s-%05d", prefill ? "prefill" : "decode",
                             prefill ? i : i - options_.prefill_workers);
    o.link = static_cast<LinkId>(i + 1);
    o.scheduler = prefill ? options_.prefill_scheduler : options_.decode_scheduler;
    o.rates = options_.rates;
    o.slabs = options_.slabs;
    o.context_tokens = kContextTokens;
    // Enough for one of the longest and for as many of usual length as there are slabs.
    o.blocks = (kContextTokens + options_.slabs * 262144) / kPrefixBlockTokens;
    by_name_[o.name] = workers_.size();
    workers_.push_back(std::make_unique<VirtualWorker>(
        std::move(o), options_.policy, options_.cache,
        [this](const std::string& id) -> const Turn& { return live_.at(id)->turn; }));
    scheduled_.push_back(kNever);
    link_free_.push_back(0);
    snapshots_.push_back(0);
    bytes_.push_back(0);
  }

  void Push(double at, Event::Kind kind, size_t index, std::string request = {}) {
    events_.push({.at = at,
                  .number = events_made_++,
                  .kind = kind,
                  .index = index,
                  .request = std::move(request)});
  }

  void Begin(double now) {
    auto live = std::make_unique<Live>();
    live->turn = traffic_.Next();
    std::string id = absl::StrFormat("r%d", result_.requests++);
    live_.emplace(id, std::move(live));
    if (!ticking_) {
      ticking_ = true;
      Push(now + kTickSeconds, Event::kTick, 0);
    }
    Submit(id, now);
  }

  void Submit(const std::string& id, double now) {
    Live& live = *live_.at(id);
    const Turn& turn = live.turn;
    ++live.tries;
    ClientRequest request;
    request.request_id = id;
    request.prompt.resize(static_cast<size_t>(turn.prompt_tokens));
    request.sampling.set_logprobs(-1);
    request.max_tokens = std::max(turn.output_tokens, kLeastMaxTokens);
    request.cache.set_session(turn.session);
    request.cache.mutable_breakpoints()->Assign(turn.breakpoints.begin(), turn.breakpoints.end());
    request.prefix_keys.reserve(static_cast<size_t>(turn.prompt_blocks()));
    for (int64_t i = 0; i < turn.prompt_blocks(); ++i) {
      request.prefix_keys.push_back((*turn.keys)[static_cast<size_t>(i)].index());
    }
    const absl::Status status = router_.Submit(std::move(request), At(now));
    if (!status.ok()) Refused(id, status, now);
  }

  // As a client that heeds retry-after and gives up some time.
  void Refused(const std::string& id, const absl::Status& status, double now) {
    Live& live = *live_.at(id);
    const bool again = absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
    if (again && !live.answered && live.tries < kTriesMax) {
      ++result_.retries;
      Push(now + absl::ToDoubleSeconds(router_.RetryAfter()), Event::kRetry, 0, id);
      return;
    }
    ++result_.failed;
    MeshFailures& failures = result_.failures[status.code()];
    if (failures.requests++ == 0) failures.first = absl::StrFormat("%s: %s", id, status.message());
    End(id, now);
  }

  void End(const std::string& id, double now) {
    const std::unique_ptr<Live> live = std::move(live_.extract(id).mapped());
    traffic_.Finished(live->turn, now);
  }

  void Handle(Event& event, double now) {
    switch (event.kind) {
      case Event::kWorker:
        scheduled_[event.index] = kNever;
        workers_[event.index]->Advance(now);
        return Touch(event.index);
      case Event::kArrival: {
        const Transfer transfer = std::move(transfers_.extract(event.index).mapped());
        workers_[transfer.receiver]->OnHandoffArrived(transfer.handoff, transfer.seconds, now);
        return Touch(transfer.receiver);
      }
      case Event::kFetched: {
        const FetchTransfer t = std::move(fetches_.extract(event.index).mapped());
        workers_[t.receiver]->OnFetched(t.fetch, t.held, now - t.asked, t.seconds, now);
        return Touch(t.receiver);
      }
      case Event::kRetry:
        return Submit(event.request, now);
      case Event::kTick:
        router_.Tick(At(now));
        ticking_ = !live_.empty();
        if (ticking_) Push(now + kTickSeconds, Event::kTick, 0);
        return;
    }
  }

  void Touch(size_t worker) { touched_.push_back(worker); }

  // Messages to and fro until nobody has anything to say.
  absl::Status Pump(double now) {
    for (;;) {
      while (!touched_.empty()) {
        const size_t w = touched_.back();
        touched_.pop_back();
        Drain(w, now);
      }
      std::vector<RouterAction> actions = router_.TakeActions();
      if (actions.empty()) return absl::OkStatus();
      for (RouterAction& action : actions) RETURN_IF_ERROR(Do(action, now));
    }
  }

  void Drain(size_t w, double now) {
    VirtualWorker& worker = *workers_[w];
    for (const VirtualHandoff& handoff : worker.TakeHandoffs()) Send(w, handoff, now);
    for (const VirtualFetch& fetch : worker.TakeFetches()) Fetch(w, fetch, now);
    for (const mesh::WorkerMessage& message : worker.TakeMessages()) {
      router_.OnWorkerMessage(worker.options().link, message, At(now));
    }
    CountCache(w);
    const double next = worker.NextAt().value_or(kNever);
    if (next < scheduled_[w]) {
      scheduled_[w] = next;
      Push(next, Event::kWorker, w);
    }
  }

  void CountCache(size_t w) {
    PrefixTree& tree = workers_[w]->cache().tree();
    snapshots_total_ +=
        tree.stats().snapshots - std::exchange(snapshots_[w], tree.stats().snapshots);
    bytes_total_ += tree.bytes() - std::exchange(bytes_[w], tree.bytes());
    result_.snapshots_peak = std::max(result_.snapshots_peak, snapshots_total_);
    result_.cache_bytes_peak = std::max(result_.cache_bytes_peak, bytes_total_);
  }

  // Latents leave while the prompt computes, the state after it; a link serves one transfer at a time.
  void Send(size_t sender, const VirtualHandoff& handoff, double now) {
    const size_t receiver = by_name_.at(handoff.receiver);
    const double rate = options_.link_bytes_per_second;
    const double hidden =
        std::min(static_cast<double>(handoff.latent_bytes) / rate, handoff.compute_seconds);
    const double begin = std::max({now, link_free_[sender], link_free_[receiver]});
    const double end =
        begin + options_.link_seconds + static_cast<double>(handoff.bytes) / rate - hidden;
    link_free_[sender] = link_free_[receiver] = end;
    result_.moved_bytes += handoff.bytes;
    ++result_.handoffs;
    const size_t number = transfers_made_++;
    transfers_[number] = {handoff, receiver, end - begin + hidden};
    Push(end, Event::kArrival, number);
  }

  // What is asked for leaves between two steps of who holds it.
  void Fetch(size_t receiver, const VirtualFetch& fetch, double now) {
    const size_t sender = by_name_.at(fetch.source);
    FetchTransfer t = {.fetch = fetch, .receiver = receiver, .asked = now};
    const double begin = std::max(workers_[sender]->LooksAround(now) + options_.link_seconds,
                                  std::max(link_free_[sender], link_free_[receiver]));
    t.held = workers_[sender]->Holds(fetch.request, fetch.position);
    double end = begin + options_.link_seconds;
    if (t.held) {
      t.seconds = static_cast<double>(fetch.bytes) / options_.link_bytes_per_second;
      end += t.seconds;
      link_free_[sender] = link_free_[receiver] = end;
      result_.moved_bytes += fetch.bytes;
      ++result_.fetches;
    }
    const size_t number = transfers_made_++;
    fetches_[number] = std::move(t);
    Push(end, Event::kFetched, number);
  }

  absl::Status Do(RouterAction& action, double now) {
    if (const auto* send = std::get_if<SendToWorker>(&action)) {
      const size_t w = static_cast<size_t>(send->link - 1);
      workers_[w]->OnMessage(send->message, now);
      Touch(w);
    } else if (const auto* close = std::get_if<CloseLink>(&action)) {
      return Annotate(close->status, "the router closed a virtual worker's link");
    } else if (const auto* tokens = std::get_if<ClientTokens>(&action)) {
      Live& live = *live_.at(tokens->request_id);
      if (!std::exchange(live.answered, true)) {
        live.first_at = now;
        result_.first_token.Add(now - live.turn.at);
      }
    } else if (const auto* finished = std::get_if<ClientFinished>(&action)) {
      result_.prompt_tokens += finished->usage.prompt_tokens;
      result_.restored_tokens += finished->usage.cached_tokens;
      const Live& live = *live_.at(finished->request_id);
      result_.completion.Add(now - live.turn.at);
      if (live.turn.output_tokens > 1) {
        const auto gaps = static_cast<double>(live.turn.output_tokens - 1);
        result_.token_gap.Add((now - live.first_at) / gaps);
      }
      End(finished->request_id, now);
    } else if (const auto* failed = std::get_if<ClientFailed>(&action)) {
      Refused(failed->request_id, failed->status, now);
    }
    return absl::OkStatus();
  }

  MeshRunResult Summary() {
    result_.snapshot_bytes_peak = result_.snapshots_peak * options_.cache.snapshot;
    const RouterCounters& counters = router_.counters();
    result_.placed_prefill = static_cast<int64_t>(counters.placed_prefill);
    result_.placed_append = static_cast<int64_t>(counters.placed_append);
    result_.placed_alone = static_cast<int64_t>(counters.placed_alone);
    result_.placed_fetch = static_cast<int64_t>(counters.placed_fetch);
    double busy[2] = {0, 0};
    for (const auto& worker : workers_) {
      result_.computed_tokens += worker->computed_tokens();
      result_.superseded += static_cast<int64_t>(worker->cache().tree().stats().superseded);
      result_.evicted += static_cast<int64_t>(worker->cache().tree().stats().evicted);
      busy[worker->options().role == mesh::ROLE_DECODE] += worker->busy_seconds();
    }
    const double time = std::max(result_.last_second, 1e-9);
    const auto share = [time](double seconds, int64_t workers) {
      return workers > 0 ? seconds / (time * static_cast<double>(workers)) : 0;
    };
    result_.prefill_busy = share(busy[0], options_.prefill_workers);
    result_.decode_busy = share(busy[1], options_.decode_workers);
    return std::move(result_);
  }

  Traffic& traffic_;
  const MeshRunOptions options_;
  RouterCore router_;
  std::vector<std::unique_ptr<VirtualWorker>> workers_;  // link 1 first
  absl::flat_hash_map<std::string, size_t> by_name_;
  std::vector<double> scheduled_, link_free_;
  std::vector<int64_t> snapshots_, bytes_;
  int64_t snapshots_total_ = 0, bytes_total_ = 0;
  absl::flat_hash_map<std::string, std::unique_ptr<Live>> live_;
  std::map<size_t, Transfer> transfers_;
  std::map<size_t, FetchTransfer> fetches_;
  size_t transfers_made_ = 0;
  std::priority_queue<Event> events_;
  uint64_t events_made_ = 0;
  std::vector<size_t> touched_;
  bool ticking_ = false;
  MeshRunResult result_;
};

}  // namespace

double MeshRunResult::hit_rate() const {
  return prompt_tokens > 0
             ? static_cast<double>(restored_tokens) / static_cast<double>(prompt_tokens)
             : 0;
}

double MeshRunResult::recomputed_per_request() const {
  const int64_t finished = requests - failed;
  return finished > 0
             ? static_cast<double>(prompt_tokens - restored_tokens) / static_cast<double>(finished)
             : 0;
}

absl::StatusOr<MeshRunResult> RunMesh(Traffic& traffic, const MeshRunOptions& options) {
  if (options.decode_workers < 1) {
    return InvalidArgument("decode-workers: %d; a mesh needs at least 1", options.decode_workers);
  }
  if (options.policy.free_state) {
    return InvalidArgument("policy: bound has no workers; it is run as one cache");
  }
  return MeshRun(traffic, options).Run();
}

}  // namespace deltamesh
