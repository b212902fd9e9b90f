// The router's core among workers that die, fall silent, refuse, repeat themselves and hand over damaged
// state, a run per seed. Safety all the time; after the faults end, everything must end too.
#include <deque>
#include <map>
#include <set>

#include "runtime/base/random.h"
#include "services/router/policy.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

// The answer of a request is a function of its id alone.
int ExpectedToken(const std::string& id, int64_t index) {
  return static_cast<int>(PlacementHash(id, std::to_string(index)) % 1000);
}
int64_t ExpectedLength(const std::string& id) {
  return 1 + static_cast<int64_t>(PlacementHash(id, "length") % 12);
}

class World {
 public:
  explicit World(uint64_t seed) : entropy_(seed) {
    InitLog("test", LogLevel::kError);
    RouterOptions options;
    options.waiting_requests_max = 8;
    options.waiting_max = absl::Seconds(4);
    options.landing_max = absl::Seconds(2);
    options.progress_max = absl::Seconds(5);
    core_ = std::make_unique<RouterCore>(options);
    for (const std::string name : {"d1", "d2", "p1", "p2"}) Join(name);
  }

  void Run() {
    for (int step = 0; step < 400; ++step) {
      if (Pick(3) == 0) Submit();
      if (Pick(20) == 0) CancelSome();
      if (Pick(60) == 0) Kill(Name());
      if (Pick(80) == 0) workers_[Name()].silent_until = now_ + absl::Seconds(5);
      Step(/*faults=*/true);
    }
    for (const auto& [name, worker] : workers_) EXPECT_LE(worker.held.size(), 64u);
    // Healed: nobody dies any more, so everything ends.
    for (auto& [name, worker] : workers_) worker.silent_until = now_;
    for (int step = 0; step < 2000 && !live_.empty(); ++step) Step(false);
    EXPECT_TRUE(live_.empty()) << *live_.begin();
    for (int step = 0; step < 50; ++step) Step(false);
    CheckNothingLeft();
  }

  uint64_t log_hash() const { return log_hash_; }
  uint64_t ended_well() const { return ended_well_; }
  const RouterCounters& counters() const { return core_->counters(); }

 private:
  struct Held {
    uint32_t attempt = 0;
    int64_t next = 0, max = 0;
    uint64_t transfer = 0;  // decode: awaited; prefill: to be sent
    bool running = false;
    int delay = 0;
  };
  struct Worker {
    LinkId link = 0;
    uint64_t epoch = 0;
    bool decode = false;
    absl::Time silent_until;
    std::map<std::string, Held> held;
    std::deque<mesh::RouterMessage> inbox;  // in order, delivered late
    std::deque<mesh::WorkerMessage> outbox;
  };

  uint64_t Pick(uint64_t n) { return entropy_.Next() % n; }
  std::string Name() {
    auto it = workers_.begin();
    std::advance(it, Pick(workers_.size()));
    return it->first;
  }

  void Join(const std::string& name) {
    Worker& w = workers_[name];
    w.decode = name[0] == 'd';
    w.link = ++links_;
    by_link_[w.link] = name;
    w.silent_until = now_;
    core_->OnLinkOpened(w.link, now_);
    w.outbox.push_back(
        TestRegister(name, w.decode ? mesh::ROLE_DECODE : mesh::ROLE_PREFILL, ++w.epoch));
  }

  void Drop(Worker& w) {
    by_link_.erase(w.link);
    w.held.clear();
    w.inbox.clear();
    w.outbox.clear();
  }

  void Kill(const std::string& name) {
    Worker& w = workers_[name];
    const LinkId link = w.link;
    Drop(w);
    if (Pick(2) == 0) Join(name);  // back before the router has noticed
    core_->OnLinkClosed(link, absl::UnavailableError("killed"), now_);
    if (!by_link_.contains(workers_[name].link)) Join(name);
  }

  void Submit() {
    ClientRequest r;
    r.request_id = "q" + std::to_string(++submitted_);
    r.prompt.assign(1 + Pick(300), 5);
    r.max_tokens = ExpectedLength(r.request_id);
    if (Pick(10) == 0) r.deadline = now_ + absl::Milliseconds(static_cast<int64_t>(Pick(3000)));
    const std::string id = r.request_id;
    if (core_->Submit(std::move(r), now_).ok()) {
      live_.insert(id);
      delivered_[id] = 0;
    }
    Perform();
  }

  void CancelSome() {
    if (live_.empty()) return;
    auto it = live_.begin();
    std::advance(it, Pick(live_.size()));
    const std::string id = *it;
    EXPECT_TRUE(core_->CancelClient(id, now_));
    live_.erase(it);
    Perform();
  }

