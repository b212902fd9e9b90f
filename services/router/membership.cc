#include "services/router/membership.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/protocol.h"

namespace deltamesh {
namespace {

const char* RoleName(mesh::Role role) {
  switch (role) {
    case mesh::ROLE_PREFILL:
      return "prefill";
    case mesh::ROLE_DECODE:
      return "decode";
    case mesh::ROLE_EXPERT:
      return "expert";
    default:
      return "unspecified";
  }
}

// Above any machine, and low enough that sums and products of what workers report do not overflow.
constexpr uint64_t kCapacityMax = uint64_t{1} << 40;
constexpr uint32_t kBlockTokensMax = 1 << 20;
constexpr uint32_t kExpertsMax = 1 << 16;

absl::Status CheckPlacement(const mesh::Register& m) {
  const mesh::ExpertPlacement& p = m.experts();
  if (p.shards() == 0 || p.shard() >= p.shards() || p.experts().empty()) {
    return InvalidArgument(
        "experts: worker \"%s\" is shard %d of %d with %d experts; shards count from 0 and hold "
        "some",
        m.name(), p.shard(), p.shards(), p.experts_size());
  }
  if (p.shards() > kExpertsMax) {
    return InvalidArgument("experts.shards: worker \"%s\" says %d; use at most %d", m.name(),
                           p.shards(), kExpertsMax);
  }
  for (const uint32_t id : p.experts()) {
    if (id >= kExpertsMax) {
      return InvalidArgument("experts: worker \"%s\" hosts expert %d; ids end at %d", m.name(), id,
                             kExpertsMax - 1);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCapacity(const mesh::Register& m) {
  const mesh::Capacity& c = m.capacity();
  if (c.slabs() == 0 || c.latent_blocks() == 0 || c.context_tokens() == 0) {
    return InvalidArgument(
        "capacity: worker \"%s\" has %d slabs, %d latent blocks, %d context tokens; all must be "
        "positive",
        m.name(), c.slabs(), c.latent_blocks(), c.context_tokens());
  }
  if (std::max({c.slabs(), c.latent_blocks(), c.context_tokens()}) > kCapacityMax) {
    return InvalidArgument(
        "capacity: worker \"%s\" has %d slabs, %d latent blocks, %d context tokens; each may be "
        "at most %d",
        m.name(), c.slabs(), c.latent_blocks(), c.context_tokens(), kCapacityMax);
  }
  return absl::OkStatus();
}

// What is no rate is not known, nor what would make sums of seconds that are no numbers.
double RateOf(double reported) { return reported >= 1e-9 && reported <= 1e18 ? reported : 0; }

int64_t Bounded(uint64_t reported) {
  return static_cast<int64_t>(std::min(reported, kCapacityMax));
}

// "field: registrant has X, router has Y" unless they agree; an empty wish takes anything.
template <typename T>
void Differ(const char* field, const T& theirs, const T& ours, std::string* out) {
  if (ours == T{} || theirs == ours) return;
  if (!out->empty()) out->append("; ");
  if constexpr (std::is_same_v<T, std::string>) {
    out->append(absl::StrFormat("%s: worker has \"%s\", router has \"%s\"", field, theirs, ours));
  } else {
    out->append(absl::StrFormat("%s: worker has %d, router has %d", field, theirs, ours));
  }
}

}  // namespace

Membership::Membership(const RouterOptions* options, RouterCounters* counters,
                       std::vector<RouterAction>* actions)
    : options_(options),
      counters_(counters),
      actions_(actions),
      identity_(options->identity),
      view_epoch_(options->epoch) {
  identity_.set_protocol(kMeshProtocol);
}

bool Membership::UsesExperts(mesh::Role role) {
  return role == mesh::ROLE_PREFILL || role == mesh::ROLE_DECODE;
}

void Membership::OnLinkOpened(LinkId link, absl::Time now) {
  if (static_cast<int64_t>(links_.size()) >= options_->links_max) {
    actions_->push_back(
        CloseLink{link, ResourceExhausted("router %s holds %d links, its bound; raise links_max",
                                          options_->name, options_->links_max)});
    return;
  }
  links_[link] = Link{.last_heard = now, .registered = false};
}

bool Membership::Touch(LinkId link, absl::Time now) {
  const auto it = links_.find(link);
  if (it == links_.end()) return false;
  it->second.last_heard = std::max(it->second.last_heard, now);
  return true;
}

absl::Status Membership::CheckIdentity(const mesh::Register& m) const {
  std::string difference;
  Differ("protocol", m.model().protocol(), identity_.protocol(), &difference);
  Differ("text_digest", m.model().text_digest(), identity_.text_digest(), &difference);
  Differ("model digest", m.model().digest(), identity_.digest(), &difference);
  Differ("state_layout", m.model().state_layout(), identity_.state_layout(), &difference);
  Differ("block_tokens", m.model().block_tokens(), identity_.block_tokens(), &difference);
  Differ("tile_tokens", m.model().tile_tokens(), identity_.tile_tokens(), &difference);
  Differ("transport_kind", m.transport_kind(), transport_kind_, &difference);
  if (difference.empty()) return absl::OkStatus();
  return FailedPrecondition(
      "%s worker \"%s\" does not fit router \"%s\": %s; "
      "run the same model, --weights, --activations and release everywhere",
      RoleName(m.role()), m.name(), options_->name, difference);
}

absl::Status Membership::Admit(const mesh::Register& m) const {
  if (m.name().empty() || m.name().size() > 256) {
    return InvalidArgument("name: %d bytes; use 1 to 256", m.name().size());
  }
  if (m.role() != mesh::ROLE_PREFILL && m.role() != mesh::ROLE_DECODE &&
      m.role() != mesh::ROLE_EXPERT) {
    return InvalidArgument("role: %d of worker \"%s\" is not known; use prefill, decode or expert",
                           m.role(), m.name());
  }
  if (m.model().digest().empty() || m.model().block_tokens() == 0) {
    return InvalidArgument("model: worker \"%s\" names no digest or block size", m.name());
  }
  if (m.model().block_tokens() > kBlockTokensMax) {
    return InvalidArgument("model.block_tokens: %d of worker \"%s\"; use at most %d",
                           m.model().block_tokens(), m.name(), kBlockTokensMax);
  }
  if (m.role() == mesh::ROLE_EXPERT) {
    RETURN_IF_ERROR(CheckPlacement(m));
  } else {
    RETURN_IF_ERROR(CheckCapacity(m));
  }
  const auto earlier = by_name_.find(m.name());
  if (earlier != by_name_.end()) {
    const mesh::Register& old = workers_.at(earlier->second).registration;
    if (m.epoch() < old.epoch()) {
      return FailedPrecondition(
          "epoch: worker \"%s\" registers with epoch %d, epoch %d is registered; an earlier life "
          "cannot "
          "come back",
          m.name(), m.epoch(), old.epoch());
    }
  }
  RETURN_IF_ERROR(CheckIdentity(m));
  return m.role() == mesh::ROLE_EXPERT ? CheckShards(m) : absl::OkStatus();
}

absl::Status Membership::CheckShards(const mesh::Register& m) const {
  for (const auto& [link, worker] : workers_) {
    const mesh::Register& other = worker.registration;
    // An earlier life of the same worker makes way.
    if (other.role() != mesh::ROLE_EXPERT || other.name() == m.name()) continue;
    if (other.experts().shards() == m.experts().shards()) return absl::OkStatus();
    return FailedPrecondition(
        "experts.shards: worker \"%s\" divides the experts by %d, connected worker \"%s\" by %d; "
        "start all shards with the same count",
        m.name(), m.experts().shards(), other.name(), other.experts().shards());
  }
  return absl::OkStatus();
}

void Membership::RecountShards() {
  for (const auto& [link, worker] : workers_) {
    if (worker.registration.role() != mesh::ROLE_EXPERT) continue;
    expert_shards_ = worker.registration.experts().shards();  // all connected ones agree
    return;
  }
}

void Membership::LearnIdentity(const mesh::Register& m) {
  if (!identity_complete_) {
    // What was configured was checked to be equal, so taking all of it only fills the gaps.
    identity_ = m.model();
    identity_complete_ = true;
    LogInfo("router.identity", {{"digest", identity_.digest()}, {"learned_from", m.name()}});
  }
  if (transport_kind_.empty()) transport_kind_ = m.transport_kind();
}

std::optional<LostWorker> Membership::OnRegister(LinkId link, const mesh::Register& m,
                                                 absl::Time now) {
  const auto it = links_.find(link);
  CHECK(it != links_.end(), "link %d is not open", link);
  absl::Status status =
      it->second.registered
          ? FailedPrecondition("worker \"%s\" registers twice on one link", m.name())
          : Admit(m);
  if (!status.ok()) {
    ++counters_->registrations_refused;
    LogWarning("worker.refused", {{"worker", m.name()}, {"reason", MessageOf(status)}});
    return Refuse(link, status);
  }
  LearnIdentity(m);
  std::optional<LostWorker> replaced;
  const auto earlier = by_name_.find(m.name());
  if (earlier != by_name_.end()) {
    replaced = Refuse(earlier->second,
                      Aborted("worker \"%s\" registered again with epoch %d", m.name(), m.epoch()));
  }
  it->second = Link{.last_heard = now, .registered = true};
  by_name_[m.name()] = link;
  alive_known_ = false;
  Worker& worker = workers_[link];
  worker.link = link;
  worker.registration = m;
  worker.load.name = m.name();
  worker.load.context_tokens = static_cast<int64_t>(m.capacity().context_tokens());
  worker.load.slabs_free = static_cast<int64_t>(m.capacity().slabs());
  worker.load.blocks_free = static_cast<int64_t>(m.capacity().latent_blocks());
  ++counters_->registered;
  ++room_version_;
  LogInfo(
      "worker.registered",
      {{"worker", m.name()}, {"role", RoleName(m.role())}, {"epoch", m.epoch()}, {"link", link}});

  mesh::RouterMessage answer;
  mesh::Registered* r = answer.mutable_registered();
  r->set_router(options_->name);
  r->set_router_epoch(options_->epoch);
  r->set_heartbeat_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_->heartbeat)));
  r->set_lease_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_->lease)));
  actions_->push_back(SendToWorker{link, std::move(answer)});
  if (m.role() == mesh::ROLE_EXPERT) {
    RecountShards();
    BroadcastView();
  } else if (expert_shards_ > 0) {
    actions_->push_back(SendToWorker{link, View()});
  }
  return replaced;
}

