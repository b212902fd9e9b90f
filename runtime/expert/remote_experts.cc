#include "runtime/expert/remote_experts.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "deltamesh/mesh/expert.pb.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/expert/checksum.h"

namespace deltamesh {
namespace {

// Keeps headers, and payloads both ways, below the transport's bounds for any model of this kind.
constexpr int64_t kCallRowsMax = 1024;
// Steps of a driven transport within one wait.
constexpr int64_t kPumpsMax = int64_t{1} << 20;

std::span<const std::byte> Bytes(const float* data, int64_t count) {
  return std::as_bytes(std::span(data, static_cast<size_t>(count)));
}

std::unique_ptr<float[]> Floats(int64_t count) {
  return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
}

}  // namespace

// One view with its connections. Fixed once made, except the peers.
struct RemoteExperts::Table {
  struct Shard {
    ExpertShardInfo info;
    PeerId peer = 0;  // guarded by the mutex; 0: not connected, or lost
    uint64_t told =
        0;  // guarded by the mutex; requests noted before it are known there, or too old
  };
  uint64_t epoch = 0;
  std::vector<Shard> shards;
  std::vector<std::vector<size_t>> hosts;  // [expert] -> shards
};

// What one call will ask of a shard.
struct RemoteExperts::Draft {
  size_t shard = 0;
  std::vector<int64_t> rows;  // tokens of the batch
  std::vector<uint32_t> per_row;
  std::vector<uint32_t> experts;
  std::vector<int64_t> out_rows;  // rows of batch.out, in the order of the answer
};

// Owned by its ticket and by the transport's callbacks, whichever lasts longer. The mutex guards
// what is not fixed before it is sent.
struct RemoteExperts::Call {
  enum class State { kWaiting, kLanding, kDone };

