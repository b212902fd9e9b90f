#include "runtime/transfer/handoff_sender.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/base/crc32c.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/crc32c_combine.h"

namespace deltamesh {
namespace {

// A piece of a region that waits for its turn.
struct Job {
  SlotRef pin;
  std::span<const std::byte> bytes;
  uint32_t region = 0;
  uint64_t offset = 0;
};

struct Transfer {
  Transfer(const StateLayout& layout, HandoffStart start)
      : request_id(std::move(start.request_id)),
        serial(start.serial),
        prefix(std::move(start.prefix)),
        plan(layout, static_cast<int64_t>(start.landing.position()),
             static_cast<int64_t>(start.landing.have_blocks())),
        key(TransferKeyOf(start.landing)),
        crcs(static_cast<size_t>(plan.size())),
        given(static_cast<size_t>(plan.size())) {
    *segment.mutable_key() = key;
  }

  const RequestId request_id;
  const uint32_t serial;
  const std::string prefix;
  const RegionPlan plan;
  const mesh::TransferKey key;
  PeerId peer = 0;
  absl::Time started, deadline;
  absl::Time progress;            // when what is waited for began or last moved
  absl::Time said;                // the last sign of life
  absl::Duration alive_interval;  // between two

  bool accepted = false;  // the receiver took the manifest
  int64_t restored = 0;   // positions; of the seal
  std::deque<Job> jobs;
  // Of the thread in Pump: what was sent of each region sums up to, and the header it fills.
  std::vector<uint32_t> crcs;
  mesh::Segment segment;
  std::vector<bool> given;  // by region
  int64_t given_count = 0;
  uint64_t bytes = 0;
  int64_t in_flight = 0;  // segments the transport may still read
  bool pumping = false;   // a thread is in Pump; others leave the work to it
  bool seal_sent = false;
  bool ended = false;
  bool disconnect_asked = false;

  // On the receiver or the transport, not on the owner of this transfer.
  bool waits() const { return !accepted || seal_sent || in_flight > 0; }
};
using TransferPtr = std::shared_ptr<Transfer>;

void AddRegion(mesh::Manifest& manifest, const RegionPlan& plan, int64_t index) {
  *manifest.add_regions() = plan.At(index);
}

}  // namespace

class HandoffSender::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Transport* transport, const Clock* clock, HandoffSenderOptions options,
       ResultCallback on_result)
      : transport_(transport),
        clock_(clock),
        options_(std::move(options)),
        on_result_(std::move(on_result)) {}

  absl::Status Begin(HandoffStart start);
  void SendBlock(const RequestId& request_id, int64_t block, SlotRef pin);
  void SendLayer(const RequestId& request_id, int64_t kda_layer, std::span<const float> state,
                 std::span<const float> conv, const SlotRef& pin);
  void SetRestored(const RequestId& request_id, int64_t tokens);
  const StateLayout& layout() const { return options_.layout; }
  void Cancel(const RequestId& request_id);
  void Tick(absl::Time now);
  void KeepAlive(absl::Time now);
  HandoffSenderStats stats() const;
  void OnVerdict(const Arrival& arrival);
  void OnPeerLost(PeerId peer, const absl::Status& reason);

 private:
  TransferPtr Find(const RequestId& request_id) const;
  void Accept(Transfer& t, const mesh::Verdict& verdict);
  std::string WhyLate(const Transfer& t, absl::Time now) const;
  std::vector<Job> Cut(int64_t region, std::span<const float> content, const SlotRef& pin) const;
  void Give(const TransferPtr& t, int64_t region, std::span<const float> content,
            const SlotRef& pin);
  void SendManifest(const TransferPtr& t);
  void SendSeal(const TransferPtr& t);
  void SendMessage(const TransferPtr& t, MessageType type, const std::string& key_only,
                   std::string whole);
  void SendJob(const TransferPtr& t, Job job);
  void Pump(const TransferPtr& t);
  void OnSent(const TransferPtr& t, const absl::Status& status, bool segment);
  void Fail(const TransferPtr& t, mesh::RefusalReason reason, const std::string& detail);
  void Finish(const TransferPtr& t, mesh::RefusalReason reason, const absl::Status& status);
  bool End(const TransferPtr& t, std::deque<Job>& unpinned);  // the caller holds the mutex

  Transport* const transport_;
  const Clock* const clock_;
  const HandoffSenderOptions options_;
  const ResultCallback on_result_;

  mutable std::mutex mutex_;
  absl::flat_hash_map<RequestId, TransferPtr> by_request_;  // open ones
  absl::flat_hash_map<std::string, PeerId> peers_;          // by address
  std::vector<TransferPtr> draining_;
  absl::Time ticked_ = absl::InfinitePast();
  HandoffSenderStats stats_;
};

