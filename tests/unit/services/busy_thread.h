// A thread of an encode pool that is busy until the test lets it go.
#pragma once

#include <memory>

#include "absl/synchronization/notification.h"
#include "runtime/base/status.h"
#include "services/router/encode_pool.h"

namespace deltamesh {

class BusyThread {
 public:
  explicit BusyThread(EncodePool* pool) {
    const auto begun = std::make_shared<absl::Notification>();
    CHECK_OK(pool->Post([begun, release = release_] {
      begun->Notify();
      release->WaitForNotification();
    }));
    begun->WaitForNotification();
  }
  void Release() { release_->Notify(); }

 private:
  const std::shared_ptr<absl::Notification> release_ = std::make_shared<absl::Notification>();
};

}  // namespace deltamesh