  uint64_t id = 0;
  PeerId peer = 0;
  std::string shard;
  uint64_t epoch = 0;
  Draft draft;
  std::vector<RequestId> requests;   // to be named
  std::unique_ptr<float[]> rows;     // [draft.rows, width]
  std::unique_ptr<float[]> landing;  // [draft.out_rows, width]
  uint32_t crc = 0;                  // of the landing, as the answer says
  State state = State::kWaiting;
  absl::Status status;
};

RemoteExperts::RemoteExperts(Transport* transport, RemoteExpertsOptions options)
    : transport_(transport), options_(std::move(options)), table_(std::make_shared<Table>()) {
  table_->hosts.resize(static_cast<size_t>(options_.experts));
  transport_->SetHandler(MessageType::kExpertCombine, this);
}

RemoteExperts::~RemoteExperts() = default;

RemoteExpertsStats RemoteExperts::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

bool RemoteExperts::complete() const {
  std::lock_guard lock(mutex_);
  return std::none_of(table_->hosts.begin(), table_->hosts.end(),
                      [](const auto& hosts) { return hosts.empty(); });
}

// ---- the view -----------------------------------------------------------------------------------

void RemoteExperts::SetView(ExpertView view) {
  std::lock_guard one_at_a_time(view_mutex_);
  auto next = std::make_shared<Table>();
  next->epoch = view.epoch;
  next->hosts.resize(static_cast<size_t>(options_.experts));
  std::shared_ptr<Table> last;
  std::vector<size_t> unconnected;
  {
    std::lock_guard lock(mutex_);
    if (view.epoch < table_->epoch) return;
    last = table_;
    for (ExpertShardInfo& info : view.shards) {
      Table::Shard shard{.info = std::move(info), .told = noted_end_};
      for (const Table::Shard& known : last->shards) {
        if (known.info.name == shard.info.name && known.info.epoch == shard.info.epoch &&
            known.info.address == shard.info.address) {
          shard.peer = known.peer;
        }
      }
      if (shard.peer == 0) unconnected.push_back(next->shards.size());
      next->shards.push_back(std::move(shard));
    }
    next_table_ = next;
  }
  for (size_t s = 0; s < next->shards.size(); ++s) {
    for (const int32_t e : next->shards[s].info.experts) {
      if (e >= 0 && e < options_.experts) next->hosts[static_cast<size_t>(e)].push_back(s);
    }
  }
  for (const size_t s : unconnected) {
    if (const absl::Status status = Reconnect(*next, s); !status.ok()) {
      LogWarning("expert.connect_failed",
                 {{"shard", next->shards[s].info.name}, {"error", status.ToString()}});
    }
  }
  {
    std::lock_guard lock(mutex_);
    for (const Table::Shard& known : last->shards) {
      const auto kept = std::find_if(next->shards.begin(), next->shards.end(),
                                     [&](const auto& s) { return s.peer == known.peer; });
      if (known.peer != 0 && kept != next->shards.end()) kept->told = known.told;
      if (known.peer != 0 && kept == next->shards.end()) retired_.push_back(known.peer);
    }
    table_ = std::move(next);
    next_table_ = nullptr;
    ++entered_;
  }
  Leave();
}

absl::Status RemoteExperts::Reconnect(Table& table, size_t shard) {
  const ExpertShardInfo& info = table.shards[shard].info;
  {
    std::lock_guard lock(mutex_);
    ++connecting_;
  }
  const absl::StatusOr<PeerId> peer = transport_->Connect(info.address);
  std::lock_guard lock(mutex_);
  // The loss may have been told before we knew whom it is about.
  const bool lost = peer.ok() && std::find(lost_.begin(), lost_.end(), *peer) != lost_.end();
  if (--connecting_ == 0) lost_.clear();
  if (!peer.ok()) return peer.status();
  if (lost) return Unavailable("expert shard %s was lost while connecting", info.name);
  table.shards[shard].peer = *peer;
  // A newer view has taken over meanwhile and knows nothing of this connection.
  if (&table != table_.get() && &table != next_table_.get()) retired_.push_back(*peer);
  return absl::OkStatus();
}

bool RemoteExperts::MarkLost(PeerId peer) {
  if (connecting_ > 0) lost_.push_back(peer);
  bool used = false;
  for (Table* table : {table_.get(), next_table_.get()}) {
    if (table == nullptr) continue;
    for (Table::Shard& s : table->shards) {
      if (s.peer != peer) continue;
      s.peer = 0;
      used = true;
    }
  }
  return used;
}

std::shared_ptr<RemoteExperts::Table> RemoteExperts::Enter() {
  std::lock_guard lock(mutex_);
  ++entered_;
  return table_;
}

void RemoteExperts::Leave() {
  std::vector<PeerId> retired;
  {
    std::lock_guard lock(mutex_);
    if (--entered_ == 0) retired.swap(retired_);
  }
  for (const PeerId peer : retired) transport_->Disconnect(peer);
}

// ---- asking -------------------------------------------------------------------------------------

absl::StatusOr<uint64_t> RemoteExperts::Start(const ExpertBatch& batch) {
  CHECK(batch.width == options_.width, "batch width %d, experts have %d", batch.width,
        options_.width);
  const std::shared_ptr<Table> table = Enter();
  absl::StatusOr<std::vector<Draft>> drafts = Route(*table, batch);
  if (!drafts.ok()) {
    Leave();
    return drafts.status();
  }
  Ticket ticket{.batch = batch, .calls = {}};
  for (Draft& draft : *drafts) ticket.calls.push_back(Open(*table, batch, std::move(draft)));
  const std::vector<std::shared_ptr<Call>> calls = ticket.calls;
  uint64_t id;
  {
    std::lock_guard lock(mutex_);
    id = next_ticket_++;
    tickets_.emplace(id, std::move(ticket));
  }
  for (const auto& call : calls) Send(call, batch);
  return id;
}

void RemoteExperts::Note(const RequestId& request) {
  std::lock_guard lock(mutex_);
  noted_.push_back(request);
  ++noted_end_;
  if (noted_.size() > kNotedRequestsMax) noted_.pop_front();
}

// What was noted since `told`, which moves to the end.
std::vector<RequestId> RemoteExperts::TakeUntold(uint64_t& told) const {
  const uint64_t count = std::min<uint64_t>(noted_end_ - told, noted_.size());
  told = noted_end_;
  return {noted_.end() - static_cast<std::ptrdiff_t>(count), noted_.end()};
}

absl::StatusOr<std::vector<RemoteExperts::Draft>> RemoteExperts::Route(Table& table,
                                                                       const ExpertBatch& batch) {
  constexpr size_t kNone = ~size_t{0};
  std::vector<size_t> chosen(static_cast<size_t>(options_.experts), kNone);
  std::vector<int64_t> load(table.shards.size());
  std::vector<Draft> open(table.shards.size());
  std::vector<Draft> drafts;
  for (int64_t i = 0; i < batch.tokens * batch.top_k; ++i) {
    const int32_t expert = batch.ids[i];
    CHECK(expert >= 0 && expert < options_.experts, "expert %d of %d", expert, options_.experts);
    size_t& shard = chosen[static_cast<size_t>(expert)];
    if (shard == kNone) {
      ASSIGN_OR_RETURN(shard, ChooseShard(table, expert, batch.layer, load));
    }
    ++load[shard];

    Draft& draft = open[shard];
    const int64_t row = i / batch.top_k;
    if (draft.rows.empty() || draft.rows.back() != row) {
      if (static_cast<int64_t>(draft.rows.size()) == kCallRowsMax) {
        drafts.push_back(std::exchange(draft, Draft()));
      }
      draft.shard = shard;
      draft.rows.push_back(row);
      draft.per_row.push_back(0);
    }
    ++draft.per_row.back();
    draft.experts.push_back(static_cast<uint32_t>(expert));
    draft.out_rows.push_back(i);
  }
  for (Draft& draft : open) {
    if (!draft.rows.empty()) drafts.push_back(std::move(draft));
  }
  return drafts;
}

absl::StatusOr<size_t> RemoteExperts::ChooseShard(Table& table, int32_t expert, int64_t layer,
                                                  const std::vector<int64_t>& load) {
  const std::vector<size_t>& hosts = table.hosts[static_cast<size_t>(expert)];
  const size_t* best = nullptr;
  {
    std::lock_guard lock(mutex_);
    for (const size_t& s : hosts) {
      if (table.shards[s].peer != 0 && (best == nullptr || load[s] < load[*best])) best = &s;
    }
  }
  if (best != nullptr) return *best;
  // All of them were lost; one that is back takes up again here, one that is not fails its call at
  // once.
  for (const size_t s : hosts) {
    if (Reconnect(table, s).ok()) return s;
  }
  return Unavailable(
      "expert %d of layer %d is on no live shard (view %d has %d shards); retry later", expert,
      layer, table.epoch, table.shards.size());
}

std::shared_ptr<RemoteExperts::Call> RemoteExperts::Open(Table& table, const ExpertBatch& batch,
                                                         Draft draft) {
  auto call = std::make_shared<Call>();
  Table::Shard& shard = table.shards[draft.shard];
  call->shard = shard.info.name;
  call->epoch = shard.info.epoch;
  const int64_t rows = static_cast<int64_t>(draft.rows.size());
  call->rows = Floats(rows * batch.width);
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(&call->rows[static_cast<size_t>(i * batch.width)],
                batch.x + draft.rows[static_cast<size_t>(i)] * batch.width,
                static_cast<size_t>(batch.width) * sizeof(float));
  }
  call->landing = Floats(static_cast<int64_t>(draft.out_rows.size()) * batch.width);
  call->draft = std::move(draft);

