#include "runtime/transfer/handoff_receiver.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/incoming_transfer.h"

namespace deltamesh {
namespace {

// Ids of failed transfers kept, so that what was still under way is not taken for an attack.
constexpr size_t kFailedIdsKept = 256;
// Of states that come at once. More would push each other out of the caches before anybody reads them; less
// is read from there.
constexpr int64_t kCachedBytesMax = 8 << 20;
// Room in a long manifest besides its regions.
constexpr int64_t kManifestFixedBytes = 4096;

// What has to be done once the mutex is released.
struct Outcome {
  struct Answer {
    PeerId peer;
    mesh::Verdict verdict;
    RequestId request_id;  // for the log; empty when unknown
  };
  std::vector<Answer> answers;
  std::vector<HandoffEvent> events;
  std::vector<HandoffBuffers> unused;  // freed without the lock
  std::vector<PeerId> disconnects;
};

// For a message that was taken from its header, or refused: a payload has nowhere to go.
absl::StatusOr<PayloadTarget> NothingWanted(const Arrival& arrival) {
  if (arrival.payload_bytes == 0) return PayloadTarget{};
  return InvalidArgument("hand-off: %d bytes of payload belong to no open landing",
                         arrival.payload_bytes);
}

bool SameToken(const mesh::TransferKey& a, const mesh::TransferKey& b) {
  return ((a.token_low() ^ b.token_low()) | (a.token_high() ^ b.token_high())) == 0;
}

}  // namespace

absl::StatusOr<HandoffBuffers> HandoffBuffers::Reserve(const StatePools& pools, int64_t tokens,
                                                       std::vector<SlotRef> held) {
  HandoffBuffers buffers;
  buffers.have_blocks_ = static_cast<int64_t>(held.size());
  const int64_t held_tokens = buffers.have_blocks_ * kBlockTokens;
  ASSIGN_OR_RETURN(buffers.state_, SequenceState::CreateUnset(pools));
  if (held_tokens > 0) buffers.state_->Place(held_tokens, std::move(held));
  RETURN_IF_ERROR(buffers.state_->Reserve(std::max<int64_t>(0, tokens - held_tokens)));
  return buffers;
}

using Transfer = IncomingTransfer;
using TransferPtr = std::shared_ptr<Transfer>;

class HandoffReceiver::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Transport* transport, const Clock* clock, Entropy* entropy, HandoffReceiverOptions options,
       EventCallback on_event)
      : transport_(transport),
        clock_(clock),
        entropy_(entropy),
        options_(std::move(options)),
        on_event_(std::move(on_event)) {}

  absl::StatusOr<mesh::Landing> Grant(HandoffGrant grant);
  void Revoke(const RequestId& request_id);
  void Tick(absl::Time now);
  HandoffReceiverStats stats() const;
  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival);
  void OnPeerLost(PeerId peer, const absl::Status& reason);

 private:
  TransferPtr Open(HandoffGrant grant) const;
  absl::StatusOr<PayloadTarget> OnManifest(const Arrival& arrival);
  absl::StatusOr<PayloadTarget> OnSegment(const Arrival& arrival);
  absl::StatusOr<PayloadTarget> OnSeal(const Arrival& arrival);
  absl::StatusOr<PayloadTarget> OnAlive(const Arrival& arrival);
  absl::StatusOr<PayloadTarget> Collect(const Arrival& arrival, const TransferPtr& t,
                                        mesh::Verdict::Stage stage);
  void OnCollected(const TransferPtr& t, mesh::Verdict::Stage stage, std::string_view bytes,
                   const absl::Status& status);
  void OnLanded(const TransferPtr& t, uint32_t region, uint64_t offset, const absl::Status& status);

  // All below: the caller holds the mutex.
  TransferPtr Find(const Arrival& arrival, const mesh::TransferKey& key, mesh::Verdict::Stage stage,
                   Outcome& out);
  void TakeManifest(const TransferPtr& t, const mesh::Manifest& manifest, Outcome& out);
  void TakeSeal(const TransferPtr& t, const mesh::Seal& seal, Outcome& out);
  void Heard(const TransferPtr& t) const;
  void FinishIfWhole(const TransferPtr& t, Outcome& out);
  void Malformed(const Arrival& arrival, mesh::Verdict::Stage stage, Outcome& out);
  void Refuse(const TransferPtr& t, mesh::Verdict::Stage stage, Refusal refusal, Outcome& out);
  void RefuseStray(const Arrival& arrival, const mesh::TransferKey& key, mesh::Verdict::Stage stage,
                   mesh::RefusalReason reason, std::string detail, Outcome& out);
  void End(const TransferPtr& t);
  void Release(const TransferPtr& t, Outcome& out);

  // Without the mutex.
  void Flush(Outcome out);
  std::string WhyLate(const Transfer& t, absl::Time now) const;

  Transport* const transport_;
  const Clock* const clock_;
  Entropy* const entropy_;
  const HandoffReceiverOptions options_;
  const EventCallback on_event_;

  mutable std::mutex mutex_;
  absl::flat_hash_map<uint64_t, TransferPtr> by_id_;        // open ones
  absl::flat_hash_map<RequestId, TransferPtr> by_request_;  // open ones
  int64_t coming_bytes_ = 0;                                // of those whose manifest was accepted
  std::vector<TransferPtr> draining_;
  std::vector<uint64_t> failed_ids_;  // a ring
  size_t failed_next_ = 0;
  HandoffReceiverStats stats_;
};

