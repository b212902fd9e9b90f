// The sending end of hand-offs: a manifest, then regions as they become final, then a seal.
//
// Between an accepted manifest and the seal it says Alive when due, so that the receiver tells a prompt
// that computes for long from a sender that is gone.
//
// Regions may be given before the manifest was accepted; they wait, pinned. A pin is dropped when
// the transport no longer reads the memory, also after a failure or Cancel.
//
// Thread-safe. The result callback runs on the transport's thread, or on the thread that called a
// method here, with no lock held; it must not block. Destroy the transport before the sender.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/base/clock.h"
#include "runtime/base/ids.h"
#include "runtime/cache/pools.h"
#include "runtime/transfer/handoff_types.h"
#include "runtime/transfer/transport.h"

namespace deltamesh {

struct HandoffSenderOptions {
  WorkerName name;
  uint64_t epoch = 0;
  HandoffIdentity identity;
  StateLayout layout;
  // Longest wait for a verdict on the manifest or the seal, and for segments to move.
  absl::Duration idle_max = kHandoffIdleMax;
  // KeepAlive says nothing when Tick was not called for this long: its owner hangs.
  absl::Duration stall_max = absl::Seconds(60);
  // An ended transfer whose segments in flight do not move for so long has its peer disconnected.
  absl::Duration drain_grace = absl::Milliseconds(500);
  int64_t transfers_max = 4096;  // open at once
  int64_t segment_bytes_max = kHandoffSegmentBytesMax;
  int64_t segments_in_flight_max = 8;  // per transfer
  // Begin opened a connection, to this life of the receiver. Called by Begin with no lock held.
  std::function<void(PeerId peer, const std::string& receiver, uint64_t epoch)> on_connected =
      nullptr;
};

struct HandoffStart {
  RequestId request_id;
  uint32_t serial = 0;  // the caller's; comes back in the result
  mesh::Landing landing;
  absl::Time deadline = absl::InfiniteFuture();  // the request's
  std::string prefix;                            // of the manifest
};

// How a transfer ended; exactly one per Begin that returned OK, unless it was cancelled.
struct HandoffSent {
  RequestId request_id;
  uint32_t serial = 0;
  absl::Status status;  // OK: the receiver verified everything
  mesh::RefusalReason reason = mesh::NONE;
  uint64_t bytes = 0;  // handed to the transport
  double seconds = 0;  // manifest to verdict
};

struct HandoffSenderStats {
  uint64_t started = 0, completed = 0, cancelled = 0;
  uint64_t bytes = 0;  // of completed transfers
  uint64_t stray = 0;  // verdicts of no open transfer, or unreadable
  std::array<uint64_t, mesh::RefusalReason_ARRAYSIZE> failed{};  // by RefusalReason
  int64_t open = 0, draining = 0;
};

class HandoffSender final : public MessageHandler {
 public:
  using ResultCallback = std::function<void(HandoffSent)>;

  // Registers itself with `transport` for verdicts. Nothing is owned; the transport must be
  // destroyed first.
  HandoffSender(Transport* transport, const Clock* clock, HandoffSenderOptions options,
                ResultCallback on_result);
  ~HandoffSender() override;
  HandoffSender(const HandoffSender&) = delete;
  HandoffSender& operator=(const HandoffSender&) = delete;

  // Connects (one connection per receiver is kept) and sends the manifest; returns at once. An open
  // transfer of the same request is cancelled. INVALID_ARGUMENT: the landing makes no sense here.
  absl::Status Begin(HandoffStart start);

  // Block `block` of the sequence is full: sends all its MLA layers. Blocks the receiver has are
  // skipped, so give all of them. `pin` keeps the block; it must not change from now on. Each block
  // once.
  void SendBlock(const RequestId& request_id, int64_t block, SlotRef pin);

  // S and conv of KDA layer `kda_layer` are final at the landing's position. `slab` pins the whole
  // slab; this layer's part must not change from now on. Each layer once. The seal follows the last
  // region by itself.
  void SendLayer(const RequestId& request_id, int64_t kda_layer, SlotRef slab);

  // The same for a layer that lies in a snapshot.
  void SendSnapshotLayer(const RequestId& request_id, int64_t kda_layer, SlotRef snapshot);

  // How many of the state's positions were restored instead of computed; the seal tells. Before the last
  // region is given; without it none were.
  void SetRestored(const RequestId& request_id, int64_t tokens);

  // Stops sending; no result is reported. Unknown requests are ignored, as in SendBlock and
  // SendLayer.
  void Cancel(const RequestId& request_id);

  // Fails what is past its deadline and does what KeepAlive does. Call a few times a second.
  void Tick(absl::Time now);

  // Says Alive for each transfer where it is due, for a thread that runs while the one that calls Tick
  // computes. Call a few times a second.
  void KeepAlive(absl::Time now);

  HandoffSenderStats stats() const;

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override;
  void OnPeerLost(PeerId peer, const absl::Status& reason) override;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace deltamesh