  std::lock_guard lock(mutex_);
  call->peer = shard.peer;
  call->requests = TakeUntold(shard.told);
  call->id = next_call_++;
  calls_.emplace(call->id, call);
  ++stats_.calls;
  stats_.rows += static_cast<uint64_t>(rows);
  return call;
}

void RemoteExperts::Send(const std::shared_ptr<Call>& call, const ExpertBatch& batch) {
  const int64_t rows = static_cast<int64_t>(call->draft.rows.size());
  const auto payload = Bytes(call->rows.get(), rows * batch.width);
  mesh::ExpertDispatch d;
  d.set_call_id(call->id);
  d.set_caller(options_.caller);
  d.set_shard_epoch(call->epoch);
  d.set_model_digest(options_.model_digest);
  d.set_layer(static_cast<uint32_t>(batch.layer));
  d.set_rows(static_cast<uint32_t>(rows));
  d.set_width(static_cast<uint32_t>(batch.width));
  d.mutable_experts_per_row()->Add(call->draft.per_row.begin(), call->draft.per_row.end());
  d.mutable_experts()->Add(call->draft.experts.begin(), call->draft.experts.end());
  d.mutable_requests()->Add(call->requests.begin(), call->requests.end());
  d.set_crc32c(DispatchChecksum(d, payload));
  transport_->SendHere(
      call->peer, MessageType::kExpertDispatch, d.SerializeAsString(), payload,
      [this, call](absl::Status sent) {
        if (sent.ok()) return;
        std::lock_guard lock(mutex_);
        // The connection itself may stand; nobody will use it again.
        if (MarkLost(call->peer)) retired_.push_back(call->peer);
        Settle(*call, Unavailable("expert shard %s: %s; retry later", call->shard, MessageOf(sent)),
               &RemoteExpertsStats::lost);
      });
}

