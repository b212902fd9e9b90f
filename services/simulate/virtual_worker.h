// A prefill or decode worker without a machine: what it decides is decided by the classes of real workers -
// Scheduler, PrefixTree, SnapshotPlanner - and what it computes takes the time that rates say.
//
// It follows the messages of mesh.proto as real ones do. What it leaves out: sequences and the cache have
// memory of their own each, snapshots of running answers none; transfers never fail.
//
// Not thread-safe. Times are seconds of the simulation and do not go back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/scheduler/scheduler.h"
#include "services/common/link.h"
#include "services/simulate/policy_cache.h"
#include "services/simulate/traffic.h"
#include "services/worker/rate.h"

namespace deltamesh {

// How long things take. Assumed where nobody measured them: `deltamesh bench` does.
struct WorkerRates {
  double prompt_tokens_per_second = 20000;
  double step_seconds = 0.020;    // of every step, whatever is in it
  double token_seconds = 0.0003;  // of a step, for each sequence that decodes in it
};

struct VirtualWorkerOptions {
  mesh::Role role = mesh::ROLE_PREFILL;
  std::string name;
  LinkId link = 0;
  SchedulerOptions scheduler;
  WorkerRates rates;
  int64_t slabs = 64;        // sequences at once
  int64_t blocks = 1 << 16;  // of latents, for them
  int64_t context_tokens = 1 << 20;
  double heartbeat_seconds = 0.25;
};

// A prompt that a prefill worker has computed and sends.
struct VirtualHandoff {
  std::string request;
  std::string receiver;
  uint32_t attempt = 0;
  int64_t position = 0;
  int64_t restored = 0;      // of the position, not computed
  int64_t bytes = 0;         // snapshot and the latents the receiver lacks
  int64_t latent_bytes = 0;  // of them; they leave while the prompt computes
  double compute_seconds = 0;
};

// A state that a worker wants from another one.
struct VirtualFetch {
  std::string request;
  std::string source, receiver;
  uint32_t attempt = 0;
  int64_t position = 0;
  int64_t bytes = 0;  // snapshot and the latents the receiver lacks
};

class VirtualWorker {
 public:
  // `turn_of` finds the turn of a live request.
  VirtualWorker(VirtualWorkerOptions options, const CachePolicy& policy, const CacheBytes& bytes,
                std::function<const Turn&(const std::string&)> turn_of);

  mesh::WorkerMessage Registration() const;
  void OnMessage(const mesh::RouterMessage& message, double now);
  void OnHandoffArrived(const VirtualHandoff& handoff, double seconds, double now);
  // `seconds`: since it was asked; not `held`: it was not there any more.
  void OnFetched(const VirtualFetch& fetch, bool held, double seconds, double transfer_seconds,
                 double now);
  // Whether the state of the request's first `position` tokens could be sent from here.
  bool Holds(const std::string& request, int64_t position);
  // When the step that runs ends, before which nobody looks around.
  double LooksAround(double now) const;

  // When the step that runs ends, or the heartbeat is due; nothing: never by itself.
  std::optional<double> NextAt() const;
  void Advance(double now);

  std::vector<mesh::WorkerMessage> TakeMessages();
  std::vector<VirtualHandoff> TakeHandoffs() { return std::exchange(handoffs_, {}); }
  std::vector<VirtualFetch> TakeFetches() { return std::exchange(fetches_, {}); }

  const VirtualWorkerOptions& options() const { return options_; }
  PolicyCache& cache() { return cache_; }
  int64_t computed_tokens() const { return computed_tokens_; }  // of prompts
  double busy_seconds() const { return busy_seconds_; }
  int64_t snapshots_taken() const { return snapshots_taken_; }

 private:
  struct Job {
    std::string request;
    uint32_t attempt = 0;
    int64_t position = 0;
    int64_t prompt_end = 0;
    int64_t restored = 0;
    int64_t generated = 0;
    int64_t blocks = 0;  // reserved
    std::vector<CutPoint> cuts;
    double admitted = 0;
    std::optional<mesh::Landing> landing;  // of a prefill
  };
  // A landing that was granted and waits for its state.
  struct Awaited {
    uint32_t attempt = 0;
    int64_t handoff_tokens = 0;
    int64_t blocks = 0;
  };

  void StartPrefill(const mesh::StartPrefill& message, double now);
  void StartDecode(const mesh::StartDecode& message, double now);
  void Cancel(const std::string& request);
  // Runs the job, or has what it is to fetch asked for first.
  void FetchOrRun(Job job, const mesh::FetchSource& source, double now);
  void Run(Job job, double now);
  void RunOrFinish(Job job, double now);
  void BeginStep(double now);
  void EndStep(double now);
  void Progress(SequenceId id, int64_t tokens, double now);
  void Generated(Job& job, int64_t tokens, double now);
  void FinishPrefill(Job& job, double now);
  void Interrupt(double now);
  bool Decoding(const Job& job) const { return job.position >= job.prompt_end; }
  int64_t SlabsFree() const;
  mesh::WorkerMessage Heartbeat() const;
  void TellPrefixes();
  void Dirty(double now);

  const VirtualWorkerOptions options_;
  const CacheBytes bytes_;
  const std::function<const Turn&(const std::string&)> turn_of_;
  PolicyCache cache_;
  Scheduler scheduler_;
  std::map<SequenceId, Job> jobs_;
  std::map<std::string, Awaited> awaited_;
  std::map<std::string, Job> fetching_;  // their states
  uint64_t next_sequence_ = 1;
  int64_t blocks_used_ = 0;

  // The step that runs, or several alike in which nobody begins or ends.
  struct Step {
    double began = 0, seconds = 0;  // of each
    int64_t count = 0;
    std::vector<PlannedChunk> chunks;  // empty: all jobs decode
  };
  std::optional<Step> step_;
  std::optional<double> heartbeat_at_;
  double heartbeat_last_ = -1;

  TokenRate rate_, prompt_rate_;
  uint64_t prefixes_told_ = 0;
  std::vector<mesh::WorkerMessage> messages_;
  std::vector<VirtualHandoff> handoffs_;
  std::vector<VirtualFetch> fetches_;
  int64_t computed_tokens_ = 0, snapshots_taken_ = 0;
  double busy_seconds_ = 0;
};

}  // namespace deltamesh
