#include "services/worker/metric_list.h"

namespace deltamesh {

void MetricList::Add(MetricSample::Kind kind, const char* name, const char* help, double value,
                     Labels labels) {
  samples_.push_back({kind, name, help, std::move(labels), value});
}

void MetricList::Pools(const StatePools& pools) {
  const std::pair<const char*, const FixedPool*> both[] = {{"slab", pools.slabs.get()},
                                                           {"latent_block", pools.blocks.get()}};
  for (const auto& [name, pool] : both) {
    Gauge("pool_slots", "Slots of a state pool.", pool->slots(), {{"pool", name}});
    Gauge("pool_free_slots", "Free slots of a state pool.", pool->free_slots(), {{"pool", name}});
  }
}

void MetricList::TransportUse(const Transport& transport) {
  Gauge("transport_info", "The transport and the lanes it selected; always 1.", 1,
        {{"kind", transport.kind()}, {"lanes", transport.lanes()}});
  const TransportStats stats = transport.stats();
  const char* messages = "Messages of the transport, by direction.";
  Counter("transport_messages_total", messages, stats.messages_sent, {{"direction", "sent"}});
  Counter("transport_messages_total", messages, stats.messages_received,
          {{"direction", "received"}});
  const char* bytes = "Payload bytes of the transport, by direction.";
  Counter("transport_bytes_total", bytes, stats.bytes_sent, {{"direction", "sent"}});
  Counter("transport_bytes_total", bytes, stats.bytes_received, {{"direction", "received"}});
  Counter("transport_dropped_total", "Messages refused or malformed.", stats.dropped);
  Counter("transport_refused_total", "Connections turned away or cut before they were open.",
          stats.refused);
  Gauge("transport_peers", "Connections of the transport.", stats.peers);
}

}  // namespace deltamesh