  void Step(bool faults) {
    now_ += absl::Milliseconds(20);
    for (auto& [name, w] : workers_) {
      if (w.silent_until > now_) continue;
      for (size_t n = Pick(3); n > 0 && !w.inbox.empty(); --n) {
        const mesh::RouterMessage m = std::move(w.inbox.front());
        w.inbox.pop_front();
        Receive(w, m, faults);
      }
      Work(w, faults);
      if (Pick(5) == 0) Beat(w);
    }
    for (auto& [name, w] : workers_) {
      if (w.silent_until > now_) continue;
      for (size_t n = 1 + Pick(4); n > 0 && !w.outbox.empty(); --n) {
        const mesh::WorkerMessage m = std::move(w.outbox.front());
        w.outbox.pop_front();
        const LinkId link = w.link;
        core_->OnWorkerMessage(link, m, now_);
        if (faults && !m.has_register_() && Pick(15) == 0) core_->OnWorkerMessage(link, m, now_);
        Perform();
        if (w.link != link) break;  // closed by the router, joined anew
      }
    }
    core_->Tick(now_);
    Perform();
  }

  void Receive(Worker& w, const mesh::RouterMessage& m, bool faults) {
    if (m.has_cancel()) w.held.erase(m.cancel().request_id());
    if (m.has_start_decode()) {
      const mesh::StartDecode& s = m.start_decode();
      w.held.erase(s.request_id());
      if (w.held.size() >= 4 || (faults && Pick(12) == 0)) {
        return Fail(w, s.request_id(), s.attempt(), absl::ResourceExhaustedError("full"));
      }
      Held& h = w.held[s.request_id()];
      h.attempt = s.attempt();
      h.max = s.max_tokens();
      h.running = s.handoff_tokens() == 0;
      if (!h.running) Grant(w, s.request_id(), s.handoff_tokens());
      positions_[s.request_id()] = s.handoff_tokens();
    }
    if (m.has_start_prefill()) {
      const mesh::StartPrefill& s = m.start_prefill();
      if (faults && Pick(12) == 0) {
        return Fail(w, s.request_id(), s.attempt(),
                    Pick(2) == 0 ? absl::ResourceExhaustedError("full")
                                 : absl::UnavailableError("cannot reach the receiver"));
      }
      Held& h = w.held[s.request_id()];
      h = Held{.attempt = s.attempt(), .transfer = s.landing().transfer_id()};
      h.delay = static_cast<int>(Pick(6));
    }
  }

  void Grant(Worker& w, const std::string& id, uint64_t position) {
    Held& h = w.held[id];
    h.transfer = ++transfers_;
    mesh::WorkerMessage m;
    m.mutable_landing_granted()->set_request_id(id);
    m.mutable_landing_granted()->set_attempt(h.attempt);
    m.mutable_landing_granted()->mutable_landing()->set_position(position);
    m.mutable_landing_granted()->mutable_landing()->set_transfer_id(h.transfer);
    w.outbox.push_back(m);
  }

  void Fail(Worker& w, const std::string& id, uint32_t attempt, const absl::Status& status) {
    mesh::WorkerMessage m;
    m.mutable_failed()->set_request_id(id);
    m.mutable_failed()->set_attempt(attempt);
    m.mutable_failed()->set_code(static_cast<int>(status.code()));
    m.mutable_failed()->set_message(MessageOf(status));
    w.outbox.push_back(m);
  }

  void Work(Worker& w, bool faults) {
    std::vector<std::string> ids;
    for (const auto& [id, h] : w.held) ids.push_back(id);
    for (const std::string& id : ids) {
      Held& h = w.held[id];
      if (w.decode && h.running) {
        mesh::WorkerMessage m;
        mesh::SequenceOutput* o = m.mutable_outputs()->add_sequences();
        o->set_request_id(id);
        o->add_tokens(ExpectedToken(id, h.next));
        o->set_first_index(static_cast<uint64_t>(h.next));
        o->set_attempt(h.attempt);
        const bool last = ++h.next == h.max;
        if (last) o->set_end(mesh::SequenceOutput::MAX_TOKENS);
        w.outbox.push_back(m);
        if (last) w.held.erase(id);
      } else if (!w.decode && --h.delay < 0) {
        mesh::WorkerMessage m;
        m.mutable_prefill_finished()->set_request_id(id);
        m.mutable_prefill_finished()->set_attempt(h.attempt);
        w.outbox.push_back(m);
        Transfer(id, h.transfer, faults && Pick(4) == 0);
        w.held.erase(id);
      }
    }
  }

  // State reaches whoever still awaits exactly this transfer; anyone else refuses it.
  void Transfer(const std::string& id, uint64_t transfer, bool damaged) {
    for (auto& [name, w] : workers_) {
      const auto it = w.held.find(id);
      if (!w.decode || it == w.held.end() || it->second.transfer != transfer || it->second.running)
        continue;
      Held& h = it->second;
      mesh::WorkerMessage m;
      m.mutable_handoff_result()->set_request_id(id);
      m.mutable_handoff_result()->set_attempt(h.attempt);
      m.mutable_handoff_result()->set_code(damaged ? static_cast<int>(absl::StatusCode::kDataLoss)
                                                   : 0);
      m.mutable_handoff_result()->set_reason(damaged ? "CHECKSUM: region 1" : "");
      w.outbox.push_back(m);
      h.transfer = 0;
      h.running = !damaged;
      if (damaged) {
        ++h.attempt;
        Grant(w, id, positions_[id]);
      }
    }
  }

