// A UCX context with one worker and one listener, and the descriptor its thread sleeps on. Frees all of it.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "runtime/transfer/ucx_transport.h"

namespace deltamesh {

struct UcxCallbacks {
  ucp_am_recv_callback_t on_message;
  ucp_listener_conn_callback_t on_connection;
  void* arg;
};

// One thread at a time, except Wake.
class UcxWorker {
 public:
  // Listens at options.host and port; active messages of `am_id` go to the callback.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Open(const UcxTransportOptions& options,
                                                         unsigned am_id,
                                                         const UcxCallbacks& callbacks);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h worker() const { return worker_; }
  ucp_listener_h listener() const { return listener_; }
  int port() const { return port_; }
  int64_t header_bytes_max() const { return header_bytes_max_; }  // of an active message

  // Calls ucp_worker_progress until nothing happens, at most `calls` times; whether anything did.
  bool Progress(int calls);
  // Until an event, a Wake or `timeout_ms`.
  void Sleep(int timeout_ms);
  void Wake();  // any thread
  void ClearWake();

  void StopListening();
  // Afterwards UCX touches no memory of ours.
  void DestroyWorker();

 private:
  UcxWorker() = default;
  absl::Status OpenWorker(unsigned am_id, const UcxCallbacks& callbacks);
  absl::Status OpenListener(const UcxTransportOptions& options, const UcxCallbacks& callbacks);
  absl::Status OpenWakeup();

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int wake_fd_ = -1;
  int epoll_fd_ = -1;
  int port_ = 0;
  int64_t header_bytes_max_ = 0;
};

}  // namespace deltamesh