TransferPtr HandoffReceiver::Impl::Open(HandoffGrant grant) const {
  const SequenceState& state = *grant.buffers.state_;
  std::vector<float*> blocks;
  for (const SlotRef& block : state.blocks()) blocks.push_back(block.data());
  IncomingState incoming(options_.layout, grant.position, grant.buffers.have_blocks(),
                         state.slab().data(), std::move(blocks));
  return std::make_shared<Transfer>(std::move(grant.request_id), grant.serial,
                                    std::move(grant.buffers), std::move(incoming));
}

absl::StatusOr<mesh::Landing> HandoffReceiver::Impl::Grant(HandoffGrant grant) {
  if (grant.position <= 0 || grant.position % kBlockTokens != 0) {
    return InvalidArgument("position: %d; use a positive multiple of %d", grant.position,
                           kBlockTokens);
  }
  const int64_t need = grant.position / kBlockTokens;
  if (!grant.buffers || grant.buffers.blocks() < need || grant.buffers.have_blocks() > need) {
    return InvalidArgument(
        "buffers: %d blocks, %d of them held, do not fit position %d; reserve %d blocks",
        grant.buffers.blocks(), grant.buffers.have_blocks(), grant.position, need);
  }
  if (!(grant.buffers.state_->layout() == options_.layout)) {
    return InvalidArgument(
        "buffers: their layout is not this receiver's; reserve from the worker's pools");
  }
  Revoke(grant.request_id);
  const absl::Time limit = grant.deadline;
  const absl::Duration unclaimed = std::min(grant.unclaimed_max, options_.unclaimed_max);
  std::string prefix = std::move(grant.prefix);
  auto t = Open(std::move(grant));
  t->prefix = std::move(prefix);
  t->limit = limit;
  t->unclaimed_max = unclaimed;
  t->deadline = std::min(limit, clock_->Now() + unclaimed);

  std::lock_guard lock(mutex_);
  if (static_cast<int64_t>(by_id_.size()) >= options_.transfers_max) {
    return ResourceExhausted("hand-offs: %d are open, as many as allowed; retry later",
                             by_id_.size());
  }
  do {
    t->key.set_transfer_id(entropy_->Next());
  } while (t->key.transfer_id() == 0 || by_id_.contains(t->key.transfer_id()));
  t->key.set_token_low(entropy_->Next());
  t->key.set_token_high(entropy_->Next());
  t->key.set_receiver_epoch(options_.epoch);
  by_id_[t->key.transfer_id()] = t;
  by_request_[t->request_id] = t;
  ++stats_.granted;

  mesh::Landing landing;
  landing.set_transfer_id(t->key.transfer_id());
  landing.set_token_low(t->key.token_low());
  landing.set_token_high(t->key.token_high());
  landing.set_receiver(options_.name);
  landing.set_receiver_epoch(options_.epoch);
  landing.set_transport_address(transport_->address());
  landing.set_position(static_cast<uint64_t>(t->incoming.plan().position()));
  landing.set_have_blocks(static_cast<uint64_t>(t->incoming.plan().have_blocks()));
  return landing;
}