void Membership::OnHeartbeat(LinkId link, const mesh::Heartbeat& m) {
  Worker* worker = Find(link);
  if (worker == nullptr) return;
  WorkerLoad& load = worker->load;
  const int64_t slabs = load.slabs_free, blocks = load.blocks_free;
  const bool draining = load.draining;
  const mesh::Capacity& capacity = worker->registration.capacity();
  // What this router placed there counts as taken even when the heartbeat left before it arrived.
  load.slabs_free = std::min(Bounded(m.slabs_free()),
                             static_cast<int64_t>(capacity.slabs()) - worker->held_slabs);
  load.blocks_free = std::min(Bounded(m.latent_blocks_free()),
                              static_cast<int64_t>(capacity.latent_blocks()) - worker->held_blocks);
  load.resident = std::max(Bounded(m.running()) + Bounded(m.waiting()), worker->held_slabs);
  load.waiting_tokens = Bounded(m.waiting_tokens());
  load.tokens_per_second = RateOf(m.tokens_per_second());
  load.prompt_tokens_per_second = RateOf(m.prompt_tokens_per_second());
  load.store_bytes_per_second = RateOf(m.store_bytes_per_second());
  load.object_bytes_per_second = RateOf(m.object_bytes_per_second());
  load.draining = m.draining();
  room_version_ +=
      load.slabs_free > slabs || load.blocks_free > blocks || load.draining != draining;
}

