#include "tests/mesh/test_mesh.h"

#include <algorithm>
#include <bit>
#include <variant>

#include "absl/strings/str_join.h"
#include "runtime/base/status.h"
#include "services/decode/step_messages.h"
#include "services/expert/expert_core.h"
#include "services/worker/worker_links.h"

namespace deltamesh::testing {
namespace {

std::vector<int32_t> ShardExperts(int64_t experts, int shard, int shards) {
  std::vector<int32_t> out;
  for (int64_t e = shard; e < experts; e += shards) out.push_back(static_cast<int32_t>(e));
  return out;
}

LoadOptions WithoutExperts(LoadOptions load) {
  load.experts.kind = ExpertSelection::Kind::kNone;
  return load;
}

}  // namespace

Model& SharedModel(const std::string& folder, const LoadOptions& options) {
  static auto* models = new std::map<std::string, std::unique_ptr<Model>>();
  const std::string key =
      absl::StrFormat("%s|%d|%s|%d|%s|%s", folder, static_cast<int>(options.experts.kind),
                      absl::StrJoin(options.experts.experts, ","), options.only_experts,
                      WeightWidthName(options.weights), ActivationsName(options.activations));
  auto it = models->find(key);
  if (it == models->end()) {
    absl::StatusOr<std::unique_ptr<Model>> model = Model::Load(folder, options);
    CHECK_OK(model.status());
    it = models->emplace(key, *std::move(model)).first;
  }
  return *it->second;
}

bool SameAnswer(const Answer& a, const Answer& b) {
  auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  if (a.tokens != b.tokens || a.end != b.end || a.scores.size() != b.scores.size()) return false;
  for (size_t i = 0; i < a.scores.size(); ++i) {
    const mesh::TokenScores& x = a.scores[i];
    const mesh::TokenScores& y = b.scores[i];
    if (bits(x.logprob()) != bits(y.logprob())) return false;
    if (!std::equal(x.top_ids().begin(), x.top_ids().end(), y.top_ids().begin(),
                    y.top_ids().end()) ||
        !std::equal(x.top_logprobs().begin(), x.top_logprobs().end(), y.top_logprobs().begin(),
                    y.top_logprobs().end(), [&](float p, float q) { return bits(p) == bits(q); })) {
      return false;
    }
  }
  return true;
}

std::string Describe(const Answer& a) {
  return absl::StrFormat("[%s] end %d, %s, status %s", absl::StrJoin(a.tokens, " "), a.end,
                         a.ended ? "ended" : "running", a.status.ToString());
}

// ---- plain engine --------------------------------------------------------------------------------

PlainEngine::PlainEngine(const std::string& folder, const LoadOptions& load)
    : model_(SharedModel(folder, load)), experts_(&model_.experts(), &pool_) {
  EngineOptions options;
  options.slabs = 1;
  options.latent_blocks = 64;
  options.context_tokens_max = 512;
  auto engine = Engine::Create(&model_, &experts_, &pool_, options);
  CHECK_OK(engine.status());
  engine_ = *std::move(engine);
}

Answer PlainEngine::Run(const ClientRequest& request) {
  SequenceSpec spec;
  spec.prompt = request.prompt;
  spec.sampling = ToParams(request.sampling);
  spec.max_tokens = request.max_tokens;
  spec.stop_tokens = request.stop_token_ids;
  CHECK_OK(engine_->Add(std::move(spec)).status());
  Answer answer;
  while (engine_->HasWork()) {
    for (const SequenceOutput& output : engine_->Step().outputs) {
      answer.status = output.error;
      for (const TokenOutput& token : output.tokens) {
        answer.tokens.push_back(token.token);
        if (request.sampling.logprobs() < 0) continue;
        mesh::TokenScores& scores = answer.scores.emplace_back();
        scores.set_logprob(token.logprob);
        for (const auto& [id, logprob] : token.top) {
          scores.add_top_ids(id);
          scores.add_top_logprobs(logprob);
        }
      }
      if (output.finish == FinishKind::kStopToken) answer.end = mesh::SequenceOutput::STOP_TOKEN;
      if (output.finish == FinishKind::kMaxTokens) answer.end = mesh::SequenceOutput::MAX_TOKENS;
      if (output.finish == FinishKind::kContextLimit) {
        answer.end = mesh::SequenceOutput::CONTEXT_LIMIT;
      }
    }
  }
  answer.ended = true;
  return answer;
}

// ---- workers -------------------------------------------------------------------------------------

struct TestMesh::Worker {
  explicit Worker(int threads) : pool(threads) {}