void HandoffReceiver::Impl::Revoke(const RequestId& request_id) {
  Outcome out;
  {
    std::lock_guard lock(mutex_);
    const auto it = by_request_.find(request_id);
    if (it == by_request_.end()) return;
    const TransferPtr t = it->second;
    t->silent = true;
    t->refusal.reason = mesh::UNKNOWN_TRANSFER;
    t->refusal.detail = "the landing was revoked";
    ++stats_.revoked;
    if (t->peer != 0) {
      mesh::Verdict verdict;
      *verdict.mutable_key() = t->key;
      verdict.set_stage(mesh::Verdict::SEGMENT);
      verdict.set_reason(t->refusal.reason);
      verdict.set_detail(t->refusal.detail);
      out.answers.push_back({t->peer, std::move(verdict), ""});
    }
    End(t);
    Release(t, out);
  }
  Flush(std::move(out));
}

void HandoffReceiver::Impl::Tick(absl::Time now) {
  Outcome out;
  {
    std::lock_guard lock(mutex_);
    std::vector<TransferPtr> late;
    for (const auto& [id, t] : by_id_) {
      if (now >= t->deadline) late.push_back(t);
    }
    for (const TransferPtr& t : late) {
      if (t->incoming.sealed()) {
        Refuse(t, mesh::Verdict::SEAL, {mesh::INCOMPLETE, t->incoming.FirstMissing()}, out);
      } else {
        Refuse(t, mesh::Verdict::SEGMENT, {mesh::TIMEOUT, WhyLate(*t, now)}, out);
      }
    }
    for (const TransferPtr& t : draining_) {
      if (now < t->deadline || t->disconnect_asked) continue;
      t->disconnect_asked = true;
      out.disconnects.push_back(t->peer);
    }
  }
  Flush(std::move(out));
}

HandoffReceiverStats HandoffReceiver::Impl::stats() const {
  std::lock_guard lock(mutex_);
  HandoffReceiverStats stats = stats_;
  stats.open = static_cast<int64_t>(by_id_.size());
  stats.draining = static_cast<int64_t>(draining_.size());
  return stats;
}

std::string HandoffReceiver::Impl::WhyLate(const Transfer& t, absl::Time now) const {
  if (now >= t.limit) {
    return absl::StrFormat("%d of %d bytes arrived before the request's deadline",
                           t.incoming.landed_bytes(), t.incoming.plan().bytes());
  }
  if (t.peer == 0) {
    return absl::StrFormat("no manifest came within %s of the grant",
                           absl::FormatDuration(t.unclaimed_max));
  }
  return absl::StrFormat("the sender was silent for %s after %d of %d bytes",
                         absl::FormatDuration(options_.idle_max), t.incoming.landed_bytes(),
                         t.incoming.plan().bytes());
}

absl::StatusOr<PayloadTarget> HandoffReceiver::Impl::OnMessage(const Arrival& arrival) {
  switch (arrival.type) {
    case MessageType::kHandoffManifest:
      return OnManifest(arrival);
    case MessageType::kHandoffSegment:
      return OnSegment(arrival);
    case MessageType::kHandoffSeal:
      return OnSeal(arrival);
    case MessageType::kHandoffAlive:
      return OnAlive(arrival);
    default:
      return InvalidArgument("message type %d is no part of a hand-off",
                             static_cast<int>(arrival.type));
  }
}

absl::StatusOr<PayloadTarget> HandoffReceiver::Impl::OnManifest(const Arrival& arrival) {
  mesh::Manifest manifest;
  const bool parsed =
      manifest.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  Outcome out;
  TransferPtr collect;
  {
    std::lock_guard lock(mutex_);
    if (!parsed) {
      Malformed(arrival, mesh::Verdict::MANIFEST, out);
    } else if (TransferPtr t = Find(arrival, manifest.key(), mesh::Verdict::MANIFEST, out)) {
      if (t->peer != 0) {
        Refuse(t, mesh::Verdict::MANIFEST, {mesh::UNKNOWN_TRANSFER, "the landing was used already"},
               out);
      } else {
        t->peer = arrival.peer;
        Heard(t);
        if (arrival.payload_bytes > 0) {
          collect = t;
        } else {
          TakeManifest(t, manifest, out);
        }
      }
    }
  }
  Flush(std::move(out));
  if (collect) return Collect(arrival, collect, mesh::Verdict::MANIFEST);
  return NothingWanted(arrival);
}

