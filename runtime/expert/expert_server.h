// The shard's end of an expert call: takes rows, computes them on a thread of its own, answers.
//
// A dispatch is checked before its payload is accepted: model digest, epoch, layer, ids, width,
// sizes and the bounds below. A refused one is answered with the reason, so that the caller need
// not wait for its deadline. Payloads land in buffers of this server; its memory is bounded by
// landing_bytes_max.
//
// Threads: one own thread computes, and drives the transport while it has nothing to compute, so that a
// call is received, computed and answered without waking another thread; what arrives meanwhile is
// handled by the transport's thread. Inline mode: the handler's thread computes, under a lock. stats() may
// be called on any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/thread_pool.h"
#include "runtime/expert/expert_set.h"
#include "runtime/expert/local_experts.h"
#include "runtime/transfer/transport.h"

namespace deltamesh {

struct ExpertServerOptions {
  std::string name{};
  uint64_t epoch = 0;
  std::string model_digest{};
  int64_t landing_bytes_max = int64_t{1} << 30;  // rows received and answers not yet sent, together
  int64_t queue_max = 256;                       // calls accepted and not yet answered
  bool compute_inline = false;                   // for tests: everything within the handler
};

struct ExpertServerStats {
  uint64_t arrived = 0;       // calls of any kind, also those refused later
  uint64_t calls = 0;         // answered with rows
  uint64_t rows = 0;          // received in those
  uint64_t expert_rows = 0;   // computed in those
  uint64_t malformed = 0;     // refused: does not parse, sizes or ids that cannot be
  uint64_t stale = 0;         // refused: another epoch or model
  uint64_t full = 0;          // refused: a bound was reached
  uint64_t corrupt = 0;       // refused: checksum
  uint64_t lost = 0;          // caller gone, or payload or answer did not get through
  int64_t queued = 0;         // accepted and not yet answered
  int64_t landing_bytes = 0;  // in use
};

class ExpertServer final : public MessageHandler {
 public:
  // Registers itself for kExpertDispatch. All pointers must outlive this object, and this object
  // the transport's activity. `set` holds only the experts served; `pool` is used by the compute
  // thread alone.
  ExpertServer(Transport* transport, const ExpertSet* set, ThreadPool* pool,
               ExpertServerOptions options);
  ~ExpertServer() override;

  // Finishes the running call and refuses all others; the transport is not used after it returned,
  // except to refuse what still arrives. Idempotent.
  void Stop();

  ExpertServerStats stats() const;

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override;
  void OnPeerLost(PeerId peer, const absl::Status& reason) override;

 private:
  struct Job;

  absl::StatusOr<std::shared_ptr<Job>> Accept(const Arrival& arrival);
  absl::Status Reserve(Job& job);
  void Landed(const std::shared_ptr<Job>& job, const absl::Status& status);
  void Loop();
  std::shared_ptr<Job> NextJob();  // null: stop
  void Run(const std::shared_ptr<Job>& job);
  void Answer(const std::shared_ptr<Job>& job);
  void Refuse(PeerId peer, uint64_t call_id, const std::string& caller, const absl::Status& status);
  void Lost(const Job& job, const absl::Status& reason);
  void Release(const Job& job);

  Transport* const transport_;
  const ExpertSet* const set_;
  const ExpertServerOptions options_;
  LocalExperts experts_;  // of the compute thread; inline: guarded by inline_mutex_
  std::mutex inline_mutex_;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::shared_ptr<Job>> queue_;  // payload landed, to be computed
  bool stop_ = false;
  ExpertServerStats stats_;
  std::thread thread_;
};

}  // namespace deltamesh
