#include "runtime/transfer/handoff_receiver.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "runtime/base/crc32c.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/crc32c_combine.h"

namespace deltamesh {
namespace {

// A segment shorter than this must end its region; bounds the pieces a region can be cut into.
constexpr uint64_t kSegmentBytesMin = 4096;
// Ids of failed transfers kept, so that what was still under way is not taken for an attack.
constexpr size_t kFailedIdsKept = 256;
// Room in a long manifest besides its regions.
constexpr int64_t kManifestFixedBytes = 4096;

struct Piece {
  uint64_t length = 0;
  uint32_t crc = 0;
  bool landed = false;
};

// One region of the manifest.
struct Progress {
  int64_t planned = -1;  // index in the plan
  std::span<std::byte> memory;
  uint64_t landed_bytes = 0;
  std::map<uint64_t, Piece> pieces;  // by offset
};

struct Transfer {
  Transfer(const StateLayout& layout, HandoffGrant grant)
      : request_id(std::move(grant.request_id)),
        attempt(grant.attempt),
        plan(layout, grant.position, grant.buffers.have_blocks()),
        buffers(std::move(grant.buffers)) {}

  const RequestId request_id;
  const uint32_t attempt;
  const RegionPlan plan;
  HandoffBuffers buffers;
  mesh::TransferKey key;
  absl::Time deadline;

  PeerId peer = 0;                // bound by the first manifest
  bool accepted = false;          // the manifest was verified
  std::vector<Progress> regions;  // in the manifest's order
  uint64_t landed_bytes = 0;
  absl::Time first_segment = absl::InfiniteFuture(), last_segment = absl::InfinitePast();
  std::vector<uint32_t> seal;  // checksums by region, once sealed
  bool sealed = false;

  int in_flight = 0;  // payloads that may still write
  bool ended = false;
  bool silent = false;  // revoked: no event
  mesh::RefusalReason reason = mesh::NONE;
  std::string detail;
  bool disconnect_asked = false;

  double seconds() const {
    return last_segment < first_segment ? 0.0 : absl::ToDoubleSeconds(last_segment - first_segment);
  }
};
using TransferPtr = std::shared_ptr<Transfer>;

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

std::span<std::byte> Bytes(std::span<float> floats) { return std::as_writable_bytes(floats); }

bool SameToken(const mesh::TransferKey& a, const mesh::TransferKey& b) {
  return ((a.token_low() ^ b.token_low()) | (a.token_high() ^ b.token_high())) == 0;
}

// The first reason why `region` is not the planned one, or empty.
std::string ShapeError(const mesh::Region& region, const mesh::Region& planned) {
  if (region.dtype() != planned.dtype()) return "element type differs; FLOAT32 is expected";
  if (region.bytes() != planned.bytes()) {
    return absl::StrFormat("%d bytes; %d are expected", region.bytes(), planned.bytes());
  }
  if (region.head_begin() != planned.head_begin() || region.head_end() != planned.head_end()) {
    return absl::StrFormat("heads [%d, %d); [%d, %d) are expected", region.head_begin(),
                           region.head_end(), planned.head_begin(), planned.head_end());
  }
  return "";
}

}  // namespace

absl::StatusOr<HandoffBuffers> HandoffBuffers::Reserve(const StatePools& pools, int64_t tokens,
                                                       std::vector<SlotRef> held) {
  HandoffBuffers buffers;
  buffers.have_blocks_ = static_cast<int64_t>(held.size());
  const int64_t held_tokens = buffers.have_blocks_ * kBlockTokens;
  ASSIGN_OR_RETURN(buffers.state_, SequenceState::Create(pools));
  if (held_tokens > 0) buffers.state_->Restore(held_tokens, std::move(held));
  RETURN_IF_ERROR(buffers.state_->Reserve(std::max<int64_t>(0, tokens - held_tokens)));
  return buffers;
}

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
  absl::StatusOr<Landing> OnMessage(const Arrival& arrival);
  void OnPeerLost(PeerId peer, const absl::Status& reason);

 private:
  absl::StatusOr<Landing> OnManifest(const Arrival& arrival);
  absl::StatusOr<Landing> OnSegment(const Arrival& arrival);
  absl::StatusOr<Landing> OnSeal(const Arrival& arrival);
  absl::StatusOr<Landing> Collect(const Arrival& arrival, const TransferPtr& t,
                                  mesh::Verdict::Stage stage);
  void OnCollected(const TransferPtr& t, mesh::Verdict::Stage stage, std::string_view bytes,
                   const absl::Status& status);
  void OnLanded(const TransferPtr& t, size_t region, uint64_t offset, const absl::Status& status);

