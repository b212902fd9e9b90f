#include "services/router/router_metrics.h"

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"

namespace deltamesh {
namespace {

constexpr char kWorkers[] = "deltamesh_workers";
constexpr char kWorkersHelp[] = "Workers registered with this router, by role.";
constexpr char kStores[] = "deltamesh_session_stores";
constexpr char kStoresHelp[] = "Workers with a store, connected or away and expected back.";

// Of states: from a small one to that of a million tokens.
std::vector<double> StateBytesBuckets() {
  std::vector<double> bounds;
  for (double bound = 64 << 10; bound <= 64e9; bound *= 4) bounds.push_back(bound);
  return bounds;
}

}  // namespace

RouterMetrics::RouterMetrics(Metrics* m)
    : metrics_(m),
      prompt_tokens_(
          m->Counter("deltamesh_prompt_tokens_total", "Prompt tokens of accepted requests.")),
      generated_tokens_(m->Counter("deltamesh_generated_tokens_total", "Tokens sent to clients.")),
      ttft_(m->Histogram("deltamesh_ttft_seconds", "Admission to first token.", LatencyBuckets())),
      itl_(m->Histogram("deltamesh_itl_seconds", "Gap between tokens after the first.",
                        LatencyBuckets())),
      request_(m->Histogram("deltamesh_request_seconds", "Admission to the end of the answer.",
                            LatencyBuckets())),
      waiting_(m->Gauge("deltamesh_waiting_requests", "Requests no worker has room for yet.")),
      waiting_cost_(m->Gauge("deltamesh_queue_tokens",
                             "What waiting requests cost: tokens to compute, as estimated.")),
      tenants_(m->Gauge("deltamesh_queue_tenants", "Tenants with waiting requests.")),
      drain_(m->Gauge("deltamesh_queue_drain_seconds",
                      "Until all waiting requests have their place, as estimated; 0: unknown.")),
      live_(m->Gauge("deltamesh_live_requests", "Requests admitted and not ended.")),
      mailbox_(m->Gauge("deltamesh_mailbox_events", "Events waiting for the router's thread.")),
      ready_(m->Gauge("deltamesh_ready", "1 when a new request could be placed.")),
      prefill_(m->Gauge(kWorkers, kWorkersHelp, {{"worker_role", "prefill"}})),
      decode_(m->Gauge(kWorkers, kWorkersHelp, {{"worker_role", "decode"}})),
      expert_(m->Gauge(kWorkers, kWorkersHelp, {{"worker_role", "expert"}})),
      prefix_blocks_(m->Gauge("deltamesh_prefix_index_blocks",
                              "Blocks in the prefix index, once for each 64 workers.")),
      prefix_objects_(
          m->Gauge("deltamesh_prefix_index_objects",
                   "States in object stores that workers know of, once for each 64 workers.")),
      prefix_bytes_(m->Gauge("deltamesh_prefix_index_bytes", "Memory of the prefix index.")),
      links_measured_(m->Gauge("deltamesh_links_measured",
                               "Pairs of workers of which one has measured its way to the other.")),
      prefix_unknown_(m->Gauge("deltamesh_prefix_unknown_workers",
                               "Workers whose prefixes are not all told yet.")),
      sessions_(m->Gauge("deltamesh_sessions", "Sessions remembered.")),
      session_bytes_(m->Gauge("deltamesh_session_bytes", "Memory of the sessions remembered.")),
      session_calls_(
          m->Gauge("deltamesh_session_calls", "Calls about sessions that are going on.")),
      sessions_unsettled_(m->Gauge("deltamesh_sessions_unsettled",
                                   "Sessions of which stores may have older records.")),
      stores_(m->Gauge(kStores, kStoresHelp, {{"state", "connected"}})),
      stores_away_(m->Gauge(kStores, kStoresHelp, {{"state", "away"}})) {
  FetchesOf("OK");
}

void RouterMetrics::Accepted(int64_t prompt_tokens) {
  prompt_tokens_.Increment(static_cast<double>(prompt_tokens));
}

void RouterMetrics::Ended(absl::StatusCode code, absl::Duration after) {
  prometheus::Counter*& counter = ended_[code];
  if (counter == nullptr) {
    counter = &metrics_->Counter("deltamesh_requests_total", "Requests ended, by status code.",
                                 {{"code", absl::StatusCodeToString(code)}});
  }
  counter->Increment();
  if (code == absl::StatusCode::kOk) request_.Observe(absl::ToDoubleSeconds(after));
}

void RouterMetrics::FirstToken(absl::Duration after) {
  ttft_.Observe(absl::ToDoubleSeconds(after));
}

void RouterMetrics::NextTokens(absl::Duration gap, int64_t tokens) {
  if (tokens > 0) itl_.Observe(absl::ToDoubleSeconds(gap) / static_cast<double>(tokens));
}

void RouterMetrics::Generated(int64_t tokens) {
  generated_tokens_.Increment(static_cast<double>(tokens));
}

RouterMetrics::Fetches& RouterMetrics::FetchesOf(const std::string& reason) {
  Fetches& fetches = fetches_[reason];
  if (fetches.seconds == nullptr) {
    fetches.seconds = &metrics_->Histogram("deltamesh_fetch_seconds",
                                           "Fetches of states, from asking to the end, by reason.",
                                           LatencyBuckets(), {{"reason", reason}});
    fetches.bytes =
        &metrics_->Histogram("deltamesh_fetch_bytes", "Payload of fetched states, by reason.",
                             StateBytesBuckets(), {{"reason", reason}});
  }
  return fetches;
}

void RouterMetrics::Fetched(const FetchSeen& fetch) {
  const Fetches& fetches = FetchesOf(fetch.reason);
  fetches.seconds->Observe(fetch.seconds);
  fetches.bytes->Observe(static_cast<double>(fetch.bytes));
}

CounterFollower& RouterMetrics::Follow(const std::string& name, const std::string& help,
                                       const MetricLabels& labels) {
  std::string key = name;
  for (const auto& [label, value] : labels) key += "|" + value;
  const auto it = followers_.find(key);
  if (it != followers_.end()) return it->second;
  return followers_.emplace(key, CounterFollower(metrics_->Counter(name, help, labels)))
      .first->second;
}

void RouterMetrics::Update(const RouterCounters& c, const RouterGauges& g, bool ready,
                           size_t mailbox) {
  waiting_.Set(static_cast<double>(g.waiting));
  waiting_cost_.Set(static_cast<double>(g.waiting_tokens));
  tenants_.Set(static_cast<double>(g.waiting_tenants));
  drain_.Set(g.drain_seconds);
  live_.Set(static_cast<double>(g.live));
  mailbox_.Set(static_cast<double>(mailbox));
  ready_.Set(ready ? 1 : 0);
  prefill_.Set(static_cast<double>(g.prefill_workers));
  decode_.Set(static_cast<double>(g.decode_workers));
  expert_.Set(static_cast<double>(g.expert_workers));
  prefix_blocks_.Set(static_cast<double>(g.prefix_blocks));
  prefix_objects_.Set(static_cast<double>(g.prefix_objects));
  prefix_bytes_.Set(static_cast<double>(g.prefix_bytes));
  links_measured_.Set(static_cast<double>(g.links_measured));
  prefix_unknown_.Set(static_cast<double>(g.prefix_unknown));
  sessions_.Set(static_cast<double>(g.sessions));
  session_bytes_.Set(static_cast<double>(g.session_bytes));
  session_calls_.Set(static_cast<double>(g.session_calls));
  sessions_unsettled_.Set(static_cast<double>(g.sessions_unsettled));
  stores_.Set(static_cast<double>(g.stores));
  stores_away_.Set(static_cast<double>(g.stores_away));
  const auto follow = [this](const char* name, const char* help, double value,
                             const MetricLabels& labels = {}) {
    Follow(name, help, labels).Set(value);
  };
  const char* lost = "Workers lost, by role.";
  follow("deltamesh_workers_lost_total", lost, static_cast<double>(c.prefill_lost),
         {{"worker_role", "prefill"}});
  follow("deltamesh_workers_lost_total", lost, static_cast<double>(c.decode_lost),
         {{"worker_role", "decode"}});
  follow("deltamesh_workers_lost_total", lost, static_cast<double>(c.expert_lost),
         {{"worker_role", "expert"}});
  follow("deltamesh_leases_expired_total", "Workers lost by silence.",
         static_cast<double>(c.leases_expired));
  follow("deltamesh_registrations_total", "Registrations accepted.",
         static_cast<double>(c.registered));
  follow("deltamesh_registrations_refused_total", "Registrations refused.",
         static_cast<double>(c.registrations_refused));
  follow("deltamesh_prefill_retries_total", "Hand-offs tried again.",
         static_cast<double>(c.prefill_retries));
  follow("deltamesh_placement_refusals_total", "Placements that a worker refused as full.",
         static_cast<double>(c.placement_refusals));
  follow("deltamesh_handoff_received_bytes_total", "State bytes of complete hand-offs.",
         static_cast<double>(c.handoff_bytes));
  follow("deltamesh_handoff_received_seconds_total", "First segment to last, complete hand-offs.",
         c.handoff_seconds);
  follow("deltamesh_queue_seconds_total", "Time that requests waited for their place, summed.",
         c.waited_seconds);
  follow("deltamesh_stale_messages_total",
         "Messages of ended requests, old attempts, replaced links.",
         static_cast<double>(c.stale_messages));
  follow("deltamesh_cached_tokens_total",
         "Prompt tokens of finished requests that workers restored.",
         static_cast<double>(c.cached_tokens));
  const char* placed = "Placements, by who computes the prompt.";
  follow("deltamesh_placements_total", placed, static_cast<double>(c.placed_prefill),
         {{"by", "prefill"}});
  follow("deltamesh_placements_total", placed, static_cast<double>(c.placed_append),
         {{"by", "append"}});
  follow("deltamesh_placements_total", placed, static_cast<double>(c.placed_fetch),
         {{"by", "fetch"}});
  follow("deltamesh_placements_total", placed, static_cast<double>(c.placed_alone),
         {{"by", "decode"}});
  follow("deltamesh_prefix_index_lookups_total", "Prompts looked up in the prefix index.",
         static_cast<double>(c.prefix_lookups));
  follow("deltamesh_prefix_resyncs_total", "Workers that had to tell their prefixes anew.",
         static_cast<double>(c.prefix_resyncs));
  follow("deltamesh_malformed_messages_total", "Messages against the protocol.",
         static_cast<double>(c.malformed_messages));
  const SessionCounters& sessions = c.sessions;
  const char* events = "Sessions by what happened to them; evicted ones are forgotten.";
  const auto session = [&](const char* event, uint64_t value) {
    follow("deltamesh_session_events_total", events, static_cast<double>(value),
           {{"event", event}});
  };
  session("kept", sessions.kept);
  session("overtaken", sessions.overtaken);
  session("suspended", sessions.suspended);
  session("resumed", sessions.resumed);
  session("forked", sessions.forked);
  session("evicted", g.sessions_evicted);
  session("recorded", sessions.recorded);
  session("record_retried", sessions.records_retried);
  session("record_lost", sessions.records_lost);
  follow("deltamesh_session_stores_forgotten_total",
         "Workers with a store that were away for so long that they count as gone.",
         static_cast<double>(sessions.stores_forgotten));
  for (size_t i = 0; i < sessions.refused.size(); ++i) {
    follow("deltamesh_session_refusals_total", "Calls about sessions, and their records, refused.",
           static_cast<double>(sessions.refused[i]),
           {{"reason", SessionRefusalName(static_cast<SessionRefusal>(i))}});
  }
  follow("deltamesh_fetched_tokens_total",
         "Tokens of prompts that workers fetched from each other, not computed.",
         static_cast<double>(c.fetched_tokens));
  follow("deltamesh_fetched_bytes_total", "State bytes that workers fetched from each other.",
         static_cast<double>(c.fetched_bytes));
  const char* fetches = "Fetches of states ended, by reason; OK is complete.";
  if (c.fetch_results.empty()) {
    follow("deltamesh_fetch_results_total", fetches, 0, {{"reason", "OK"}});
  }
  for (const auto& [reason, count] : c.fetch_results) {
    follow("deltamesh_fetch_results_total", fetches, static_cast<double>(count),
           {{"reason", reason}});
  }
  for (const auto& [reason, count] : c.handoff_results) {
    follow("deltamesh_handoff_results_total", "Hand-offs ended, by reason; OK is complete.",
           static_cast<double>(count), {{"reason", reason}});
  }
}

}  // namespace deltamesh
