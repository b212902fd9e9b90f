// The series of a StateTier (METRICS.md), also for a worker that has none.
#include <string>

#include "services/worker/state_tier.h"

namespace deltamesh {
namespace {

const char* const kTierLabels[kStoreTiers] = {"disk", "object_store"};

void AddTier(MetricList& list, const char* tier, const StoreStats& s, int64_t queued) {
  const auto with = [tier](const char* label, std::string value) {
    return MetricList::Labels{{"tier", tier}, {label, std::move(value)}};
  };
  list.Gauge("store_bytes", "Bytes that a tier of the store holds, against its bound.", s.bytes,
             {{"tier", tier}});
  list.Gauge("store_states", "States that a tier holds, as this worker knows it.", s.states,
             {{"tier", tier}});
  list.Gauge("store_records", "Records that a tier holds, as this worker knows it.", s.records,
             {{"tier", tier}});
  list.Counter("store_records_refused_total", "Records for which a tier had no room.",
               s.records_refused, {{"tier", tier}});
  list.Gauge("store_queue_bytes", "Bytes whose writing or reading waits or is under way.", queued,
             {{"tier", tier}});
  const char* calls = "States and records written and read, whole.";
  list.Counter("store_operations_total", calls, s.writes, with("operation", "write"));
  list.Counter("store_operations_total", calls, s.reads, with("operation", "read"));
  list.Counter("store_operations_total", calls, s.record_writes, with("operation", "record_write"));
  list.Counter("store_operations_total", calls, s.record_reads, with("operation", "record_read"));
  const char* bytes = "Bytes of states, by what became of them.";
  list.Counter("store_transferred_bytes_total", bytes, s.written_bytes, with("operation", "write"));
  list.Counter("store_transferred_bytes_total", bytes, s.read_bytes, with("operation", "read"));
  list.Counter("store_transferred_bytes_total", bytes, s.evicted_bytes, with("operation", "evict"));
  list.Counter("store_evicted_total", "States that made room; records never do.", s.evicted,
               {{"tier", tier}});
  const char* failures =
      "Writes and reads that failed, and states that were gone when they were to be read.";
  list.Counter("store_failures_total", failures, s.write_failures, with("operation", "write"));
  list.Counter("store_failures_total", failures, s.read_failures, with("operation", "read"));
  list.Counter("store_failures_total", failures, s.missed, with("operation", "missed"));
  for (int i = 0; i < kStoreRefusals; ++i) {
    list.Counter("store_refused_total", "Stored files that were not used, by reason.",
                 s.refused[static_cast<size_t>(i)],
                 with("reason", std::string(StoreRefusalName(static_cast<StoreRefusal>(i)))));
  }
}

}  // namespace

void StateTier::AddSeries(MetricList& list, const Counts& c,
                          const std::array<StoreStats, kStoreTiers>& stats,
                          const std::array<int64_t, kStoreTiers>& queued) {
  for (size_t i = 0; i < kStoreTiers; ++i) AddTier(list, kTierLabels[i], stats[i], queued[i]);
  const char* loads =
      "Prompts whose state was deeper in the store than in memory, by what came of it.";
  const std::pair<const char*, uint64_t> results[] = {{"hit", c.hits},  {"slower", c.slower},
                                                      {"busy", c.busy}, {"failed", c.failed},
                                                      {"late", c.late}, {"cancelled", c.cancelled}};
  for (const auto& [result, count] : results) {
    list.Counter("store_loads_total", loads, count, {{"result", result}});
  }
  const char* unwritten =
      "Snapshots that were not written: gone before they were, the queue full, not sent on.";
  list.Counter("store_unwritten_total", unwritten, c.lost, {{"cause", "evicted"}});
  list.Counter("store_unwritten_total", unwritten, c.no_room, {{"cause", "queue"}});
  list.Counter("store_unwritten_total", unwritten, c.uploads_failed, {{"cause", "upload"}});
}

void StateTier::AddMetrics(MetricList& list) const {
  AddSeries(list, counts_,
            {disk_ != nullptr ? disk_->stats() : StoreStats(),
             objects_ != nullptr ? objects_->stats() : StoreStats()},
            {disk_queue_ != nullptr ? disk_queue_->bytes() : 0,
             (object_queue_ != nullptr ? object_queue_->bytes() : 0) +
                 (record_queue_ != nullptr ? record_queue_->bytes() : 0)});
}

void StateTier::AddNoMetrics(MetricList& list) { AddSeries(list, {}, {}, {}); }

}  // namespace deltamesh
