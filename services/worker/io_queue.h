// Work that waits for a disk or a server, done by one thread in the order it was given, urgent work first.
// What follows from it is done by the thread that owns the queue, when it asks.
//
// Push, TakeFinished, RunOne and the rest belong to the owner; `work` runs on the queue's thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace deltamesh {

class IoQueue {
 public:
  using Finish = std::function<void()>;  // run by the owner
  using Work = std::function<Finish()>;

  // `bytes_max` bounds what waits and runs; urgent work is taken beyond it, so its owner bounds that.
  // `notify` is called on the queue's thread when something has finished; may be null. Without a thread,
  // RunOne does the work.
  IoQueue(int64_t bytes_max, bool thread, std::function<void()> notify);
  // Drops what waits and waits for what runs, which should look at stopping().
  ~IoQueue();

  // False when there is no room.
  bool Push(int64_t bytes, Work work) { return Add(bytes, std::move(work), false); }
  void PushUrgent(int64_t bytes, Work work) { Add(bytes, std::move(work), true); }

  std::vector<Finish> TakeFinished();
  // Without a thread: false when nothing waited.
  bool RunOne();

  bool stopping() const { return stop_; }
  int64_t bytes() const;  // of what waits and runs
  bool idle() const;      // nothing waits, runs or has finished

 private:
  struct Job {
    int64_t bytes;
    Work work;
  };

  bool Add(int64_t bytes, Work work, bool urgent);
  bool Take(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Do(Job job);
  void Loop();

  const int64_t bytes_max_;
  const std::function<void()> notify_;
  std::atomic<bool> stop_ = false;
  mutable absl::Mutex mu_;
  std::deque<Job> urgent_ ABSL_GUARDED_BY(mu_), waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<Finish> finished_ ABSL_GUARDED_BY(mu_);
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t running_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread thread_;
};

}  // namespace deltamesh
