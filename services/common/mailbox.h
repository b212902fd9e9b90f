// A bounded inbox in front of the one thread that owns a role's core.
//
// Thread-safe. Producers never wait: a full or closed mailbox refuses and the producer decides what that
// means (a link is closed, a call is answered RESOURCE_EXHAUSTED).
#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace deltamesh {

template <typename T>
class Mailbox {
 public:
  explicit Mailbox(size_t capacity) : capacity_(capacity) {}

  // False when full or closed; `item` is still the caller's then.
  bool Push(T&& item) {
    absl::MutexLock lock(&mu_);
    if (closed_ || items_.size() >= capacity_) return false;
    items_.push_back(std::move(item));
    return true;
  }

  // Like Push, but ignores the capacity: for events that may not be lost and are bounded by what they
  // refer to (one per link, one per transfer). False only when closed.
  bool PushAlways(T item) {
    absl::MutexLock lock(&mu_);
    if (closed_) return false;
    items_.push_back(std::move(item));
    return true;
  }

  // Takes everything, waiting up to `wait` for the first item. Empty after the wait or once closed.
  std::deque<T> TakeAll(absl::Duration wait) {
    absl::MutexLock lock(&mu_);
    if (items_.empty() && wait > absl::ZeroDuration()) {
      mu_.AwaitWithTimeout(absl::Condition(this, &Mailbox::Ready), wait);
    }
    return std::exchange(items_, {});
  }

  // Wakes the reader; later pushes are refused, items already in stay.
  void Close() {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }

  bool closed() const {
    absl::MutexLock lock(&mu_);
    return closed_;
  }
  size_t size() const {
    absl::MutexLock lock(&mu_);
    return items_.size();
  }

 private:
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return closed_ || !items_.empty(); }

  const size_t capacity_;
  mutable absl::Mutex mu_;
  std::deque<T> items_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace deltamesh