  void Beat(Worker& w) {
    mesh::WorkerMessage m;
    m.mutable_heartbeat()->set_slabs_free(4 - std::min<size_t>(4, w.held.size()));
    m.mutable_heartbeat()->set_latent_blocks_free(64);
    m.mutable_heartbeat()->set_running(w.held.size());
    w.outbox.push_back(m);
  }

  void Log(const std::string& line) { log_hash_ = PlacementHash(line, std::to_string(log_hash_)); }

  void Perform() {
    std::vector<std::string> rejoin;
    for (const RouterAction& action : core_->TakeActions()) {
      Log(DescribeAction(action));
      if (const auto* a = std::get_if<SendToWorker>(&action)) {
        const auto it = by_link_.find(a->link);
        if (it != by_link_.end()) workers_[it->second].inbox.push_back(a->message);
        EXPECT_FALSE(closed_.contains(a->link)) << "a message to a link the router has closed";
      } else if (const auto* a = std::get_if<CloseLink>(&action)) {
        closed_.insert(a->link);
        const auto it = by_link_.find(a->link);
        if (it != by_link_.end()) rejoin.push_back(it->second);
      } else if (const auto* a = std::get_if<ClientTokens>(&action)) {
        ASSERT_TRUE(live_.contains(a->request_id));
        EXPECT_EQ(static_cast<int64_t>(a->output.first_index()), delivered_[a->request_id]);
        for (const int token : a->output.tokens()) {
          EXPECT_EQ(token, ExpectedToken(a->request_id, delivered_[a->request_id]++));
        }
      } else if (const auto* a = std::get_if<ClientFinished>(&action)) {
        EXPECT_EQ(live_.erase(a->request_id), 1u) << "ended twice: " << a->request_id;
        EXPECT_EQ(delivered_[a->request_id], ExpectedLength(a->request_id));
        EXPECT_EQ(a->usage.completion_tokens, delivered_[a->request_id]);
        ++ended_well_;
      } else if (const auto* a = std::get_if<ClientFailed>(&action)) {
        EXPECT_EQ(live_.erase(a->request_id), 1u) << "ended twice: " << a->request_id;
        EXPECT_FALSE(a->status.ok());
        EXPECT_NE(a->status.code(), absl::StatusCode::kInternal) << a->status;
      }
    }
    for (const std::string& name : rejoin) {
      Worker& w = workers_[name];
      core_->OnLinkClosed(w.link, absl::OkStatus(), now_);
      Drop(w);
      Join(name);
    }
  }

  void CheckNothingLeft() {
    for (const auto& [name, w] : workers_) {
      EXPECT_TRUE(w.held.empty()) << name << " " << w.held.begin()->first;
    }
    EXPECT_EQ(core_->gauges().live, 0);
    EXPECT_EQ(core_->gauges().waiting, 0);
    // No room was lost: as many requests as there are slabs are placed at once.
    for (auto& [name, w] : workers_) Beat(w);
    for (int step = 0; step < 20; ++step) Step(false);
    for (int i = 0; i < 8; ++i) {
      ClientRequest r;
      r.request_id = "last" + std::to_string(i);
      r.prompt.assign(100, 5);
      r.max_tokens = 1;
      ASSERT_TRUE(core_->Submit(std::move(r), now_).ok());
    }
    EXPECT_EQ(core_->gauges().waiting, 0);
  }

  SeededEntropy entropy_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::unique_ptr<RouterCore> core_;
  std::map<std::string, Worker> workers_;
  std::map<LinkId, std::string> by_link_;
  std::set<LinkId> closed_;
  std::set<std::string> live_;
  std::map<std::string, int64_t> delivered_;
  std::map<std::string, uint64_t> positions_;
  LinkId links_ = 0;
  uint64_t transfers_ = 0;
  int submitted_ = 0;
  uint64_t ended_well_ = 0;
  uint64_t log_hash_ = 0;
};

TEST(RouterSoakTest, EveryRequestEndsOnceAndNothingLeaks) {
  uint64_t well = 0, retries = 0, lost = 0, stale = 0, refused = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE(absl::StrFormat("seed %d", seed));
    World world(seed);
    world.Run();
    if (::testing::Test::HasFailure()) return;
    well += world.ended_well();
    retries += world.counters().prefill_retries;
    lost += world.counters().decode_lost + world.counters().prefill_lost;
    stale += world.counters().stale_messages;
    refused += world.counters().placement_refusals;
  }
  // The faults really happened, and most requests survived them.
  EXPECT_GT(well, 10000u);
  EXPECT_GT(retries, 500u);
  EXPECT_GT(lost, 500u);
  EXPECT_GT(stale, 500u);
  EXPECT_GT(refused, 500u);
}

TEST(RouterSoakTest, TheSameSeedDoesTheSame) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    World a(seed), b(seed);
    a.Run();
    b.Run();
    EXPECT_EQ(a.log_hash(), b.log_hash());
    EXPECT_NE(a.log_hash(), 0u);
  }
}

}  // namespace
}  // namespace deltamesh