absl::Status HandoffSender::Impl::Begin(HandoffStart start) {
  const mesh::Landing& landing = start.landing;
  if (landing.position() == 0 || landing.position() % kBlockTokens != 0) {
    return InvalidArgument("landing.position: %d; use a positive multiple of %d",
                           landing.position(), kBlockTokens);
  }
  if (landing.position() > (uint64_t{1} << 40) ||
      landing.have_blocks() > landing.position() / kBlockTokens) {
    return InvalidArgument("landing.have_blocks: %d of a state at %d tokens; at most position / %d",
                           landing.have_blocks(), landing.position(), kBlockTokens);
  }
  if (landing.transport_address().empty()) {
    return InvalidArgument("landing.transport_address: empty; the receiver must give one");
  }
  Cancel(start.request_id);
  const std::string address = landing.transport_address();
  const std::string receiver = landing.receiver();
  const uint64_t epoch = landing.receiver_epoch();
  const absl::Time now = clock_->Now();
  const absl::Time deadline = start.deadline;
  auto t = std::make_shared<Transfer>(options_.layout, std::move(start));
  t->started = t->progress = t->said = now;
  t->deadline = deadline;
  bool connected = false;
  {
    std::lock_guard lock(mutex_);
    if (static_cast<int64_t>(by_request_.size()) >= options_.transfers_max) {
      return ResourceExhausted("hand-offs: %d are open, as many as allowed; retry later",
                               by_request_.size());
    }
    auto it = peers_.find(address);
    if (it == peers_.end()) {
      ASSIGN_OR_RETURN(const PeerId peer, transport_->Connect(address));
      it = peers_.emplace(address, peer).first;
      connected = true;
    }
    t->peer = it->second;
    by_request_[t->request_id] = t;
    ++stats_.started;
  }
  if (connected && options_.on_connected) options_.on_connected(t->peer, receiver, epoch);
  SendManifest(t);
  return absl::OkStatus();
}

void HandoffSender::Impl::SendManifest(const TransferPtr& t) {
  mesh::Manifest manifest;
  *manifest.mutable_key() = t->key;
  const std::string key_only = manifest.SerializeAsString();
  manifest.set_request_id(t->request_id);
  manifest.set_sender(options_.name);
  manifest.set_sender_epoch(options_.epoch);
  manifest.set_model_digest(options_.identity.digest);
  manifest.set_state_layout(options_.identity.state_layout);
  manifest.set_position(static_cast<uint64_t>(t->plan.position()));
  manifest.set_prefix(t->prefix);
  for (int64_t i = 0; i < t->plan.size(); ++i) AddRegion(manifest, t->plan, i);
  SendMessage(t, MessageType::kHandoffManifest, key_only, manifest.SerializeAsString());
}

void HandoffSender::Impl::SendSeal(const TransferPtr& t) {
  mesh::Seal seal;
  *seal.mutable_key() = t->key;
  const std::string key_only = seal.SerializeAsString();
  for (const uint32_t crc : t->crcs) seal.add_region_crc32c(crc);
  seal.set_restored_tokens(static_cast<uint64_t>(t->restored));
  SendMessage(t, MessageType::kHandoffSeal, key_only, seal.SerializeAsString());
}