  // All below: the caller holds the mutex.
  TransferPtr Find(const Arrival& arrival, const mesh::TransferKey& key, mesh::Verdict::Stage stage,
                   Outcome& out);
  void TakeManifest(const TransferPtr& t, const mesh::Manifest& manifest, Outcome& out);
  bool TakeRegions(const TransferPtr& t, const mesh::Manifest& manifest, Outcome& out);
  void TakeSeal(const TransferPtr& t, const mesh::Seal& seal, Outcome& out);
  std::span<std::byte> TakeSegment(const TransferPtr& t, const mesh::Segment& segment,
                                   int64_t payload_bytes, Outcome& out);
  void FinishIfWhole(const TransferPtr& t, Outcome& out);
  bool ChecksumsAgree(const TransferPtr& t, Outcome& out);
  std::span<std::byte> Memory(const Transfer& t, int64_t planned) const;
  void Malformed(const Arrival& arrival, mesh::Verdict::Stage stage, Outcome& out);
  void Refuse(const TransferPtr& t, mesh::Verdict::Stage stage, mesh::RefusalReason reason,
              std::string detail, Outcome& out);
  void RefuseStray(const Arrival& arrival, const mesh::TransferKey& key, mesh::Verdict::Stage stage,
                   mesh::RefusalReason reason, std::string detail, Outcome& out);
  void End(const TransferPtr& t);
  void Release(const TransferPtr& t, Outcome& out);
  std::string FirstMissing(const Transfer& t) const;

  // Without the mutex.
  void Flush(Outcome out);

  Transport* const transport_;
  const Clock* const clock_;
  Entropy* const entropy_;
  const HandoffReceiverOptions options_;
  const EventCallback on_event_;

  mutable std::mutex mutex_;
  absl::flat_hash_map<uint64_t, TransferPtr> by_id_;        // open ones
  absl::flat_hash_map<RequestId, TransferPtr> by_request_;  // open ones
  std::vector<TransferPtr> draining_;
  std::vector<uint64_t> failed_ids_;  // a ring
  size_t failed_next_ = 0;
  HandoffReceiverStats stats_;
};

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
  const absl::Time deadline = std::min(grant.deadline, clock_->Now() + options_.timeout);
  auto t = std::make_shared<Transfer>(options_.layout, std::move(grant));
  t->deadline = deadline;

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
  landing.set_position(static_cast<uint64_t>(t->plan.position()));
  landing.set_have_blocks(static_cast<uint64_t>(t->plan.have_blocks()));
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
    t->reason = mesh::UNKNOWN_TRANSFER;
    t->detail = "the landing was revoked";
    ++stats_.revoked;
    if (t->peer != 0) {
      mesh::Verdict verdict;
      *verdict.mutable_key() = t->key;
      verdict.set_stage(mesh::Verdict::SEGMENT);
      verdict.set_reason(t->reason);
      verdict.set_detail(t->detail);
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
      if (t->sealed) {
        Refuse(t, mesh::Verdict::SEAL, mesh::INCOMPLETE, FirstMissing(*t), out);
      } else {
        Refuse(t, mesh::Verdict::SEGMENT, mesh::TIMEOUT,
               absl::StrFormat("%d of %d bytes arrived before the deadline", t->landed_bytes,
                               t->plan.bytes()),
               out);
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

absl::StatusOr<Landing> HandoffReceiver::Impl::OnMessage(const Arrival& arrival) {
  switch (arrival.type) {
    case MessageType::kHandoffManifest:
      return OnManifest(arrival);
    case MessageType::kHandoffSegment:
      return OnSegment(arrival);
    case MessageType::kHandoffSeal:
      return OnSeal(arrival);
    default:
      return InvalidArgument("message type %d is no part of a hand-off",
                             static_cast<int>(arrival.type));
  }
}

absl::StatusOr<Landing> HandoffReceiver::Impl::OnManifest(const Arrival& arrival) {
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
        Refuse(t, mesh::Verdict::MANIFEST, mesh::UNKNOWN_TRANSFER, "the landing was used already",
               out);
      } else {
        t->peer = arrival.peer;
        if (arrival.payload_bytes > 0) {
          collect = t;
        } else {
          TakeManifest(t, manifest, out);
        }
      }
    }
  }
  Flush(std::move(out));
  return collect ? Collect(arrival, collect, mesh::Verdict::MANIFEST) : Landing{};
}

