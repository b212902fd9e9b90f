#include "services/worker/io_queue.h"

#include <utility>

namespace deltamesh {

IoQueue::IoQueue(int64_t bytes_max, bool thread, std::function<void()> notify)
    : bytes_max_(bytes_max), notify_(std::move(notify)) {
  if (thread) thread_ = std::thread([this] { Loop(); });
}

IoQueue::~IoQueue() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

bool IoQueue::Add(int64_t bytes, Work work, bool urgent) {
  absl::MutexLock lock(&mu_);
  if (!urgent && bytes_ > 0 && bytes_ + bytes > bytes_max_) return false;
  bytes_ += bytes;
  (urgent ? urgent_ : waiting_).push_back({bytes, std::move(work)});
  return true;
}

bool IoQueue::Take(Job* job) {
  std::deque<Job>& from = urgent_.empty() ? waiting_ : urgent_;
  if (from.empty()) return false;
  *job = std::move(from.front());
  from.pop_front();
  ++running_;
  return true;
}

void IoQueue::Do(Job job) {
  Finish finish = job.work();
  job.work = nullptr;  // lets go of the memory it held
  absl::MutexLock lock(&mu_);
  bytes_ -= job.bytes;
  --running_;
  finished_.push_back(std::move(finish));
}

void IoQueue::Loop() {
  for (;;) {
    Job job;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(
          +[](IoQueue* q) ABSL_EXCLUSIVE_LOCKS_REQUIRED(q->mu_) {
            return q->stop_ || !q->urgent_.empty() || !q->waiting_.empty();
          },
          this));
      if (stop_ || !Take(&job)) return;
    }
    Do(std::move(job));
    if (notify_) notify_();
  }
}

bool IoQueue::RunOne() {
  Job job;
  {
    absl::MutexLock lock(&mu_);
    if (!Take(&job)) return false;
  }
  Do(std::move(job));
  return true;
}

std::vector<IoQueue::Finish> IoQueue::TakeFinished() {
  absl::MutexLock lock(&mu_);
  return std::exchange(finished_, {});
}

int64_t IoQueue::bytes() const {
  absl::MutexLock lock(&mu_);
  return bytes_;
}

bool IoQueue::idle() const {
  absl::MutexLock lock(&mu_);
  return urgent_.empty() && waiting_.empty() && running_ == 0 && finished_.empty();
}

}  // namespace deltamesh
