#include "runtime/transfer/return_watch.h"

#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int kLooks = 20;  // within the longest time

}  // namespace

ReturnWatch::ReturnWatch(std::string what, absl::Duration longest)
    : what_(std::move(what)), longest_(longest), thread_([this] { Loop(); }) {
  CHECK(longest > absl::ZeroDuration(), "a watch of %s", absl::FormatDuration(longest));
}

ReturnWatch::~ReturnWatch() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReturnWatch::Loop() {
  uint64_t seen = 0;
  int looks = 0;
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, absl::ToChronoNanoseconds(longest_ / kLooks),
                            [this] { return ended_; })) {
    const uint64_t now = edges_;
    looks = now == seen && now % 2 == 1 ? looks + 1 : 0;
    seen = now;
    CHECK(looks < kLooks, "%s has not come back for %s; the process ends, start it anew", what_,
          absl::FormatDuration(longest_));
  }
}

}  // namespace deltamesh
