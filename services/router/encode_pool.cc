#include "services/router/encode_pool.h"

#include <utility>

#include "runtime/base/status.h"
#include "services/common/retry_hint.h"

namespace deltamesh {

EncodePool::EncodePool(EncodePoolOptions options) : options_(options) {
  CHECK(options_.threads > 0 && options_.queue_max > 0 && options_.aside_max > 0,
        "an encode pool without room");
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
  return PostTo(jobs_, options_.queue_max, std::move(job));
}

absl::Status EncodePool::PostAside(std::function<void()> job) {
  return PostTo(asides_, options_.aside_max, std::move(job));
}

absl::Status EncodePool::PostTo(Jobs& jobs, int64_t most, std::function<void()> job) {
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(jobs.size()) >= most) {
    return WithRetryAfter(
        ResourceExhausted("%d large inputs wait to be tokenised, the router's bound; retry later",
                          jobs.size()),
        kComeAgain);
  }
  jobs.push_back(std::move(job));
  return absl::OkStatus();
}

void EncodePool::Loop() {
  while (true) {
    std::function<void()> job;
    bool aside = false;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &EncodePool::Ready));
      aside = TakesAside();
      if (jobs_.empty() && !aside) return;
      passed_over_ = aside || !AsideReady() ? 0 : passed_over_ + 1;
      Jobs& from = aside ? asides_ : jobs_;
      job = std::move(from.front());
      from.pop_front();
      asides_running_ += aside;
    }
    job();
    absl::MutexLock lock(&mu_);
    asides_running_ -= aside;
  }
}

}  // namespace deltamesh