absl::StatusOr<PayloadTarget> HandoffReceiver::Impl::OnSeal(const Arrival& arrival) {
  mesh::Seal seal;
  const bool parsed =
      seal.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  Outcome out;
  TransferPtr collect;
  {
    std::lock_guard lock(mutex_);
    if (!parsed) {
      Malformed(arrival, mesh::Verdict::SEAL, out);
    } else if (TransferPtr t = Find(arrival, seal.key(), mesh::Verdict::SEAL, out)) {
      if (arrival.payload_bytes > 0) {
        collect = t;
      } else {
        TakeSeal(t, seal, out);
      }
    }
  }
  Flush(std::move(out));
  if (collect) return Collect(arrival, collect, mesh::Verdict::SEAL);
  return NothingWanted(arrival);
}

absl::StatusOr<PayloadTarget> HandoffReceiver::Impl::OnAlive(const Arrival& arrival) {
  mesh::Alive alive;
  const bool parsed =
      alive.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  std::lock_guard lock(mutex_);
  const auto it = by_id_.find(alive.key().transfer_id());
  // It may overtake or be overtaken by anything, so it is no reason to refuse.
  if (parsed && it != by_id_.end() && SameToken(it->second->key, alive.key()) &&
      it->second->peer == arrival.peer) {
    Heard(it->second);
  } else {
    ++stats_.late;
  }
  return NothingWanted(arrival);
}

// A long manifest or seal lands in a buffer of its own, bounded by what the grant can need.
absl::StatusOr<PayloadTarget> HandoffReceiver::Impl::Collect(const Arrival& arrival,
                                                             const TransferPtr& t,
                                                             mesh::Verdict::Stage stage) {
  const int64_t most = t->incoming.plan().size() * kHandoffRegionWireBytes + kManifestFixedBytes;
  if (arrival.payload_bytes > most) {
    Outcome out;
    {
      std::lock_guard lock(mutex_);
      Refuse(t, stage,
             {mesh::MALFORMED,
              absl::StrFormat("%d bytes where at most %d are needed", arrival.payload_bytes, most)},
             out);
    }
    Flush(std::move(out));
    return InvalidArgument("hand-off: message of %d bytes; at most %d", arrival.payload_bytes,
                           most);
  }
  auto buffer = std::make_shared<std::string>(static_cast<size_t>(arrival.payload_bytes), '\0');
  PayloadTarget target;
  target.buffer = std::as_writable_bytes(std::span<char>(buffer->data(), buffer->size()));
  target.done = [self = shared_from_this(), t, stage, buffer](absl::Status status) {
    self->OnCollected(t, stage, *buffer, status);
  };
  return target;
}

void HandoffReceiver::Impl::OnCollected(const TransferPtr& t, mesh::Verdict::Stage stage,
                                        std::string_view bytes, const absl::Status& status) {
  Outcome out;
  {
    std::lock_guard lock(mutex_);
    const int size = static_cast<int>(bytes.size());
    mesh::Manifest manifest;
    mesh::Seal seal;
    if (t->ended) return;
    if (!status.ok()) {
      Refuse(t, stage, {mesh::PEER_LOST, MessageOf(status)}, out);
    } else if (stage == mesh::Verdict::MANIFEST ? !manifest.ParseFromArray(bytes.data(), size)
                                                : !seal.ParseFromArray(bytes.data(), size)) {
      Refuse(t, stage, {mesh::MALFORMED, "the message does not parse"}, out);
    } else if (stage == mesh::Verdict::MANIFEST) {
      TakeManifest(t, manifest, out);
    } else {
      TakeSeal(t, seal, out);
    }
  }
  Flush(std::move(out));
}

absl::StatusOr<PayloadTarget> HandoffReceiver::Impl::OnSegment(const Arrival& arrival) {
  mesh::Segment segment;
  const bool parsed =
      segment.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  Outcome out;
  PayloadTarget target;
  {
    std::lock_guard lock(mutex_);
    if (!parsed) {
      Malformed(arrival, mesh::Verdict::SEGMENT, out);
    } else if (TransferPtr t = Find(arrival, segment.key(), mesh::Verdict::SEGMENT, out)) {
      Refusal refusal = t->incoming.TakeSegment(segment, arrival.payload_bytes, target.buffer);
      if (!refusal.ok()) {
        Refuse(t, mesh::Verdict::SEGMENT, std::move(refusal), out);
      } else {
        ++t->in_flight;
        Heard(t);
        t->first_segment = std::min(t->first_segment, clock_->Now());
        if (options_.verify_checksums) target.crc32c = segment.crc32c();
        target.cold = coming_bytes_ > kCachedBytesMax;
        target.done = [self = shared_from_this(), t, region = segment.region(),
                       offset = segment.offset()](absl::Status status) {
          self->OnLanded(t, region, offset, status);
        };
      }
    }
  }
  Flush(std::move(out));
  if (target.buffer.empty()) return InvalidArgument("hand-off: segment refused");
  return target;
}