// ---- answers ------------------------------------------------------------------------------------

void RemoteExperts::Settle(Call& call, absl::Status status, uint64_t RemoteExpertsStats::*counter) {
  if (call.state == Call::State::kDone) return;
  call.state = Call::State::kDone;
  call.status = std::move(status);
  ++(stats_.*counter);
  // Waking the model's thread for each answer would cost a thread switch per shard and layer.
  if (awaited_ != nullptr && Settled(*awaited_)) settled_.notify_all();
}

// All its answers are here, or an error.
bool RemoteExperts::Settled(const Ticket& ticket) const {
  bool open = true;
  return !Check(ticket, open).ok() || !open;
}

absl::StatusOr<PayloadTarget> RemoteExperts::OnMessage(const Arrival& arrival) {
  mesh::ExpertCombine c;
  const bool parsed =
      c.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()));
  std::lock_guard lock(mutex_);
  const auto found = parsed ? calls_.find(c.call_id()) : calls_.end();
  if (found == calls_.end() || found->second->peer != arrival.peer ||
      found->second->state != Call::State::kWaiting) {
    ++stats_.ignored;
    return NotFound("expert answer: no call of this peer is waiting for it");
  }
  const std::shared_ptr<Call>& call = found->second;
  const auto refuse = [&](absl::Status status) {
    Settle(*call, status, &RemoteExpertsStats::refused);
    return status;
  };
  if (c.code() != 0) {
    return refuse(Unavailable("expert shard %s refused: %s", call->shard, c.message()));
  }
  const int64_t rows = static_cast<int64_t>(call->draft.out_rows.size());
  const int64_t bytes = rows * options_.width * static_cast<int64_t>(sizeof(float));
  if (c.rows() != rows || c.width() != options_.width || arrival.payload_bytes != bytes) {
    return refuse(
        Unavailable("expert shard %s answered %d rows of %d values in %d bytes, not %d of %d",
                    call->shard, c.rows(), c.width(), arrival.payload_bytes, rows, options_.width));
  }
  if (c.shard_epoch() != call->epoch) {
    return refuse(Unavailable("expert shard %s answered at epoch %d, asked was %d", call->shard,
                              c.shard_epoch(), call->epoch));
  }
  call->crc = c.crc32c();
  call->state = Call::State::kLanding;
  return PayloadTarget{.buffer = std::as_writable_bytes(std::span(
                           call->landing.get(), static_cast<size_t>(rows * options_.width))),
                       .done = [this, call](absl::Status landed) {
                         std::lock_guard inner(mutex_);
                         if (landed.ok()) {
                           Settle(*call, absl::OkStatus(), &RemoteExpertsStats::answers);
                         } else {
                           Settle(*call,
                                  Unavailable("expert shard %s: the answer did not arrive: %s",
                                              call->shard, MessageOf(landed)),
                                  &RemoteExpertsStats::lost);
                         }
                       }};
}

