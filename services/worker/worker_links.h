// A worker's side of membership: registers on every link that opens, sends heartbeats at the pace each
// router asked for, and merges the views of the expert shards that routers send.
//
// Pure: no threads, no clock. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "services/worker/worker_core.h"

namespace deltamesh {

mesh::ModelIdentity MakeModelIdentity(const std::string& digest, const std::string& text_digest);

class WorkerLinks {
 public:
  explicit WorkerLinks(mesh::Register registration) : registration_(std::move(registration)) {}

  void Open(LinkId link);
  void Close(LinkId link);
  void OnRegistered(LinkId link, const mesh::Registered& message, absl::Time now);

  // Remembers the link's view. The merged view when it changed: every shard that some connected router
  // knows, the latest life of each. Its epoch is our own count of changes.
  std::optional<mesh::MeshView> OnView(LinkId link, const mesh::MeshView& view);

  // Queues a heartbeat on every link where one is due: at the router's pace while the load changes, four
  // times within its lease while it does not.
  void Tick(const mesh::Heartbeat& load, absl::Time now);
  // Tells every router, now or when it has registered this worker, how fast its connection to another one is.
  void TellConnection(const std::string& to, uint64_t epoch, double bytes_per_second);
  // Makes the next Tick send one on every link.
  void HeartbeatSoon();

  // Queues a message; dropped when the link is gone.
  void Send(LinkId link, mesh::WorkerMessage message);
  std::vector<SendToRouter> Take() { return std::exchange(out_, {}); }

  bool open(LinkId link) const { return links_.contains(link); }
  bool registered() const;
  const mesh::Register& registration() const { return registration_; }

 private:
  struct Link {
    bool registered = false;
    absl::Duration period = absl::InfiniteDuration();
    absl::Time due = absl::InfiniteFuture();
    absl::Duration calm;  // between heartbeats that tell nothing new
    std::string told;     // the last load, serialised
    absl::Time told_at = absl::InfinitePast();
    mesh::MeshView view;
  };

  static constexpr size_t kConnectionsMax = 4096;

  void SendConnection(LinkId link, const std::string& to);

  mesh::Register registration_;
  std::map<LinkId, Link> links_;  // few; ordered so that runs repeat
  struct Connection {
    uint64_t epoch = 0;  // of the other worker
    double bytes_per_second = 0;
  };
  std::map<std::string, Connection> connections_;  // by the other worker's name
  std::string merged_;                             // the shards of the last merged view, serialised
  uint64_t merged_epoch_ = 0;
  std::vector<SendToRouter> out_;
};

}  // namespace deltamesh