  std::string name, address;
  mesh::Role role = mesh::ROLE_UNSPECIFIED;
  int index = 0;
  uint64_t epoch = 0;
  bool alive = true;
  bool deaf = false;
  bool stuck_disk = false;
  bool slow = false;
  LinkId link = 0;
  std::deque<mesh::RouterMessage> to_worker;
  std::deque<mesh::WorkerMessage> to_router;

  Model* model = nullptr;
  ThreadPool pool;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<ExpertServer> server;
  std::unique_ptr<RemoteExperts> experts;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<PrefixCache> cache;
  std::unique_ptr<StateTier> tier;
  std::unique_ptr<HandoffReceiver> receiver;
  std::unique_ptr<HandoffSender> sender;
  std::deque<HandoffEvent> received;
  std::deque<HandoffSent> sent;
  std::unique_ptr<FetchPort> fetch;
  std::deque<FetchEvent> asked;
  std::unique_ptr<WorkerCore> core;

  DecodeCore* decode() { return static_cast<DecodeCore*>(core.get()); }
  PrefillCore* prefill() { return static_cast<PrefillCore*>(core.get()); }
  StateWorkerCore* attention() { return static_cast<StateWorkerCore*>(core.get()); }

  void Stop() {
    core.reset();
    if (server != nullptr) server->Stop();
    transport.reset();
    received.clear();
    sent.clear();
    asked.clear();
    receiver.reset();
    sender.reset();
    fetch.reset();
    tier.reset();
    cache.reset();
    engine.reset();
    experts.reset();
    server.reset();
    to_worker.clear();
    to_router.clear();
    alive = false;
  }
  ~Worker() { Stop(); }
};

std::unique_ptr<TestMesh::Worker> TestMesh::Make(const std::string& name, mesh::Role role,
                                                 int index) {
  auto worker = std::make_unique<Worker>(options_.threads);
  worker->name = name;
  worker->role = role;
  worker->index = index;
  worker->epoch = next_epoch_++;
  worker->address = absl::StrFormat("%s#%d", name, worker->epoch);
  auto transport = network_.Open(worker->address);
  CHECK_OK(transport.status());
  worker->transport = std::make_unique<RewritingTransport>(*std::move(transport), &rewrite_);
  if (role == mesh::ROLE_EXPERT) {
    MakeExpert(*worker, index);
  } else {
    MakeAttention(*worker);
  }
  return worker;
}

std::unique_ptr<StateTier> TestMesh::MakeTier(const Worker& w) const {
  const StateIdentity identity = {.model = PrefixModel(w.model->digest(), kStateLayoutVersion),
                                  .layout = w.model->state_layout()};
  std::unique_ptr<DiskStore> disk;
  if (!options_.store_folder.empty()) {
    DiskStoreOptions options;
    options.folder =
        options_.store_each ? options_.store_folder + "/" + w.name : options_.store_folder;
    options.bytes_max = options_.store_bytes;
    options.identity = identity;
    auto opened = DiskStore::Open(options, &clock_);
    CHECK_OK(opened.status());
    disk = *std::move(opened);
  }
  std::unique_ptr<ObjectStates> objects;
  if (options_.bucket != nullptr) {
    ObjectStatesOptions options;
    options.bytes_max = options_.store_bytes;
    options.identity = identity;
    objects = std::make_unique<ObjectStates>(
        options, std::make_unique<MemoryObjects>(options_.bucket), &clock_);
  }
  StateTierOptions tier = options_.tier;
  tier.threads = false;
  return std::make_unique<StateTier>(tier, w.cache.get(), std::move(disk), std::move(objects),
                                     nullptr);
}

void TestMesh::MakeAttention(Worker& w) {
  w.model = &SharedModel(options_.folder, WithoutExperts(options_.load));
  RemoteExpertsOptions experts;
  experts.caller = w.name;
  experts.model_digest = w.model->digest();
  experts.experts = w.model->config().experts;
  experts.width = w.model->config().expert_width();
  experts.deadline = absl::Seconds(2);
  experts.pump = [this] { return network_.DeliverOne(); };
  w.experts = std::make_unique<RemoteExperts>(w.transport.get(), experts);
  auto engine = Engine::Create(w.model, w.experts.get(), &w.pool, options_.engine);
  CHECK_OK(engine.status());
  w.engine = *std::move(engine);
  if (options_.cache_bytes > 0) {
    w.cache = *PrefixCache::Create(
        {.bytes_max = options_.cache_bytes, .plan = {}, .learning = options_.learning},
        w.engine->pools());
  }
  if (!options_.store_folder.empty() || options_.bucket != nullptr) w.tier = MakeTier(w);

  mesh::Register registration;
  registration.set_name(w.name);
  registration.set_role(w.role);
  registration.set_epoch(w.epoch);
  *registration.mutable_model() = MakeModelIdentity(w.model->digest(), "text");
  mesh::Capacity& capacity = *registration.mutable_capacity();
  capacity.set_slabs(static_cast<uint64_t>(options_.engine.slabs));
  capacity.set_latent_blocks(static_cast<uint64_t>(options_.engine.latent_blocks));
  capacity.set_context_tokens(static_cast<uint64_t>(options_.engine.context_tokens_max));
  capacity.set_step_tokens(static_cast<uint64_t>(options_.engine.step_tokens_max));
  capacity.set_slab_bytes(static_cast<uint64_t>(w.model->state_layout().snapshot_bytes()));
  capacity.set_block_bytes(static_cast<uint64_t>(w.model->state_layout().block_bytes()));
  registration.set_transport_address(w.transport->address());
  registration.set_transport_kind(w.transport->kind());
  registration.set_session_store(w.tier != nullptr);
  registration.set_state_fetch(w.cache != nullptr && options_.fetch.open_max > 0);

  auto on_view = [experts = w.experts.get()](const mesh::MeshView& view) {
    ExpertView to;
    to.epoch = view.epoch();
    for (const mesh::ExpertPeer& peer : view.experts()) {
      to.shards.push_back(
          {.name = peer.name(),
           .epoch = peer.epoch(),
           .address = peer.transport_address(),
           .experts = {peer.placement().experts().begin(), peer.placement().experts().end()}});
    }
    experts->SetView(std::move(to));
  };
  HandoffIdentity identity;
  identity.digest = w.model->digest();
  HandoffReceiverOptions receiving;
  HandoffSenderOptions sending;
  receiving.name = sending.name = w.name;
  receiving.epoch = sending.epoch = w.epoch;
  receiving.identity = sending.identity = identity;
  receiving.layout = sending.layout = w.model->state_layout();
  receiving.verify_checksums = options_.verify_checksums;
  receiving.unclaimed_max = options_.unclaimed_max;
  sending.segment_bytes_max = 4096;  // several segments per region
  w.receiver = std::make_unique<HandoffReceiver>(
      w.transport.get(), &clock_, &entropy_, receiving,
      [&w](HandoffEvent event) { w.received.push_back(std::move(event)); });
  w.sender = std::make_unique<HandoffSender>(
      w.transport.get(), &clock_, sending,
      [&w](HandoffSent result) { w.sent.push_back(std::move(result)); });
  w.fetch = std::make_unique<FetchPort>(
      w.transport.get(), [&w](FetchEvent event) { w.asked.push_back(std::move(event)); });
  const TransferEnds ends = {w.sender.get(), w.receiver.get(), w.fetch.get()};
  if (w.role == mesh::ROLE_DECODE) {
    DecodeOptions core;
    core.cache = w.cache.get();
    core.tier = w.tier.get();
    core.fetch = options_.fetch;
    w.core =
        std::make_unique<DecodeCore>(core, std::move(registration), w.engine.get(), ends, on_view);
    return;
  }
  PrefillOptions core;
  core.clock = &clock_;
  core.kda_index = KdaIndexOfLayers(w.model->config());
  core.cache = w.cache.get();
  core.tier = w.tier.get();
  core.fetch = options_.fetch;
  w.core =
      std::make_unique<PrefillCore>(core, std::move(registration), w.engine.get(), ends, on_view);
}

void TestMesh::MakeExpert(Worker& w, int index) {
  const int64_t experts =
      SharedModel(options_.folder, WithoutExperts(options_.load)).config().experts;
  LoadOptions load = options_.load;
  load.experts = {.kind = ExpertSelection::Kind::kList,
                  .experts = ShardExperts(experts, index, options_.shards)};
  load.only_experts = true;
  w.model = &SharedModel(options_.folder, load);
  ExpertServerOptions options;
  options.name = w.name;
  options.epoch = w.epoch;
  options.model_digest = w.model->digest();
  options.compute_inline = true;
  w.server =
      std::make_unique<ExpertServer>(w.transport.get(), &w.model->experts(), &w.pool, options);

  mesh::Register registration;
  registration.set_name(w.name);
  registration.set_role(w.role);
  registration.set_epoch(w.epoch);
  *registration.mutable_model() = MakeModelIdentity(w.model->digest(), "text");
  registration.set_transport_address(w.transport->address());
  registration.set_transport_kind(w.transport->kind());
  registration.mutable_experts()->set_shard(static_cast<uint32_t>(index));
  registration.mutable_experts()->set_shards(static_cast<uint32_t>(options_.shards));
  for (int32_t e : load.experts.experts) {
    registration.mutable_experts()->add_experts(static_cast<uint32_t>(e));
  }
  w.core = std::make_unique<ExpertCore>(
      ExpertCoreOptions(), std::move(registration), [server = w.server.get()] {
        const ExpertServerStats stats = server->stats();
        return ExpertUse{.arrived = stats.arrived, .open = stats.queued};
      });
}

// ---- mesh ----------------------------------------------------------------------------------------

TestMesh::TestMesh(TestMeshOptions options)
    : options_(std::move(options)),
      entropy_(options_.seed),
      network_({.delivery = InprocDelivery::kQueued, .reorder = true, .seed = options_.seed}),
      router_(std::make_unique<RouterCore>(options_.router)) {
  auto add = [this](const char* role_name, mesh::Role role, int count) {
    for (int i = 0; i < count; ++i) {
      const std::string name = absl::StrFormat("%s-%d", role_name, i);
      workers_[name] = Make(name, role, i);
      Connect(*workers_[name]);
    }
  };
  add("expert", mesh::ROLE_EXPERT, options_.shards);
  add("prefill", mesh::ROLE_PREFILL, options_.prefill);
  add("decode", mesh::ROLE_DECODE, options_.decode);
}

TestMesh::~TestMesh() = default;

void TestMesh::Start() {
  CHECK(RunUntil([this] {
          return router_->Ready().ok() && router_->gauges().prefill_workers >= options_.prefill &&
                 router_->gauges().decode_workers >= options_.decode;
        }),
        "the mesh did not come up: %s", router_->Ready().ToString());
}

void TestMesh::Connect(Worker& worker) {
  worker.link = next_link_++;
  router_->OnLinkOpened(worker.link, now());
  worker.core->OnLinkOpened(worker.link, now());
}

absl::Status TestMesh::Submit(const ClientRequest& request) {
  CarryOut(router_->TakeActions());  // what it said so far is about earlier requests
  RETURN_IF_ERROR(router_->Submit(request, now()));
  answers_[request.request_id] = Answer();
  return absl::OkStatus();
}

bool TestMesh::Cancel(const RequestId& id) {
  CarryOut(router_->TakeActions());
  return router_->CancelClient(id, now());
}

SessionAnswered TestMesh::CallSession(SessionCall call) {
  CarryOut(router_->TakeActions());
  call.id = absl::StrFormat("call %d", next_call_++);
  router_->CallSession(call, now());
  CHECK(RunUntil([&] { return sessions_.contains(call.id); }), "no answer to %s", call.id);
  return sessions_.extract(call.id).mapped();
}

void TestMesh::CarryOut(std::vector<RouterAction> actions) {
  for (RouterAction& action : actions) {
    if (auto* send = std::get_if<SendToWorker>(&action)) {
      if (Worker* worker = ByLink(send->link)) worker->to_worker.push_back(send->message);
    } else if (auto* close = std::get_if<CloseLink>(&action)) {
      Worker* worker = ByLink(close->link);
      router_->OnLinkClosed(close->link, close->status, now());
      if (worker == nullptr) continue;
      worker->core->OnLinkClosed(close->link, now());
      worker->to_worker.clear();
      worker->to_router.clear();
      Connect(*worker);
    } else if (auto* tokens = std::get_if<ClientTokens>(&action)) {
      Answer& answer = answers_[tokens->request_id];
      CHECK(!answer.ended && tokens->output.first_index() == answer.tokens.size());
      answer.tokens.insert(answer.tokens.end(), tokens->output.tokens().begin(),
                           tokens->output.tokens().end());
      answer.scores.insert(answer.scores.end(), tokens->output.scores().begin(),
                           tokens->output.scores().end());
    } else if (auto* finished = std::get_if<ClientFinished>(&action)) {
      Answer& answer = answers_[finished->request_id];
      CHECK(!answer.ended);
      answer.ended = true;
      answer.end = finished->end;
      answer.usage = finished->usage;
    } else if (auto* failed = std::get_if<ClientFailed>(&action)) {
      Answer& answer = answers_[failed->request_id];
      CHECK(!answer.ended);
      answer.ended = true;
      answer.status = failed->status;
    } else if (auto* session = std::get_if<SessionAnswered>(&action)) {
      CHECK(sessions_.emplace(session->id, *session).second, "answered twice");
    }
  }
}

void TestMesh::DeliverLink(Worker& w) {
  for (mesh::RouterMessage& message : std::exchange(w.to_worker, {})) {
    if (w.deaf && (message.has_start_decode() || message.has_start_prefill())) continue;
    if (heard_) heard_(w.name, message);
    w.core->OnRouterMessage(w.link, message, now());
  }
  if (w.slow) return;
  for (mesh::WorkerMessage& message : std::exchange(w.to_router, {})) {
    if (lost_ && lost_(w.name, message)) continue;
    router_->OnWorkerMessage(w.link, message, now());
  }
}

void TestMesh::Round() {
  clock_.Advance(options_.round);
  router_->Tick(now());
  CarryOut(router_->TakeActions());
  std::vector<Worker*> order;
  for (auto& [name, worker] : workers_) {
    if (worker->alive) order.push_back(worker.get());
  }
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[entropy_.Next() % i]);
  for (Worker* w : order) {
    CarryOut(router_->TakeActions());
    DeliverLink(*w);
    for (HandoffEvent& event : std::exchange(w->received, {})) {
      w->attention()->OnHandoffEvent(std::move(event), now());
    }
    for (HandoffSent& result : std::exchange(w->sent, {})) {
      w->attention()->OnHandoffSent(result, now());
    }
    for (const FetchEvent& event : std::exchange(w->asked, {})) {
      w->attention()->OnFetchEvent(event, now());
    }
    w->core->Step(now());
    w->core->Tick(now());
    if (w->tier != nullptr && !w->stuck_disk) w->tier->RunIo();
    for (SendToRouter& action : w->core->TakeActions()) {
      if (action.link == w->link) w->to_router.push_back(std::move(action.message));
    }
  }
  network_.DeliverAll();
}

