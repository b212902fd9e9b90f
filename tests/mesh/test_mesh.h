// A whole mesh in one thread: a router core, prefill and decode cores with engines, expert shards, an
// in-process transport and a clock that the test moves. One seed fixes a run.
//
// Messages between router and workers wait in queues, one per direction and link; each round delivers
// what is queued, in an order over the links drawn from the seed, steps every worker once and moves the
// clock by `round`.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/clock.h"
#include "runtime/base/random.h"
#include "runtime/base/thread_pool.h"
#include "runtime/engine/engine.h"
#include "runtime/expert/expert_server.h"
#include "runtime/expert/local_experts.h"
#include "runtime/expert/remote_experts.h"
#include "runtime/model/model.h"
#include "runtime/transfer/handoff_receiver.h"
#include "runtime/transfer/handoff_sender.h"
#include "runtime/transfer/inproc_transport.h"
#include "services/decode/decode_core.h"
#include "services/prefill/prefill_core.h"
#include "services/router/router_core.h"
#include "services/worker/worker_core.h"
#include "tests/mesh/rewriting_transport.h"
#include "tests/unit/store/memory_objects.h"

namespace deltamesh::testing {

class ManualClock final : public Clock {
 public:
  absl::Time Now() const override { return now_; }
  void Advance(absl::Duration d) { now_ += d; }

 private:
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
};

// Loaded once per test program and selection.
Model& SharedModel(const std::string& folder, const LoadOptions& options);

struct Answer {
  std::vector<TokenId> tokens;
  std::vector<mesh::TokenScores> scores;
  mesh::SequenceOutput::End end = mesh::SequenceOutput::RUNNING;
  absl::Status status;
  bool ended = false;
  TokenUsage usage;
};
// Tokens, end and the bits of every log-probability.
bool SameAnswer(const Answer& a, const Answer& b);
std::string Describe(const Answer& answer);

// One engine, no mesh: what the mesh must equal.
class PlainEngine {
 public:
  explicit PlainEngine(const std::string& folder, const LoadOptions& load = {});
  Answer Run(const ClientRequest& request);

 private:
  Model& model_;
  ThreadPool pool_{1};
  LocalExperts experts_;
  std::unique_ptr<Engine> engine_;
};

struct TestMeshOptions {
  std::string folder;  // checkpoint
  LoadOptions load;    // of every worker; experts as its role needs
  int prefill = 1, decode = 1, shards = 2;
  EngineOptions engine = {.slabs = 4,
                          .latent_blocks = 64,
                          .step_tokens_max = 96,
                          .chunk_tokens_max = 80,
                          .running_max = 4,
                          .context_tokens_max = 512};
  RouterOptions router;
  int64_t cache_bytes = 0;   // of each prefill and decode worker
  GridLearning learning;     // of these
  std::string store_folder;  // that they share; empty: none
  bool store_each = false;   // each has a folder of its own in it instead
  int64_t store_bytes = int64_t{64} << 20;
  MemoryBucket* bucket = nullptr;  // that they share as well; null: none
  StateTierOptions tier;
  FetchOptions fetch;
  bool verify_checksums = true;
  absl::Duration unclaimed_max = HandoffReceiverOptions().unclaimed_max;
  int threads = 1;  // per worker
  uint64_t seed = 1;
  absl::Duration round = absl::Milliseconds(5);
};

class TestMesh {
 public:
  explicit TestMesh(TestMeshOptions options);
  ~TestMesh();

  // Runs until the router can place requests; CHECKs that it happens.
  void Start();

  absl::Status Submit(const ClientRequest& request);
  bool Cancel(const RequestId& id);
  const Answer& answer(const RequestId& id) { return answers_[id]; }
  // Asks and waits for the answer.
  SessionAnswered CallSession(SessionCall call);

  void Round();
  void RunFor(absl::Duration time);
  // False when `done` did not become true within `limit` of the mesh's time.
  bool RunUntil(const std::function<bool()>& done, absl::Duration limit = absl::Seconds(30));
  bool RunUntilEnded(const std::vector<RequestId>& ids, absl::Duration limit = absl::Seconds(30));

  // The worker lives and its heartbeats arrive, but it hears of no new request.
  void SetDeaf(const std::string& name, bool deaf);
  // Its disk does nothing of what it is asked.
  void SetStuckDisk(const std::string& name, bool stuck);
  // What the worker says to the router waits until this is over; nothing else of it does.
  void SetSlow(const std::string& name, bool slow);
  // The process is gone: its link breaks, its transport dies, nothing is said.
  void Kill(const std::string& name);
  // The same name with a larger epoch.
  void Restart(const std::string& name);
  // The router loses every link and forgets everything; workers dial again.
  void RestartRouter();

  // All slabs and blocks of every living worker are free or held by its prefix cache, and no transfer is
  // open.
  bool AtBaseline() const;

  InprocNetwork& network() { return network_; }
  // Messages to the router that `lost` says yes to never arrive; it may change the others. Null: all do.
  using Lost = std::function<bool(const std::string& worker, mesh::WorkerMessage& message)>;
  void SetLost(Lost lost) { lost_ = std::move(lost); }
  // Sees, and may change, what routers' messages workers hear; null: nobody does.
  using Heard = std::function<void(const std::string& worker, mesh::RouterMessage& message)>;
  void SetHeard(Heard heard) { heard_ = std::move(heard); }
  // The worker says that it is draining, and admits nothing.
  void Drain(const std::string& name);
  // Writes anew what workers send from now on; null: nothing.
  void SetRewrite(Rewrite rewrite) { rewrite_ = std::move(rewrite); }
  RouterCore& router() { return *router_; }
  DecodeCore& decode(const std::string& name);
  PrefillCore& prefill(const std::string& name);
  PrefixCache& cache(const std::string& name);
  StateTier* tier(const std::string& name);
  absl::Time now() const { return clock_.Now(); }
  std::vector<std::string> names() const;
  bool alive(const std::string& name) const;

 private:
  struct Worker;

  std::unique_ptr<Worker> Make(const std::string& name, mesh::Role role, int index);
  void MakeAttention(Worker& worker);
  std::unique_ptr<StateTier> MakeTier(const Worker& worker) const;
  void MakeExpert(Worker& worker, int index);
  void Connect(Worker& worker);
  void CarryOut(std::vector<RouterAction> actions);
  void DeliverLink(Worker& worker);
  Worker* ByLink(LinkId link);

  const TestMeshOptions options_;
  ManualClock clock_;
  SeededEntropy entropy_;
  InprocNetwork network_;
  Rewrite rewrite_;
  Lost lost_;
  Heard heard_;
  std::unique_ptr<RouterCore> router_;
  uint64_t next_epoch_ = 100;
  LinkId next_link_ = 1;
  int next_call_ = 1;
  std::map<std::string, std::unique_ptr<Worker>> workers_;
  std::map<RequestId, Answer> answers_;
  std::map<RequestId, SessionAnswered> sessions_;
};

}  // namespace deltamesh::testing
