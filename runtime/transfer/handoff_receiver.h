// The receiving end of hand-offs: grants landings, verifies what arrives, and gives out a sequence
// only when every region is complete and agrees with the manifest and the checksums.
//
// Payloads land directly in the slab and blocks of the granted buffers. The buffers of a failed or
// revoked transfer are held back until every payload that may still write into them has completed.
//
// Messages may be reordered: a seal that overtakes segments waits `seal_grace` for them. Time runs
// against silence, not against the work of the sender, which says that it is alive while it computes.
//
// Thread-safe. The event callback runs on the transport's thread or on the thread that called Tick,
// with no lock held; it must not block. Destroy the transport before the receiver.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/base/clock.h"
#include "runtime/base/ids.h"
#include "runtime/base/random.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/transfer/handoff_types.h"
#include "runtime/transfer/transport.h"

namespace deltamesh {

// A slab and blocks reserved for one sequence whose content is not there yet. There is no way to
// read a sequence out of it: only a complete hand-off turns it into a SequenceState.
class HandoffBuffers {
 public:
  HandoffBuffers() = default;
  // Room for `tokens` positions in all. `held` are full leading blocks of the prompt that this
  // worker already has (the landing says so and they are not sent). RESOURCE_EXHAUSTED when a pool
  // is full; nothing is kept.
  static absl::StatusOr<HandoffBuffers> Reserve(const StatePools& pools, int64_t tokens,
                                                std::vector<SlotRef> held = {});

  explicit operator bool() const { return state_ != nullptr; }
  int64_t have_blocks() const { return have_blocks_; }
  int64_t blocks() const { return state_ ? static_cast<int64_t>(state_->blocks().size()) : 0; }

 private:
  friend class HandoffReceiver;
  std::unique_ptr<SequenceState> state_;
  int64_t have_blocks_ = 0;
};

struct HandoffCompleted {
  RequestId request_id;
  uint32_t serial = 0;                   // of the grant
  std::unique_ptr<SequenceState> state;  // restored at the landing's position
  uint64_t bytes = 0;
  double seconds = 0;           // first segment to last
  int64_t restored_tokens = 0;  // of the position, not computed by the sender
};

struct HandoffRefused {
  RequestId request_id;
  uint32_t serial = 0;  // of the grant
  mesh::RefusalReason reason = mesh::NONE;
  std::string detail;
  bool retryable = false;
  HandoffBuffers buffers;  // safe to grant again: nothing writes into them any more
  uint64_t bytes = 0;
  double seconds = 0;
};

using HandoffEvent = std::variant<HandoffCompleted, HandoffRefused>;

struct HandoffReceiverOptions {
  WorkerName name;
  uint64_t epoch = 0;  // grows with each life of this worker
  HandoffIdentity identity;
  StateLayout layout;
  // Grant to manifest, which a prefill worker sends as it takes the request in, between two of its steps.
  // Well below the time in which a router gives the request up: what is refused here keeps its room and
  // is prefilled again.
  absl::Duration unclaimed_max = absl::Minutes(5);
  absl::Duration idle_max = kHandoffIdleMax;     // silence between manifest and seal
  absl::Duration seal_grace = absl::Seconds(2);  // seal to last segment
  // An ended transfer whose segments in flight do not move for so long has its peer disconnected.
  absl::Duration drain_grace = absl::Milliseconds(500);
  int64_t transfers_max = 4096;  // open at once
  bool verify_checksums = true;  // off shows in tests what checksums catch
};

struct HandoffGrant {
  RequestId request_id;
  uint32_t serial = 0;                           // the caller's; comes back in the event
  int64_t position = 0;                          // > 0, a multiple of kBlockTokens
  HandoffBuffers buffers;                        // holds at least `position` tokens
  absl::Time deadline = absl::InfiniteFuture();  // the request's
  // Of a state that was asked for: what the manifest must name; and how long to wait for it, where that is
  // not HandoffReceiverOptions::unclaimed_max.
  std::string prefix;
  absl::Duration unclaimed_max = absl::InfiniteDuration();
};

struct HandoffReceiverStats {
  uint64_t granted = 0, completed = 0, revoked = 0;
  uint64_t bytes = 0;  // of completed transfers
  uint64_t late = 0;   // messages of transfers that had already failed
  std::array<uint64_t, mesh::RefusalReason_ARRAYSIZE> refused{};  // by RefusalReason
  int64_t open = 0;                                               // granted and not ended
  int64_t draining = 0;                                           // ended, payloads still in flight
};

class HandoffReceiver final : public MessageHandler {
 public:
  using EventCallback = std::function<void(HandoffEvent)>;

  // Registers itself with `transport` for manifests, segments and seals. Nothing is owned; all must
  // outlive it, but the transport must be destroyed first.
  HandoffReceiver(Transport* transport, const Clock* clock, Entropy* entropy,
                  HandoffReceiverOptions options, EventCallback on_event);
  ~HandoffReceiver() override;
  HandoffReceiver(const HandoffReceiver&) = delete;
  HandoffReceiver& operator=(const HandoffReceiver&) = delete;

  // Opens a landing with a fresh id and token, good for one manifest. An open landing of the same
  // request is revoked. INVALID_ARGUMENT: position or buffers do not fit; RESOURCE_EXHAUSTED: too
  // many are open.
  absl::StatusOr<mesh::Landing> Grant(HandoffGrant grant);

  // Ends the request's transfer without an event. Unknown requests are ignored.
  void Revoke(const RequestId& request_id);

  // Fails what is past its deadline. Call a few times a second.
  void Tick(absl::Time now);

  HandoffReceiverStats stats() const;

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override;
  void OnPeerLost(PeerId peer, const absl::Status& reason) override;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace deltamesh
