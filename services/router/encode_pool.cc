#include "services/router/encode_pool.h"

#include <utility>

#include "runtime/base/status.h"
#include "services/common/retry_hint.h"

namespace deltamesh {

EncodePool::EncodePool(EncodePoolOptions options) : options_(options) {
  CHECK(options_.threads > 0 && options_.queue_max > 0, "an encode pool without room");
  for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Loop(); });
}

EncodePool::~EncodePool() {
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status EncodePool::Post(std::function<void()> job) {
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(jobs_.size()) >= options_.queue_max) {
    return WithRetryAfter(
        ResourceExhausted("%d large inputs wait to be tokenised, the router's bound; retry later",
                          jobs_.size()),
        kComeAgain);
  }
  jobs_.push_back(std::move(job));
  return absl::OkStatus();
}

void EncodePool::Loop() {
  while (true) {
    std::function<void()> job;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &EncodePool::Ready));
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace deltamesh