void HandoffReceiver::Impl::OnLanded(const TransferPtr& t, uint32_t region, uint64_t offset,
                                     const absl::Status& status) {
  Outcome out;
  {
    std::lock_guard lock(mutex_);
    --t->in_flight;
    if (t->ended) {
      t->deadline = clock_->Now() + options_.drain_grace;  // the peer still writes
      Release(t, out);
    } else if (absl::IsDataLoss(status)) {
      Refuse(t, mesh::Verdict::SEGMENT,
             {mesh::CHECKSUM, absl::StrFormat("%s at %d: %s", t->incoming.RegionName(region),
                                              offset, MessageOf(status))},
             out);
    } else if (!status.ok()) {
      Refuse(t, mesh::Verdict::SEGMENT, {mesh::PEER_LOST, MessageOf(status)}, out);
    } else {
      t->incoming.Landed(region, offset);
      t->last_segment = clock_->Now();
      Heard(t);
      FinishIfWhole(t, out);
    }
  }
  Flush(std::move(out));
}

// The open transfer a message belongs to; null when it was refused or dropped here.
TransferPtr HandoffReceiver::Impl::Find(const Arrival& arrival, const mesh::TransferKey& key,
                                        mesh::Verdict::Stage stage, Outcome& out) {
  const auto it = by_id_.find(key.transfer_id());
  if (it != by_id_.end() && SameToken(it->second->key, key) &&
      (it->second->peer == 0 || it->second->peer == arrival.peer)) {
    const TransferPtr t = it->second;
    if (key.receiver_epoch() != options_.epoch) {
      t->peer = arrival.peer;
      Refuse(t, stage,
             {mesh::STALE_EPOCH, absl::StrFormat("epoch %d; this worker's is %d",
                                                 key.receiver_epoch(), options_.epoch)},
             out);
      return nullptr;
    }
    if (stage != mesh::Verdict::MANIFEST && !t->incoming.accepted()) {
      t->peer = arrival.peer;
      Refuse(t, stage, {mesh::MALFORMED, "data before an accepted manifest"}, out);
      return nullptr;
    }
    return t;
  }
  const bool failed_before =
      std::find(failed_ids_.begin(), failed_ids_.end(), key.transfer_id()) != failed_ids_.end();
  if (failed_before && stage != mesh::Verdict::MANIFEST) {
    ++stats_.late;
  } else if (key.receiver_epoch() != options_.epoch) {
    RefuseStray(
        arrival, key, stage, mesh::STALE_EPOCH,
        absl::StrFormat("epoch %d; this worker's is %d", key.receiver_epoch(), options_.epoch),
        out);
  } else {
    RefuseStray(arrival, key, stage, mesh::UNKNOWN_TRANSFER,
                "no open landing has this id and token", out);
  }
  return nullptr;
}

void HandoffReceiver::Impl::TakeManifest(const TransferPtr& t, const mesh::Manifest& manifest,
                                         Outcome& out) {
  Refusal refusal;
  if (manifest.key().transfer_id() != t->key.transfer_id() || !SameToken(manifest.key(), t->key)) {
    refusal = {mesh::UNKNOWN_TRANSFER, "header and manifest name different transfers"};
  } else if (manifest.request_id() != t->request_id) {
    refusal = {mesh::UNKNOWN_TRANSFER, absl::StrFormat("landing of request %s used for %s",
                                                       t->request_id, manifest.request_id())};
  } else if (manifest.prefix() != t->prefix) {
    refusal = {mesh::WRONG_PREFIX, "the manifest names another prefix than was asked for"};
  } else {
    refusal = t->incoming.TakeManifest(manifest, options_.identity);
  }
  if (!refusal.ok()) return Refuse(t, mesh::Verdict::MANIFEST, std::move(refusal), out);
  mesh::Verdict verdict;
  *verdict.mutable_key() = t->key;
  verdict.set_stage(mesh::Verdict::MANIFEST);
  verdict.set_idle_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.idle_max)));
  Heard(t);
  coming_bytes_ += t->incoming.plan().bytes();
  out.answers.push_back({t->peer, std::move(verdict), t->request_id});
}

