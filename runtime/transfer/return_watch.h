// Ends the process when a call into a library does not come back.
//
// Time is counted in looks at which the same call was under way, so a process that was stopped, or got no
// CPU, is not taken for one that hangs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace deltamesh {

class ReturnWatch {
 public:
  // `what` names the calls in the last message. `longest` must be above zero.
  ReturnWatch(std::string what, absl::Duration longest);
  ~ReturnWatch();
  ReturnWatch(const ReturnWatch&) = delete;
  ReturnWatch& operator=(const ReturnWatch&) = delete;

  // Lives as long as one call; one at a time, on any thread.
  class Call {
   public:
    explicit Call(ReturnWatch& watch) : edges_(watch.edges_) { ++edges_; }
    ~Call() { ++edges_; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    std::atomic<uint64_t>& edges_;
  };

 private:
  void Loop();

  const std::string what_;
  const absl::Duration longest_;
  std::atomic<uint64_t> edges_{0};  // begins and ends of calls; odd: within one
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace deltamesh