// In the header when short, else in the payload with the key in the header.
void HandoffSender::Impl::SendMessage(const TransferPtr& t, MessageType type,
                                      const std::string& key_only, std::string whole) {
  if (static_cast<int64_t>(whole.size()) <= kHandoffInlineBytes) {
    transport_->Send(t->peer, type, whole, {},
                     [self = shared_from_this(), t](const absl::Status& status) {
                       self->OnSent(t, status, false);
                     });
    return;
  }
  auto payload = std::make_shared<const std::string>(std::move(whole));
  const auto bytes = std::as_bytes(std::span<const char>(payload->data(), payload->size()));
  transport_->Send(t->peer, type, key_only, bytes,
                   [self = shared_from_this(), t, payload](const absl::Status& status) {
                     self->OnSent(t, status, false);
                   });
}

TransferPtr HandoffSender::Impl::Find(const RequestId& request_id) const {
  std::lock_guard lock(mutex_);
  const auto it = by_request_.find(request_id);
  return it == by_request_.end() ? nullptr : it->second;
}

void HandoffSender::Impl::SendBlock(const RequestId& request_id, int64_t block, SlotRef pin) {
  const TransferPtr t = Find(request_id);
  if (t == nullptr || block < t->plan.have_blocks()) return;
  CHECK(block < t->plan.blocks(), "block %d of %d", block, t->plan.blocks());
  for (int64_t layer = 0; layer < options_.layout.mla_layers; ++layer) {
    Give(t, t->plan.LatentsIndex(block, layer),
         BlockLatentsSpan(options_.layout, pin.data(), layer), pin);
  }
  Pump(t);
}

void HandoffSender::Impl::SendLayer(const RequestId& request_id, int64_t kda_layer,
                                    std::span<const float> state, std::span<const float> conv,
                                    const SlotRef& pin) {
  const TransferPtr t = Find(request_id);
  if (t == nullptr) return;
  CHECK(kda_layer >= 0 && kda_layer < options_.layout.kda_layers, "KDA layer %d of %d", kda_layer,
        options_.layout.kda_layers);
  Give(t, t->plan.StateIndex(kda_layer), state, pin);
  Give(t, t->plan.ConvIndex(kda_layer), conv, pin);
  Pump(t);
}

void HandoffSender::Impl::SetRestored(const RequestId& request_id, int64_t tokens) {
  const TransferPtr t = Find(request_id);
  if (t == nullptr) return;
  std::lock_guard lock(mutex_);
  CHECK(tokens >= 0 && tokens <= t->plan.position() && !t->seal_sent,
        "%d of %d positions restored, sealed: %d", tokens, t->plan.position(), t->seal_sent);
  t->restored = tokens;
}

// Segments of a region, in order.
std::vector<Job> HandoffSender::Impl::Cut(int64_t region, std::span<const float> content,
                                          const SlotRef& pin) const {
  const std::span<const std::byte> bytes = std::as_bytes(content);
  std::vector<Job> jobs;
  for (size_t offset = 0; offset < bytes.size();) {
    const size_t length =
        std::min<size_t>(bytes.size() - offset, static_cast<size_t>(options_.segment_bytes_max));
    Job job;
    job.pin = pin;
    job.bytes = bytes.subspan(offset, length);
    job.region = static_cast<uint32_t>(region);
    job.offset = offset;
    jobs.push_back(std::move(job));
    offset += length;
  }
  return jobs;
}

void HandoffSender::Impl::Give(const TransferPtr& t, int64_t region, std::span<const float> content,
                               const SlotRef& pin) {
  std::vector<Job> jobs = Cut(region, content, pin);
  std::lock_guard lock(mutex_);
  if (t->ended) return;
  CHECK(!t->given[static_cast<size_t>(region)], "%s was given twice", t->plan.Name(region));
  t->given[static_cast<size_t>(region)] = true;
  ++t->given_count;
  for (Job& job : jobs) t->jobs.push_back(std::move(job));
}