absl::StatusOr<Landing> HandoffReceiver::Impl::OnSeal(const Arrival& arrival) {
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
  return collect ? Collect(arrival, collect, mesh::Verdict::SEAL) : Landing{};
}

// A long manifest or seal lands in a buffer of its own, bounded by what the grant can need.
absl::StatusOr<Landing> HandoffReceiver::Impl::Collect(const Arrival& arrival, const TransferPtr& t,
                                                       mesh::Verdict::Stage stage) {
  const int64_t most = t->plan.size() * kHandoffRegionWireBytes + kManifestFixedBytes;
  if (arrival.payload_bytes > most) {
    Outcome out;
    {
      std::lock_guard lock(mutex_);
      Refuse(t, stage, mesh::MALFORMED,
             absl::StrFormat("%d bytes where at most %d are needed", arrival.payload_bytes, most),
             out);
    }
    Flush(std::move(out));
    return InvalidArgument("hand-off: message of %d bytes; at most %d", arrival.payload_bytes,
                           most);
  }
  auto buffer = std::make_shared<std::string>(static_cast<size_t>(arrival.payload_bytes), '\0');
  Landing landing;
  landing.buffer = std::as_writable_bytes(std::span<char>(buffer->data(), buffer->size()));
  landing.done = [self = shared_from_this(), t, stage, buffer](absl::Status status) {
    self->OnCollected(t, stage, *buffer, status);
  };
  return landing;
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
      Refuse(t, stage, mesh::PEER_LOST, MessageOf(status), out);
    } else if (stage == mesh::Verdict::MANIFEST ? !manifest.ParseFromArray(bytes.data(), size)
                                                : !seal.ParseFromArray(bytes.data(), size)) {
      Refuse(t, stage, mesh::MALFORMED, "the message does not parse", out);
    } else if (stage == mesh::Verdict::MANIFEST) {
      TakeManifest(t, manifest, out);
    } else {
      TakeSeal(t, seal, out);
    }
  }
  Flush(std::move(out));
}

absl::StatusOr<Landing> HandoffReceiver::Impl::OnSegment(const Arrival& arrival) {
  mesh::Segment segment;
  const bool parsed =
      segment.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  Outcome out;
  Landing landing;
  {
    std::lock_guard lock(mutex_);
    if (!parsed) {
      Malformed(arrival, mesh::Verdict::SEGMENT, out);
    } else if (TransferPtr t = Find(arrival, segment.key(), mesh::Verdict::SEGMENT, out)) {
      landing.buffer = TakeSegment(t, segment, arrival.payload_bytes, out);
      if (!landing.buffer.empty()) {
        landing.done = [self = shared_from_this(), t, region = size_t{segment.region()},
                        offset = segment.offset()](absl::Status status) {
          self->OnLanded(t, region, offset, status);
        };
      }
    }
  }
  Flush(std::move(out));
  if (landing.buffer.empty()) return InvalidArgument("hand-off: segment refused");
  return landing;
}