// The sender works. After the seal only the grace counts.
void HandoffReceiver::Impl::Heard(const TransferPtr& t) const {
  if (t->ended || t->incoming.sealed()) return;
  t->deadline = std::min(t->limit, clock_->Now() + options_.idle_max);
}

void HandoffReceiver::Impl::TakeSeal(const TransferPtr& t, const mesh::Seal& seal, Outcome& out) {
  Refusal refusal;
  if (seal.key().transfer_id() != t->key.transfer_id() || !SameToken(seal.key(), t->key)) {
    refusal = {mesh::UNKNOWN_TRANSFER, "header and seal name different transfers"};
  } else {
    refusal = t->incoming.TakeSeal(seal);
  }
  if (!refusal.ok()) return Refuse(t, mesh::Verdict::SEAL, std::move(refusal), out);
  t->deadline = std::min(t->limit, clock_->Now() + options_.seal_grace);
  FinishIfWhole(t, out);
}

void HandoffReceiver::Impl::FinishIfWhole(const TransferPtr& t, Outcome& out) {
  if (!t->incoming.whole()) return;
  if (options_.verify_checksums) {
    Refusal refusal = t->incoming.CheckSeal();
    if (!refusal.ok()) return Refuse(t, mesh::Verdict::SEAL, std::move(refusal), out);
  }
  End(t);
  ++stats_.completed;
  stats_.bytes += t->incoming.landed_bytes();

  HandoffCompleted completed;
  completed.request_id = t->request_id;
  completed.serial = t->serial;
  completed.bytes = t->incoming.landed_bytes();
  completed.seconds = t->seconds();
  completed.restored_tokens = t->incoming.restored_tokens();
  completed.state = std::move(t->buffers.state_);
  completed.state->Place(t->incoming.plan().position(), completed.state->blocks());
  out.events.push_back(std::move(completed));

  mesh::Verdict verdict;
  *verdict.mutable_key() = t->key;
  verdict.set_stage(mesh::Verdict::SEAL);
  out.answers.push_back({t->peer, std::move(verdict), t->request_id});
}

// A header that does not parse names no transfer: every one of the connection is in doubt.
void HandoffReceiver::Impl::Malformed(const Arrival& arrival, mesh::Verdict::Stage stage,
                                      Outcome& out) {
  std::vector<TransferPtr> hit;
  for (const auto& [id, t] : by_id_) {
    if (t->peer == arrival.peer) hit.push_back(t);
  }
  const std::string detail = "a message header does not parse";
  for (const TransferPtr& t : hit) Refuse(t, stage, {mesh::MALFORMED, detail}, out);
  if (hit.empty()) RefuseStray(arrival, {}, stage, mesh::MALFORMED, detail, out);
}

void HandoffReceiver::Impl::Refuse(const TransferPtr& t, mesh::Verdict::Stage stage,
                                   Refusal refusal, Outcome& out) {
  ++stats_.refused[refusal.reason];
  t->refusal = std::move(refusal);
  if (t->peer != 0) {
    mesh::Verdict verdict;
    *verdict.mutable_key() = t->key;
    verdict.set_stage(stage);
    verdict.set_reason(t->refusal.reason);
    verdict.set_detail(t->refusal.detail);
    out.answers.push_back({t->peer, std::move(verdict), t->request_id});
  }
  End(t);
  Release(t, out);
}

void HandoffReceiver::Impl::RefuseStray(const Arrival& arrival, const mesh::TransferKey& key,
                                        mesh::Verdict::Stage stage, mesh::RefusalReason reason,
                                        std::string detail, Outcome& out) {
  ++stats_.refused[reason];
  mesh::Verdict verdict;
  *verdict.mutable_key() = key;
  verdict.set_stage(stage);
  verdict.set_reason(reason);
  verdict.set_detail(std::move(detail));
  out.answers.push_back({arrival.peer, std::move(verdict), ""});
}