// Sends what may be sent, one thread at a time; a completion inside Send finds `pumping` set and
// leaves.
void HandoffSender::Impl::Pump(const TransferPtr& t) {
  std::unique_lock lock(mutex_);
  if (t->pumping) return;
  t->pumping = true;
  while (!t->ended && t->accepted) {
    if (!t->jobs.empty() && t->in_flight < options_.segments_in_flight_max) {
      Job job = std::move(t->jobs.front());
      t->jobs.pop_front();
      const absl::Time now = clock_->Now();
      if (t->in_flight++ == 0) t->progress = now;
      t->said = now;
      t->bytes += job.bytes.size();
      lock.unlock();
      SendJob(t, std::move(job));
      lock.lock();
      continue;
    }
    // The seal waits for the completions, so that it seldom overtakes data.
    if (t->jobs.empty() && t->in_flight == 0 && t->given_count == t->plan.size() && !t->seal_sent) {
      t->seal_sent = true;
      t->progress = clock_->Now();
      lock.unlock();
      SendSeal(t);
      lock.lock();
      continue;
    }
    break;
  }
  t->pumping = false;
}

// Sums what it sends just before it is read for sending: earlier, the content would be read from memory
// twice.
void HandoffSender::Impl::SendJob(const TransferPtr& t, Job job) {
  const uint32_t crc = Crc32c(job.bytes);
  uint32_t& of_region = t->crcs[job.region];
  of_region = Crc32cCombine(of_region, crc, job.bytes.size());
  mesh::Segment& segment = t->segment;
  segment.set_region(job.region);
  segment.set_offset(job.offset);
  segment.set_length(job.bytes.size());
  segment.set_crc32c(crc);
  transport_->Send(
      t->peer, MessageType::kHandoffSegment, segment.SerializeAsString(), job.bytes,
      [self = shared_from_this(), t, pin = std::move(job.pin)](const absl::Status& status) mutable {
        pin = SlotRef();
        self->OnSent(t, status, true);
      });
}

void HandoffSender::Impl::OnSent(const TransferPtr& t, const absl::Status& status, bool segment) {
  {
    std::lock_guard lock(mutex_);
    if (segment) {
      const absl::Time now = clock_->Now();
      t->progress = now;
      if (--t->in_flight == 0 && t->ended) std::erase(draining_, t);
      if (t->ended) t->deadline = now + options_.drain_grace;  // the peer still reads
    }
  }
  if (!status.ok()) return Fail(t, mesh::PEER_LOST, MessageOf(status));
  if (segment) Pump(t);
}

bool HandoffSender::Impl::End(const TransferPtr& t, std::deque<Job>& unpinned) {
  if (t->ended) return false;
  t->ended = true;
  t->deadline = clock_->Now() + options_.drain_grace;
  unpinned.swap(t->jobs);
  const auto it = by_request_.find(t->request_id);
  if (it != by_request_.end() && it->second == t) by_request_.erase(it);
  if (t->in_flight > 0) draining_.push_back(t);
  return true;
}

void HandoffSender::Impl::Fail(const TransferPtr& t, mesh::RefusalReason reason,
                               const std::string& detail) {
  Finish(t, reason,
         absl::Status(ReasonCode(reason), absl::StrFormat("hand-off of %s: %s: %s", t->request_id,
                                                          ReasonName(reason), detail)));
}

void HandoffSender::Impl::Finish(const TransferPtr& t, mesh::RefusalReason reason,
                                 const absl::Status& status) {
  std::deque<Job> unpinned;
  HandoffSent sent;
  {
    std::lock_guard lock(mutex_);
    if (!End(t, unpinned)) return;
    if (reason == mesh::NONE) {
      ++stats_.completed;
      stats_.bytes += t->bytes;
    } else {
      ++stats_.failed[reason];
    }
    sent.bytes = t->bytes;
  }
  sent.request_id = t->request_id;
  sent.serial = t->serial;
  sent.status = status;
  sent.reason = reason;
  sent.seconds = absl::ToDoubleSeconds(clock_->Now() - t->started);
  if (!status.ok()) {
    LogWarning("handoff.send_failed", {{"request", t->request_id},
                                       {"reason", ReasonName(reason)},
                                       {"detail", MessageOf(status)}});
  }
  on_result_(std::move(sent));
}

