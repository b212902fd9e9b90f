// Decode workers that compute nothing: they register with a router, keep their leases and answer with tokens
// at a fixed pace, one message per step for all their sequences. What is left to measure is the router.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "services/common/link_client.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

struct StandInWorkersOptions {
  std::string router;  // gRPC address
  std::string text_digest;
  int64_t workers = 1;
  int64_t context_tokens = 1 << 20;
  absl::Duration token_gap = absl::Milliseconds(1);  // from one step to the next
};

class StandInWorkers {
 public:
  explicit StandInWorkers(const StandInWorkersOptions& options);
  ~StandInWorkers();
  StandInWorkers(const StandInWorkers&) = delete;
  StandInWorkers& operator=(const StandInWorkers&) = delete;

  int64_t registered() const;

 private:
  struct Answer {
    mesh::StartDecode start;
    int64_t next = 0;
  };
  struct Worker {
    explicit Worker(WorkerLinks of) : links(std::move(of)) {}

    std::unique_ptr<LinkClient> client;
    WorkerLinks links;
    LinkId link = 0;    // 0: not registered
    bool told = false;  // what it holds
    absl::Time step;    // the next one
    std::map<std::string, Answer> answers;
  };

  void OnOpened(size_t worker, LinkId link);
  void OnMessage(size_t worker, LinkId link, const mesh::RouterMessage& message);
  void Loop();
  // Queues what is due of one worker: its lease, its step.
  void QueueDue(Worker& worker, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static mesh::WorkerMessage Step(Worker& worker);

  const StandInWorkersOptions options_;
  mutable absl::Mutex mu_;
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace deltamesh