void RemoteExperts::OnPeerLost(PeerId peer, const absl::Status& reason) {
  std::lock_guard lock(mutex_);
  MarkLost(peer);
  for (const auto& [id, call] : calls_) {
    // A payload that is landing is not ours to give up: its completion will tell.
    if (call->peer != peer || call->state != Call::State::kWaiting) continue;
    Settle(*call,
           Unavailable("expert shard %s was lost: %s; retry later", call->shard, MessageOf(reason)),
           &RemoteExpertsStats::lost);
  }
}

// ---- waiting ------------------------------------------------------------------------------------

absl::Status RemoteExperts::Finish(uint64_t id) {
  Ticket ticket;
  {
    std::lock_guard lock(mutex_);
    const auto found = tickets_.find(id);
    CHECK(found != tickets_.end(), "ticket %d is not open", id);
    ticket = std::move(found->second);
    tickets_.erase(found);
  }
  absl::Status status = Wait(ticket);
  {
    std::lock_guard lock(mutex_);
    for (const auto& call : ticket.calls) calls_.erase(call->id);
  }
  for (const auto& call : ticket.calls) {
    if (status.ok()) status = Collect(*call, ticket.batch);
  }
  Leave();
  return status;
}

// The first error of the ticket's calls; `open` says whether some are neither done nor wrong. The
// mutex is held.
absl::Status RemoteExperts::Check(const Ticket& ticket, bool& open) const {
  open = false;
  for (const auto& call : ticket.calls) {
    if (!call->status.ok()) return call->status;
    open |= call->state != Call::State::kDone;
  }
  return absl::OkStatus();
}

absl::Status RemoteExperts::Wait(const Ticket& ticket) {
  const auto deadline =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.deadline);
  bool open = true;
  bool moved = true;
  std::unique_lock lock(mutex_);
  awaited_ = &ticket;
  const auto settled = [&] {
    std::lock_guard inner(mutex_);
    return Settled(ticket);
  };
  const absl::Cleanup forget = [this] { awaited_ = nullptr; };
  for (int64_t pumps = 0;; ++pumps) {
    RETURN_IF_ERROR(Check(ticket, open));
    if (!open) return absl::OkStatus();
    if (std::chrono::steady_clock::now() >= deadline || !moved || pumps == kPumpsMax) break;
    lock.unlock();
    const bool driven = options_.pump != nullptr || transport_->Drive(settled, deadline);
    if (options_.pump != nullptr) moved = options_.pump();
    lock.lock();
    if (!driven) settled_.wait_until(lock, deadline, [&] { return Settled(ticket); });
  }
  const Call* silent = nullptr;
  for (const auto& call : ticket.calls) {
    if (call->state == Call::State::kDone) continue;
    ++stats_.expired;
    silent = call.get();
  }
  return Unavailable("expert shard %s: no answer within %s; retry later, or look at its load",
                     silent->shard, absl::FormatDuration(options_.deadline));
}

absl::Status RemoteExperts::Collect(const Call& call, const ExpertBatch& batch) {
  const int64_t rows = static_cast<int64_t>(call.draft.out_rows.size());
  if (CombineChecksum(call.id, static_cast<uint32_t>(rows), static_cast<uint32_t>(batch.width),
                      Bytes(call.landing.get(), rows * batch.width)) != call.crc) {
    std::lock_guard lock(mutex_);
    ++stats_.corrupt;
    return Unavailable("expert shard %s: the answer's checksum does not match; retry", call.shard);
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(batch.out + call.draft.out_rows[static_cast<size_t>(i)] * batch.width,
                &call.landing[static_cast<size_t>(i * batch.width)],
                static_cast<size_t>(batch.width) * sizeof(float));
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