void TestMesh::RunFor(absl::Duration time) {
  const absl::Time until = now() + time;
  while (now() < until) Round();
}

bool TestMesh::RunUntil(const std::function<bool()>& done, absl::Duration limit) {
  const absl::Time until = now() + limit;
  while (!done()) {
    if (now() >= until) return false;
    Round();
  }
  return true;
}

bool TestMesh::RunUntilEnded(const std::vector<RequestId>& ids, absl::Duration limit) {
  return RunUntil(
      [&] {
        return std::all_of(ids.begin(), ids.end(),
                           [this](const RequestId& id) { return answers_[id].ended; });
      },
      limit);
}

void TestMesh::Drain(const std::string& name) { workers_.at(name)->core->Drain(now()); }

void TestMesh::SetDeaf(const std::string& name, bool deaf) { workers_.at(name)->deaf = deaf; }

void TestMesh::SetStuckDisk(const std::string& name, bool stuck) {
  workers_.at(name)->stuck_disk = stuck;
}
void TestMesh::SetSlow(const std::string& name, bool slow) { workers_.at(name)->slow = slow; }

void TestMesh::Kill(const std::string& name) {
  Worker& worker = *workers_.at(name);
  CHECK(worker.alive, "%s is dead already", name);
  network_.Kill(worker.address);
  const LinkId link = std::exchange(worker.link, 0);
  worker.Stop();
  router_->OnLinkClosed(link, Unavailable("killed"), now());
}