// Closes the landing: no later message finds it.
void HandoffReceiver::Impl::End(const TransferPtr& t) {
  t->ended = true;
  if (t->incoming.accepted()) coming_bytes_ -= t->incoming.plan().bytes();
  t->deadline = clock_->Now() + options_.drain_grace;
  by_id_.erase(t->key.transfer_id());
  const auto it = by_request_.find(t->request_id);
  if (it != by_request_.end() && it->second == t) by_request_.erase(it);
  if (t->refusal.reason == mesh::NONE) return;
  if (failed_ids_.size() < kFailedIdsKept) {
    failed_ids_.push_back(t->key.transfer_id());
  } else {
    failed_ids_[failed_next_] = t->key.transfer_id();
    failed_next_ = (failed_next_ + 1) % kFailedIdsKept;
  }
}

// Gives an ended transfer's buffers on once nothing writes into them.
void HandoffReceiver::Impl::Release(const TransferPtr& t, Outcome& out) {
  const auto waiting = std::find(draining_.begin(), draining_.end(), t);
  if (t->in_flight > 0) {
    if (waiting == draining_.end()) draining_.push_back(t);
    return;
  }
  if (waiting != draining_.end()) draining_.erase(waiting);
  if (t->silent) {
    out.unused.push_back(std::move(t->buffers));
    return;
  }
  HandoffRefused refused;
  refused.request_id = t->request_id;
  refused.serial = t->serial;
  refused.reason = t->refusal.reason;
  refused.detail = t->refusal.detail;
  refused.retryable = ReasonRetryable(t->refusal.reason);
  refused.buffers = std::move(t->buffers);
  refused.bytes = t->incoming.landed_bytes();
  refused.seconds = t->seconds();
  out.events.push_back(std::move(refused));
}

void HandoffReceiver::Impl::Flush(Outcome out) {
  for (const Outcome::Answer& answer : out.answers) {
    const mesh::Verdict& verdict = answer.verdict;
    if (verdict.reason() != mesh::NONE) {
      LogWarning("handoff.refused", {{"request", answer.request_id},
                                     {"reason", ReasonName(verdict.reason())},
                                     {"detail", verdict.detail()}});
    }
    transport_->Send(answer.peer, MessageType::kHandoffVerdict, verdict.SerializeAsString(), {},
                     [](const absl::Status&) {});
  }
  for (HandoffEvent& event : out.events) on_event_(std::move(event));
  for (const PeerId peer : out.disconnects) transport_->Disconnect(peer);
}

void HandoffReceiver::Impl::OnPeerLost(PeerId peer, const absl::Status& reason) {
  Outcome out;
  {
    std::lock_guard lock(mutex_);
    std::vector<TransferPtr> hit;
    for (const auto& [id, t] : by_id_) {
      if (t->peer == peer) hit.push_back(t);
    }
    for (const TransferPtr& t : hit) {
      t->peer = 0;
      Refuse(t, mesh::Verdict::SEGMENT, {mesh::PEER_LOST, MessageOf(reason)}, out);
    }
  }
  Flush(std::move(out));
}

HandoffReceiver::HandoffReceiver(Transport* transport, const Clock* clock, Entropy* entropy,
                                 HandoffReceiverOptions options, EventCallback on_event)
    : impl_(std::make_shared<Impl>(transport, clock, entropy, std::move(options),
                                   std::move(on_event))) {
  transport->SetHandler(MessageType::kHandoffManifest, this);
  transport->SetHandler(MessageType::kHandoffSegment, this);
  transport->SetHandler(MessageType::kHandoffSeal, this);
  transport->SetHandler(MessageType::kHandoffAlive, this);
}

HandoffReceiver::~HandoffReceiver() = default;

absl::StatusOr<mesh::Landing> HandoffReceiver::Grant(HandoffGrant grant) {
  return impl_->Grant(std::move(grant));
}
void HandoffReceiver::Revoke(const RequestId& request_id) { impl_->Revoke(request_id); }
void HandoffReceiver::Tick(absl::Time now) { impl_->Tick(now); }
HandoffReceiverStats HandoffReceiver::stats() const { return impl_->stats(); }
absl::StatusOr<PayloadTarget> HandoffReceiver::OnMessage(const Arrival& arrival) {
  return impl_->OnMessage(arrival);
}
void HandoffReceiver::OnPeerLost(PeerId peer, const absl::Status& reason) {
  impl_->OnPeerLost(peer, reason);
}

}  // namespace deltamesh