void HandoffReceiver::Impl::OnLanded(const TransferPtr& t, size_t region, uint64_t offset,
                                     const absl::Status& status) {
  // Pieces and memory of a transfer stay as they are while a payload is in flight; the checksum is
  // taken without the lock.
  std::span<const std::byte> bytes;
  uint32_t expected = 0;
  {
    std::lock_guard lock(mutex_);
    const Piece& piece = t->regions[region].pieces.at(offset);
    bytes = t->regions[region].memory.subspan(offset, piece.length);
    expected = piece.crc;
  }
  const bool good = status.ok() && (!options_.verify_checksums || Crc32c(bytes) == expected);

  Outcome out;
  {
    std::lock_guard lock(mutex_);
    --t->in_flight;
    if (t->ended) {
      Release(t, out);
    } else if (!status.ok()) {
      Refuse(t, mesh::Verdict::SEGMENT, mesh::PEER_LOST, MessageOf(status), out);
    } else if (!good) {
      Refuse(t, mesh::Verdict::SEGMENT, mesh::CHECKSUM,
             absl::StrFormat("%s, %d bytes at %d", t->plan.Name(t->regions[region].planned),
                             bytes.size(), offset),
             out);
    } else {
      t->regions[region].pieces.at(offset).landed = true;
      t->regions[region].landed_bytes += bytes.size();
      t->landed_bytes += bytes.size();
      t->last_segment = clock_->Now();
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
      Refuse(t, stage, mesh::STALE_EPOCH,
             absl::StrFormat("epoch %d; this worker's is %d", key.receiver_epoch(), options_.epoch),
             out);
      return nullptr;
    }
    if (stage != mesh::Verdict::MANIFEST && !t->accepted) {
      t->peer = arrival.peer;
      Refuse(t, stage, mesh::MALFORMED, "data before an accepted manifest", out);
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
  const auto refuse = [&](mesh::RefusalReason reason, std::string detail) {
    Refuse(t, mesh::Verdict::MANIFEST, reason, std::move(detail), out);
  };
  if (manifest.key().transfer_id() != t->key.transfer_id() || !SameToken(manifest.key(), t->key)) {
    return refuse(mesh::UNKNOWN_TRANSFER, "header and manifest name different transfers");
  }
  if (manifest.request_id() != t->request_id) {
    return refuse(mesh::UNKNOWN_TRANSFER, absl::StrFormat("landing of request %s used for %s",
                                                          t->request_id, manifest.request_id()));
  }
  if (manifest.model_digest() != options_.identity.digest) {
    return refuse(mesh::WRONG_MODEL,
                  absl::StrFormat("sender has model %s, receiver %s", manifest.model_digest(),
                                  options_.identity.digest));
  }
  if (manifest.state_layout() != options_.identity.state_layout) {
    return refuse(mesh::WRONG_LAYOUT,
                  absl::StrFormat("sender has state layout %d, receiver %d",
                                  manifest.state_layout(), options_.identity.state_layout));
  }
  if (manifest.position() != static_cast<uint64_t>(t->plan.position())) {
    return refuse(mesh::WRONG_COUNT, absl::StrFormat("state of %d tokens; %d were asked for",
                                                     manifest.position(), t->plan.position()));
  }
  if (!TakeRegions(t, manifest, out)) return;
  t->accepted = true;
  mesh::Verdict verdict;
  *verdict.mutable_key() = t->key;
  verdict.set_stage(mesh::Verdict::MANIFEST);
  out.answers.push_back({t->peer, std::move(verdict), t->request_id});
}

// Every planned region exactly once and in the planned shape, nothing else.
bool HandoffReceiver::Impl::TakeRegions(const TransferPtr& t, const mesh::Manifest& manifest,
                                        Outcome& out) {
  const RegionPlan& plan = t->plan;
  const auto refuse = [&](mesh::RefusalReason reason, std::string detail) {
    Refuse(t, mesh::Verdict::MANIFEST, reason, std::move(detail), out);
    return false;
  };
  if (manifest.regions_size() > plan.size()) {
    return refuse(mesh::WRONG_REGION, absl::StrFormat("%d regions; %d are expected (extra)",
                                                      manifest.regions_size(), plan.size()));
  }
  std::vector<bool> seen(static_cast<size_t>(plan.size()));
  std::vector<Progress> regions;
  regions.reserve(seen.size());
  for (int i = 0; i < manifest.regions_size(); ++i) {
    const mesh::Region& region = manifest.regions(i);
    const int64_t planned = plan.Find(region);
    if (region.index() != static_cast<uint32_t>(i) || planned < 0) {
      return refuse(mesh::WRONG_REGION,
                    absl::StrFormat("region %d (kind %d, layer %d, block %d) is extra", i,
                                    region.kind(), region.layer(), region.block()));
    }
    if (seen[static_cast<size_t>(planned)]) {
      return refuse(mesh::WRONG_REGION, absl::StrFormat("%s is listed twice", plan.Name(planned)));
    }
    seen[static_cast<size_t>(planned)] = true;
    if (const std::string error = ShapeError(region, plan.At(planned)); !error.empty()) {
      return refuse(mesh::WRONG_REGION, absl::StrFormat("%s: %s", plan.Name(planned), error));
    }
    if (region.token_count() != manifest.position()) {
      return refuse(mesh::WRONG_COUNT,
                    absl::StrFormat("%s reflects %d tokens, the manifest %d", plan.Name(planned),
                                    region.token_count(), manifest.position()));
    }
    Progress progress;
    progress.planned = planned;
    progress.memory = Memory(*t, planned);
    regions.push_back(std::move(progress));
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing != seen.end()) {
    return refuse(mesh::WRONG_REGION,
                  absl::StrFormat("%s is missing", plan.Name(missing - seen.begin())));
  }
  t->regions = std::move(regions);
  return true;
}

// Where the segment's payload goes; empty when it was refused.
std::span<std::byte> HandoffReceiver::Impl::TakeSegment(const TransferPtr& t,
                                                        const mesh::Segment& segment,
                                                        int64_t payload_bytes, Outcome& out) {
  const auto refuse = [&](std::string detail) {
    Refuse(t, mesh::Verdict::SEGMENT, mesh::WRONG_RANGE, std::move(detail), out);
    return std::span<std::byte>();
  };
  if (segment.region() >= t->regions.size()) {
    return refuse(absl::StrFormat("region %d of %d", segment.region(), t->regions.size()));
  }
  Progress& region = t->regions[segment.region()];
  const uint64_t size = region.memory.size();
  const uint64_t offset = segment.offset();
  const uint64_t length = segment.length();
  if (length == 0 || length != static_cast<uint64_t>(payload_bytes) || offset > size ||
      length > size - offset || (length < kSegmentBytesMin && offset + length != size)) {
    return refuse(absl::StrFormat("%s: [%d, +%d) with a payload of %d, region of %d bytes",
                                  t->plan.Name(region.planned), offset, length, payload_bytes,
                                  size));
  }
  const auto next = region.pieces.lower_bound(offset);
  const bool hits_next = next != region.pieces.end() && next->first < offset + length;
  const bool hits_previous = next != region.pieces.begin() &&
                             std::prev(next)->first + std::prev(next)->second.length > offset;
  if (hits_next || hits_previous) {
    return refuse(absl::StrFormat("%s: [%d, +%d) was sent twice", t->plan.Name(region.planned),
                                  offset, length));
  }
  region.pieces[offset] = Piece{length, segment.crc32c(), false};
  ++t->in_flight;
  t->first_segment = std::min(t->first_segment, clock_->Now());
  return region.memory.subspan(offset, length);
}

void HandoffReceiver::Impl::TakeSeal(const TransferPtr& t, const mesh::Seal& seal, Outcome& out) {
  if (seal.key().transfer_id() != t->key.transfer_id() || !SameToken(seal.key(), t->key)) {
    return Refuse(t, mesh::Verdict::SEAL, mesh::UNKNOWN_TRANSFER,
                  "header and seal name different transfers", out);
  }
  if (t->sealed) return Refuse(t, mesh::Verdict::SEAL, mesh::MALFORMED, "sealed twice", out);
  if (static_cast<size_t>(seal.region_crc32c_size()) != t->regions.size()) {
    return Refuse(t, mesh::Verdict::SEAL, mesh::MALFORMED,
                  absl::StrFormat("%d checksums for %d regions", seal.region_crc32c_size(),
                                  t->regions.size()),
                  out);
  }
  t->sealed = true;
  t->seal.assign(seal.region_crc32c().begin(), seal.region_crc32c().end());
  t->deadline = std::min(t->deadline, clock_->Now() + options_.seal_grace);
  FinishIfWhole(t, out);
}

void HandoffReceiver::Impl::FinishIfWhole(const TransferPtr& t, Outcome& out) {
  if (!t->sealed || t->landed_bytes != static_cast<uint64_t>(t->plan.bytes())) return;
  if (options_.verify_checksums && !ChecksumsAgree(t, out)) return;
  End(t);
  ++stats_.completed;
  stats_.bytes += t->landed_bytes;

  HandoffCompleted completed;
  completed.request_id = t->request_id;
  completed.attempt = t->attempt;
  completed.bytes = t->landed_bytes;
  completed.seconds = t->seconds();
  completed.state = std::move(t->buffers.state_);
  completed.state->Restore(t->plan.position(), completed.state->blocks());
  out.events.push_back(std::move(completed));

  mesh::Verdict verdict;
  *verdict.mutable_key() = t->key;
  verdict.set_stage(mesh::Verdict::SEAL);
  out.answers.push_back({t->peer, std::move(verdict), t->request_id});
}

// The pieces cover each region without overlap, so their checksums give the region's.
bool HandoffReceiver::Impl::ChecksumsAgree(const TransferPtr& t, Outcome& out) {
  for (size_t i = 0; i < t->regions.size(); ++i) {
    uint32_t crc = 0;
    for (const auto& [offset, piece] : t->regions[i].pieces)
      crc = Crc32cCombine(crc, piece.crc, piece.length);
    if (crc == t->seal[i]) continue;
    Refuse(t, mesh::Verdict::SEAL, mesh::CHECKSUM,
           absl::StrFormat("%s: content %08x, seal %08x", t->plan.Name(t->regions[i].planned), crc,
                           t->seal[i]),
           out);
    return false;
  }
  return true;
}

std::span<std::byte> HandoffReceiver::Impl::Memory(const Transfer& t, int64_t planned) const {
  const mesh::Region region = t.plan.At(planned);
  const SequenceState& state = *t.buffers.state_;
  switch (region.kind()) {
    case mesh::KDA_STATE:
      return Bytes(SlabStateSpan(options_.layout, state.slab().data(), region.layer()));
    case mesh::CONV_STATE:
      return Bytes(SlabConvSpan(options_.layout, state.slab().data(), region.layer()));
    default:
      return Bytes(
          BlockLatentsSpan(options_.layout, state.blocks()[region.block()].data(), region.layer()));
  }
}

// A header that does not parse names no transfer: every one of the connection is in doubt.
void HandoffReceiver::Impl::Malformed(const Arrival& arrival, mesh::Verdict::Stage stage,
                                      Outcome& out) {
  std::vector<TransferPtr> hit;
  for (const auto& [id, t] : by_id_) {
    if (t->peer == arrival.peer) hit.push_back(t);
  }
  const std::string detail = "a message header does not parse";
  for (const TransferPtr& t : hit) Refuse(t, stage, mesh::MALFORMED, detail, out);
  if (hit.empty()) RefuseStray(arrival, {}, stage, mesh::MALFORMED, detail, out);
}

void HandoffReceiver::Impl::Refuse(const TransferPtr& t, mesh::Verdict::Stage stage,
                                   mesh::RefusalReason reason, std::string detail, Outcome& out) {
  ++stats_.refused[reason];
  t->reason = reason;
  t->detail = std::move(detail);
  if (t->peer != 0) {
    mesh::Verdict verdict;
    *verdict.mutable_key() = t->key;
    verdict.set_stage(stage);
    verdict.set_reason(reason);
    verdict.set_detail(t->detail);
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
  t->deadline = clock_->Now() + options_.drain_grace;
  by_id_.erase(t->key.transfer_id());
  const auto it = by_request_.find(t->request_id);
  if (it != by_request_.end() && it->second == t) by_request_.erase(it);
  if (t->reason == mesh::NONE) return;
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
  refused.attempt = t->attempt;
  refused.reason = t->reason;
  refused.detail = t->detail;
  refused.retryable = ReasonRetryable(t->reason);
  refused.buffers = std::move(t->buffers);
  refused.bytes = t->landed_bytes;
  refused.seconds = t->seconds();
  out.events.push_back(std::move(refused));
}

std::string HandoffReceiver::Impl::FirstMissing(const Transfer& t) const {
  for (const Progress& region : t.regions) {
    if (region.landed_bytes == region.memory.size()) continue;
    return absl::StrFormat("%s: %d of %d bytes arrived; %d of %d in all",
                           t.plan.Name(region.planned), region.landed_bytes, region.memory.size(),
                           t.landed_bytes, t.plan.bytes());
  }
  return "nothing is missing";
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
      Refuse(t, mesh::Verdict::SEGMENT, mesh::PEER_LOST, MessageOf(reason), out);
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
}

HandoffReceiver::~HandoffReceiver() = default;

absl::StatusOr<mesh::Landing> HandoffReceiver::Grant(HandoffGrant grant) {
  return impl_->Grant(std::move(grant));
}
void HandoffReceiver::Revoke(const RequestId& request_id) { impl_->Revoke(request_id); }
void HandoffReceiver::Tick(absl::Time now) { impl_->Tick(now); }
HandoffReceiverStats HandoffReceiver::stats() const { return impl_->stats(); }
absl::StatusOr<Landing> HandoffReceiver::OnMessage(const Arrival& arrival) {
  return impl_->OnMessage(arrival);
}
void HandoffReceiver::OnPeerLost(PeerId peer, const absl::Status& reason) {
  impl_->OnPeerLost(peer, reason);
}

}  // namespace deltamesh