void TestMesh::Restart(const std::string& name) {
  std::unique_ptr<Worker>& worker = workers_.at(name);
  if (worker->alive) Kill(name);
  worker = Make(name, worker->role, worker->index);
  Connect(*worker);
}

void TestMesh::RestartRouter() {
  RouterOptions options = options_.router;
  options.epoch = router_->options().epoch + 1000;
  router_ = std::make_unique<RouterCore>(options);
  for (auto& [name, worker] : workers_) {
    if (!worker->alive) continue;
    worker->core->OnLinkClosed(worker->link, now());
    worker->to_worker.clear();
    worker->to_router.clear();
    Connect(*worker);
  }
}

bool TestMesh::AtBaseline() const {
  for (const auto& [name, w] : workers_) {
    if (!w->alive || w->engine == nullptr) continue;
    const StatePools& pools = w->engine->pools();
    const int64_t held = w->cache == nullptr ? 0 : w->cache->tree().stats().blocks;
    if (pools.slabs->free_slots() != pools.slabs->slots() ||
        pools.blocks->free_slots() + held != pools.blocks->slots() || !w->core->Idle()) {
      return false;
    }
    if (w->receiver != nullptr && w->receiver->stats().open != 0) return false;
    if (w->sender != nullptr && w->sender->stats().open != 0) return false;
  }
  return true;
}

TestMesh::Worker* TestMesh::ByLink(LinkId link) {
  for (auto& [name, worker] : workers_) {
    if (worker->alive && worker->link == link) return worker.get();
  }
  return nullptr;
}

DecodeCore& TestMesh::decode(const std::string& name) { return *workers_.at(name)->decode(); }
PrefillCore& TestMesh::prefill(const std::string& name) { return *workers_.at(name)->prefill(); }
PrefixCache& TestMesh::cache(const std::string& name) { return *workers_.at(name)->cache; }
StateTier* TestMesh::tier(const std::string& name) { return workers_.at(name)->tier.get(); }
bool TestMesh::alive(const std::string& name) const { return workers_.at(name)->alive; }

std::vector<std::string> TestMesh::names() const {
  std::vector<std::string> out;
  for (const auto& [name, worker] : workers_) out.push_back(name);
  return out;
}

}  // namespace deltamesh::testing