std::optional<LostWorker> Membership::Forget(LinkId link) {
  links_.erase(link);
  const auto it = workers_.find(link);
  if (it == workers_.end()) return std::nullopt;
  ++room_version_;
  const LostWorker lost = {link, it->second.registration.name(), it->second.registration.role()};
  workers_.erase(it);
  alive_known_ = false;
  const auto named = by_name_.find(lost.name);
  if (named != by_name_.end() && named->second == link) by_name_.erase(named);
  if (lost.role == mesh::ROLE_EXPERT) {
    RecountShards();
    BroadcastView();
  }
  return lost;
}

std::optional<LostWorker> Membership::OnLinkClosed(LinkId link) { return Forget(link); }

std::optional<LostWorker> Membership::Refuse(LinkId link, const absl::Status& status) {
  actions_->push_back(CloseLink{link, status});
  return Forget(link);
}

std::vector<LostWorker> Membership::Expire(absl::Time now) {
  std::vector<std::pair<LinkId, absl::Status>> late;
  for (const auto& [link, state] : links_) {
    const absl::Duration silent = now - state.last_heard;
    const absl::Duration limit = state.registered ? options_->lease : options_->register_max;
    if (silent <= limit) continue;
    late.emplace_back(
        link, state.registered
                  ? Unavailable("worker \"%s\" was silent for %s, its lease is %s",
                                workers_.at(link).registration.name(), absl::FormatDuration(silent),
                                absl::FormatDuration(limit))
                  : DeadlineExceeded("no registration within %s of opening the link",
                                     absl::FormatDuration(limit)));
  }
  std::vector<LostWorker> lost;
  for (const auto& [link, status] : late) {
    LogWarning("link.expired", {{"link", link}, {"reason", MessageOf(status)}});
    if (std::optional<LostWorker> worker = Refuse(link, status)) lost.push_back(*worker);
  }
  counters_->leases_expired += lost.size();
  return lost;
}

