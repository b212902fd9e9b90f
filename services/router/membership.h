// Who is in the mesh: links, registrations, leases, loads, and the expert table sent to attention
// workers.
//
// A state machine like the core that owns it: no threads, no clock. Actions are appended to the
// sink.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "services/router/policy.h"
#include "services/router/router_core.h"

namespace deltamesh {

// A registered worker. `held` counts what this router's live requests were given there; the load is
// the last heartbeat, changed by every charge and return since.
struct Worker {
  LinkId link = 0;
  mesh::Register registration;
  WorkerLoad load;
  int64_t held_slabs = 0;
  int64_t held_blocks = 0;  // one that several share counts once
  // Blocks of these requests' prompts that others may share, by name, and by how many they are held.
  absl::flat_hash_map<uint64_t, int32_t> named_blocks;
};

// What a request takes at a worker, or gives back.
struct Room {
  int64_t slabs = 1;
  int64_t blocks = 0;               // all it holds there
  int64_t tokens = 0;               // it has to compute
  std::span<const uint64_t> named;  // the leading ones of its blocks that are shared, by name
};

// A registered worker that is gone; its requests are the caller's to end.
struct LostWorker {
  LinkId link = 0;
  std::string name;
  mesh::Role role = mesh::ROLE_UNSPECIFIED;
};

class Membership {
 public:
  // `options`, `counters` and `actions` must outlive this.
  Membership(const RouterOptions* options, RouterCounters* counters,
             std::vector<RouterAction>* actions);

  void OnLinkOpened(LinkId link, absl::Time now);
  // Registers the link's worker, or refuses and closes the link. Returns the worker that this took
  // out: an earlier life under the same name, or the link's own when it registered twice.
  std::optional<LostWorker> OnRegister(LinkId link, const mesh::Register& message, absl::Time now);
  void OnHeartbeat(LinkId link, const mesh::Heartbeat& message);
  // Any message from the link renews its lease. False when the link is not open here (closed by
  // us).
  bool Touch(LinkId link, absl::Time now);
  // Forgets the link.
  std::optional<LostWorker> OnLinkClosed(LinkId link);
  // Closes a link for a protocol breach or an expired lease and forgets it.
  std::optional<LostWorker> Refuse(LinkId link, const absl::Status& status);
  // Closes and forgets links that are silent for longer than the lease or never registered in time.
  std::vector<LostWorker> Expire(absl::Time now);

  // Nothing when the link has no registered worker.
  Worker* Find(LinkId link);
  const Worker* Find(LinkId link) const;
  // A decode or prefill worker.
  Worker* FindByName(const std::string& name);
  // In order of worker name. Good until a worker comes or goes.
  const std::vector<Worker*>& Alive(mesh::Role role);
  int64_t Count(mesh::Role role) const;

  // Takes room for a request (gives it back): between heartbeats the load must move with what was
  // placed.
  void Charge(LinkId link, const Room& room);
  void Return(LinkId link, const Room& room);
  // Of blocks that a request would restore there, those that others' requests hold: they cost nothing.
  static int64_t Shared(const Worker& worker, std::span<const uint64_t> restored);
  // How many of a request's leading blocks are held under their names, when it restores `restored` of them.
  // What it computes itself lies beside what another one computes at the same time: only the first of both is
  // there for others.
  static size_t Named(const Worker& worker, std::span<const uint64_t> keys, size_t restored);
  // Grows when a request that found no room may find some now.
  uint64_t room_version() const { return room_version_; }
  // The worker said it is full: no room there until its next heartbeat.
  void MarkFull(LinkId link);

  // OK when every shard is connected and they host every expert id; or no shard ever registered and a decode
  // worker needs none.
  absl::Status ExpertsComplete() const;
  // False for who has no experts of its own while no shard was ever there.
  bool CanCompute(const Worker& worker) const;
  std::optional<mesh::ModelIdentity> identity() const;

 private:
  struct Link {
    absl::Time last_heard;
    bool registered = false;
  };

  absl::Status Admit(const mesh::Register& message) const;
  absl::Status CheckIdentity(const mesh::Register& message) const;
  absl::Status CheckShards(const mesh::Register& message) const;
  void RecountShards();
  absl::Status LocalExpertsSomewhere() const;
  void LearnIdentity(const mesh::Register& message);
  std::optional<LostWorker> Forget(LinkId link);
  void BroadcastView();
  mesh::RouterMessage View() const;
  static bool UsesExperts(mesh::Role role);

  const RouterOptions* const options_;
  RouterCounters* const counters_;
  std::vector<RouterAction>* const actions_;
  mesh::ModelIdentity identity_;  // what is configured or learned so far
  bool identity_complete_ = false;
  std::string transport_kind_;  // learned
  std::map<LinkId, Link> links_;
  std::map<LinkId, Worker> workers_;
  std::map<std::string, LinkId> by_name_;
  std::map<mesh::Role, std::vector<Worker*>> alive_;  // while alive_known_
  bool alive_known_ = false;
  uint64_t view_epoch_;
  uint64_t room_version_ = 1;
  // Of the connected expert workers; of the last ones while there are none; 0: never any.
  uint32_t expert_shards_ = 0;
};

}  // namespace deltamesh