void HandoffSender::Impl::Cancel(const RequestId& request_id) {
  std::deque<Job> unpinned;
  std::lock_guard lock(mutex_);
  const auto it = by_request_.find(request_id);
  if (it == by_request_.end()) return;
  const TransferPtr t = it->second;
  End(t, unpinned);
  ++stats_.cancelled;
}

void HandoffSender::Impl::Tick(absl::Time now) {
  std::vector<TransferPtr> late;
  std::vector<PeerId> disconnects;
  {
    std::lock_guard lock(mutex_);
    ticked_ = now;
    for (const auto& [id, t] : by_request_) {
      if (now >= t->deadline || (t->waits() && now >= t->progress + options_.idle_max)) {
        late.push_back(t);
      }
    }
    for (const TransferPtr& t : draining_) {
      if (now < t->deadline || t->disconnect_asked) continue;
      t->disconnect_asked = true;
      disconnects.push_back(t->peer);
      absl::erase_if(peers_, [&](const auto& entry) { return entry.second == t->peer; });
    }
  }
  for (const TransferPtr& t : late) {
    Fail(t, mesh::TIMEOUT, WhyLate(*t, now));
  }
  for (const PeerId peer : disconnects) transport_->Disconnect(peer);
  KeepAlive(now);
}

std::string HandoffSender::Impl::WhyLate(const Transfer& t, absl::Time now) const {
  std::lock_guard lock(mutex_);
  if (now >= t.deadline) return "the request's deadline passed";
  return absl::StrFormat("%s within %s",
                         !t.accepted   ? "no answer to the manifest"
                         : t.seal_sent ? "no answer to the seal"
                                       : "segments did not move",
                         absl::FormatDuration(options_.idle_max));
}

void HandoffSender::Impl::KeepAlive(absl::Time now) {
  std::vector<TransferPtr> due;
  {
    std::lock_guard lock(mutex_);
    if (now - ticked_ >= options_.stall_max) return;
    for (const auto& [id, t] : by_request_) {
      // After the seal the receiver only waits for what is under way.
      if (!t->accepted || t->seal_sent || now < t->said + t->alive_interval) continue;
      t->said = now;
      due.push_back(t);
    }
  }
  for (const TransferPtr& t : due) {
    mesh::Alive alive;
    *alive.mutable_key() = t->key;
    transport_->Send(t->peer, MessageType::kHandoffAlive, alive.SerializeAsString(), {},
                     [self = shared_from_this(), t](const absl::Status& status) {
                       self->OnSent(t, status, false);
                     });
  }
}

HandoffSenderStats HandoffSender::Impl::stats() const {
  std::lock_guard lock(mutex_);
  HandoffSenderStats stats = stats_;
  stats.open = static_cast<int64_t>(by_request_.size());
  stats.draining = static_cast<int64_t>(draining_.size());
  return stats;
}

// The caller holds the mutex.
void HandoffSender::Impl::Accept(Transfer& t, const mesh::Verdict& verdict) {
  t.accepted = true;
  t.progress = clock_->Now();
  const absl::Duration tolerated =
      verdict.idle_ms() > 0 ? absl::Milliseconds(verdict.idle_ms()) : options_.idle_max;
  t.alive_interval = tolerated / kHandoffAlivePerIdle;
}