Worker* Membership::Find(LinkId link) {
  const auto it = workers_.find(link);
  return it == workers_.end() ? nullptr : &it->second;
}

const Worker* Membership::Find(LinkId link) const {
  const auto it = workers_.find(link);
  return it == workers_.end() ? nullptr : &it->second;
}

Worker* Membership::FindByName(const std::string& name) {
  const auto found = by_name_.find(name);
  Worker* const worker = found == by_name_.end() ? nullptr : Find(found->second);
  const bool expert = worker != nullptr && worker->registration.role() == mesh::ROLE_EXPERT;
  return expert ? nullptr : worker;
}

// Asked many times for each request, and changes when workers come and go.
const std::vector<Worker*>& Membership::Alive(mesh::Role role) {
  if (!alive_known_) {
    alive_.clear();
    for (const auto& [name, link] : by_name_) {
      Worker& worker = workers_.at(link);
      alive_[worker.registration.role()].push_back(&worker);
    }
    alive_known_ = true;
  }
  return alive_[role];
}

int64_t Membership::Count(mesh::Role role) const {
  return std::count_if(workers_.begin(), workers_.end(),
                       [role](const auto& w) { return w.second.registration.role() == role; });
}

int64_t Membership::Shared(const Worker& worker, std::span<const uint64_t> restored) {
  return std::count_if(restored.begin(), restored.end(),
                       [&](uint64_t key) { return worker.named_blocks.contains(key); });
}

size_t Membership::Named(const Worker& worker, std::span<const uint64_t> keys, size_t restored) {
  size_t named = std::min(restored, keys.size());
  while (named < keys.size() && !worker.named_blocks.contains(keys[named])) ++named;
  return named;
}

void Membership::Charge(LinkId link, const Room& room) {
  Worker* worker = Find(link);
  if (worker == nullptr) return;
  int64_t blocks = room.blocks;
  for (const uint64_t key : room.named) blocks -= ++worker->named_blocks[key] > 1;
  worker->held_slabs += room.slabs;
  worker->held_blocks += blocks;
  worker->load.slabs_free -= room.slabs;
  worker->load.blocks_free -= blocks;
  worker->load.resident += room.slabs;
  worker->load.waiting_tokens += room.tokens;
}

