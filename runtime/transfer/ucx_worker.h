// A UCX context with one worker, and the descriptor its thread sleeps on. Frees all of it.
//
// No ucp_listener: a few stray bytes at its port end the process (UCX 1.13). Others connect to address().
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/transfer/ucx_transport.h"

namespace deltamesh {

struct UcxCallbacks {
  ucp_am_recv_callback_t on_message;
  void* arg;
};

// One thread at a time, except what sleeps and wakes.
class UcxWorker {
 public:
  // UCX listens at the first free of options.port to port_last; active messages of `am_id` go to the
  // callback.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Open(const UcxTransportOptions& options,
                                                         unsigned am_id,
                                                         const UcxCallbacks& callbacks);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h worker() const { return worker_; }
  int port() const { return port_; }                       // that UCX's tcp listens at
  const std::string& address() const { return address_; }  // what ucp_ep_create takes elsewhere
  int64_t header_bytes_max() const { return header_bytes_max_; }  // of an active message

  // Calls ucp_worker_progress until nothing happens or `enough`, at most `calls` times; whether anything
  // did.
  template <typename Enough>
  bool Progress(int calls, Enough enough) {
    bool busy = false;
    for (int i = 0; i < calls && ucp_worker_progress(worker_) != 0; ++i) {
      busy = true;
      if (enough()) break;
    }
    return busy;
  }
  // Whether the next event will show at the descriptor; false: some may be there already.
  bool Arm();
  // The transport's own thread: until an event, a Wake or `timeout_ms`. Any thread at any time.
  void Sleep(int timeout_ms);
  void Wake();
  void ClearWake();
  // Whether events end Sleep. Those that are there when it is turned on do.
  void ShowEventsToSleep(bool show);
  // The same for a thread that drives the worker: SleepDriving ends by an event or WakeDriver.
  void SleepDriving(std::chrono::nanoseconds timeout);
  void WakeDriver();

  // Afterwards UCX touches no memory of ours.
  void DestroyWorker();

 private:
  UcxWorker() = default;
  absl::Status OpenWorker(int port);
  absl::Status OpenAddress();
  absl::Status OpenHandler(unsigned am_id, const UcxCallbacks& callbacks);
  absl::Status OpenWakeup();

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int wake_fd_ = -1;
  int epoll_fd_ = -1;
  int worker_fd_ = -1;  // of the worker
  int driver_fd_ = -1;
  int port_ = 0;
  std::string address_;
  int64_t header_bytes_max_ = 0;
};

}  // namespace deltamesh