void HandoffSender::Impl::OnVerdict(const Arrival& arrival) {
  mesh::Verdict verdict;
  const bool parsed =
      verdict.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  std::vector<TransferPtr> hit;
  bool done = false;
  {
    std::lock_guard lock(mutex_);
    // A verdict without a key answers a message that did not parse: any transfer not yet known
    // there.
    const bool keyless =
        parsed && !verdict.key().transfer_id() && verdict.reason() == mesh::MALFORMED;
    for (const auto& [id, t] : by_request_) {
      if (!parsed || t->peer != arrival.peer) continue;
      const bool ours = t->key.transfer_id() == verdict.key().transfer_id() &&
                        t->key.token_low() == verdict.key().token_low() &&
                        t->key.token_high() == verdict.key().token_high();
      if (ours || (keyless && !t->accepted)) hit.push_back(t);
    }
    if (hit.empty()) ++stats_.stray;
    if (verdict.reason() == mesh::NONE && hit.size() == 1) {
      if (verdict.stage() == mesh::Verdict::MANIFEST) Accept(*hit[0], verdict);
      done = verdict.stage() == mesh::Verdict::SEAL && hit[0]->seal_sent;
    }
  }
  for (const TransferPtr& t : hit) {
    if (done) {
      Finish(t, mesh::NONE, absl::OkStatus());
    } else if (verdict.reason() == mesh::NONE) {
      Pump(t);
    } else {
      const bool known = mesh::RefusalReason_IsValid(verdict.reason());
      Fail(t, known ? verdict.reason() : mesh::MALFORMED, verdict.detail());
    }
  }
}

void HandoffSender::Impl::OnPeerLost(PeerId peer, const absl::Status& reason) {
  std::vector<TransferPtr> hit;
  {
    std::lock_guard lock(mutex_);
    absl::erase_if(peers_, [&](const auto& entry) { return entry.second == peer; });
    for (const auto& [id, t] : by_request_) {
      if (t->peer == peer) hit.push_back(t);
    }
  }
  for (const TransferPtr& t : hit) Fail(t, mesh::PEER_LOST, MessageOf(reason));
}

HandoffSender::HandoffSender(Transport* transport, const Clock* clock, HandoffSenderOptions options,
                             ResultCallback on_result) {
  CHECK(options.segment_bytes_max >= 4096 && options.segments_in_flight_max > 0,
        "segments of %d bytes, %d in flight", options.segment_bytes_max,
        options.segments_in_flight_max);
  impl_ = std::make_shared<Impl>(transport, clock, std::move(options), std::move(on_result));
  transport->SetHandler(MessageType::kHandoffVerdict, this);
}

HandoffSender::~HandoffSender() = default;

absl::Status HandoffSender::Begin(HandoffStart start) { return impl_->Begin(std::move(start)); }
void HandoffSender::SendBlock(const RequestId& request_id, int64_t block, SlotRef pin) {
  impl_->SendBlock(request_id, block, std::move(pin));
}
void HandoffSender::SendLayer(const RequestId& request_id, int64_t kda_layer, SlotRef slab) {
  const StateLayout& layout = impl_->layout();
  impl_->SendLayer(request_id, kda_layer, SlabStateSpan(layout, slab.data(), kda_layer),
                   SlabConvSpan(layout, slab.data(), kda_layer), slab);
}
void HandoffSender::SendSnapshotLayer(const RequestId& request_id, int64_t kda_layer,
                                      SlotRef snapshot) {
  const StateLayout& layout = impl_->layout();
  impl_->SendLayer(request_id, kda_layer, SnapshotStateSpan(layout, snapshot.data(), kda_layer),
                   SnapshotConvSpan(layout, snapshot.data(), kda_layer), snapshot);
}
void HandoffSender::SetRestored(const RequestId& request_id, int64_t tokens) {
  impl_->SetRestored(request_id, tokens);
}
void HandoffSender::Cancel(const RequestId& request_id) { impl_->Cancel(request_id); }
void HandoffSender::Tick(absl::Time now) { impl_->Tick(now); }
void HandoffSender::KeepAlive(absl::Time now) { impl_->KeepAlive(now); }
HandoffSenderStats HandoffSender::stats() const { return impl_->stats(); }

absl::StatusOr<PayloadTarget> HandoffSender::OnMessage(const Arrival& arrival) {
  if (arrival.payload_bytes > 0)
    return InvalidArgument("verdict: %d bytes of payload; none is expected", arrival.payload_bytes);
  impl_->OnVerdict(arrival);
  return PayloadTarget{};
}
void HandoffSender::OnPeerLost(PeerId peer, const absl::Status& reason) {
  impl_->OnPeerLost(peer, reason);
}

}  // namespace deltamesh