void Membership::Return(LinkId link, const Room& room) {
  Worker* worker = Find(link);
  if (worker == nullptr) return;
  ++room_version_;
  // What others still share stays taken.
  int64_t blocks = room.blocks;
  for (const uint64_t key : room.named) {
    const auto held = worker->named_blocks.find(key);
    CHECK(held != worker->named_blocks.end(), "a block returned that was not charged");
    if (--held->second > 0) {
      --blocks;
    } else {
      worker->named_blocks.erase(held);
    }
  }
  worker->held_slabs -= room.slabs;
  worker->held_blocks -= blocks;
  CHECK(worker->held_slabs >= 0 && worker->held_blocks >= 0, "more returned than charged");
  WorkerLoad& load = worker->load;
  const mesh::Capacity& capacity = worker->registration.capacity();
  load.slabs_free = std::min(load.slabs_free + room.slabs,
                             static_cast<int64_t>(capacity.slabs()) - worker->held_slabs);
  load.blocks_free = std::min(load.blocks_free + blocks,
                              static_cast<int64_t>(capacity.latent_blocks()) - worker->held_blocks);
  load.resident = std::max(load.resident - room.slabs, worker->held_slabs);
  load.waiting_tokens = std::max<int64_t>(load.waiting_tokens - room.tokens, 0);
}

void Membership::MarkFull(LinkId link) {
  if (Worker* worker = Find(link)) worker->load.slabs_free = 0;
}

bool Membership::CanCompute(const Worker& worker) const {
  return expert_shards_ > 0 || !worker.registration.needs_shards();
}

absl::Status Membership::ExpertsComplete() const {
  if (expert_shards_ == 0) return LocalExpertsSomewhere();
  std::set<uint32_t> present, hosted;
  for (const auto& [link, worker] : workers_) {
    const mesh::Register& r = worker.registration;
    if (r.role() != mesh::ROLE_EXPERT) continue;
    present.insert(r.experts().shard());
    hosted.insert(r.experts().experts().begin(), r.experts().experts().end());
  }
  for (uint32_t shard = 0; shard < expert_shards_; ++shard) {
    if (!present.contains(shard)) {
      return Unavailable("expert shard %d of %d is not connected; retry when it is back", shard,
                         expert_shards_);
    }
  }
  // How many experts the model has is known to its shards alone: ids start at 0 and leave no gap.
  uint32_t next = 0;
  for (const uint32_t id : hosted) {
    if (id != next) {
      return Unavailable("expert %d is on no connected shard; start a shard that hosts it", next);
    }
    ++next;
  }
  return absl::OkStatus();
}

absl::Status Membership::LocalExpertsSomewhere() const {
  const std::string* without = nullptr;
  for (const auto& [link, worker] : workers_) {
    if (worker.registration.role() != mesh::ROLE_DECODE) continue;
    if (CanCompute(worker) && !worker.load.draining) return absl::OkStatus();
    if (!CanCompute(worker)) without = &worker.load.name;
  }
  if (without == nullptr) return absl::OkStatus();  // no decode worker, or all drain: others say so
  return Unavailable(
      "no expert shard is connected, and decode worker \"%s\" has no routed experts of its own; "
      "start `deltamesh expert` shards with this router as their --router, or decode and prefill "
      "workers with --local-experts",
      *without);
}

std::optional<mesh::ModelIdentity> Membership::identity() const {
  if (identity_.digest().empty()) return std::nullopt;
  return identity_;
}

mesh::RouterMessage Membership::View() const {
  mesh::RouterMessage message;
  mesh::MeshView* view = message.mutable_view();
  view->set_epoch(view_epoch_);
  for (const auto& [name, link] : by_name_) {
    const mesh::Register& r = workers_.at(link).registration;
    if (r.role() != mesh::ROLE_EXPERT) continue;
    mesh::ExpertPeer* peer = view->add_experts();
    peer->set_name(r.name());
    peer->set_epoch(r.epoch());
    peer->set_transport_address(r.transport_address());
    *peer->mutable_placement() = r.experts();
  }
  return message;
}

void Membership::BroadcastView() {
  ++view_epoch_;
  for (const auto& [link, worker] : workers_) {
    if (UsesExperts(worker.registration.role())) actions_->push_back(SendToWorker{link, View()});
  }
}

}  // namespace deltamesh
