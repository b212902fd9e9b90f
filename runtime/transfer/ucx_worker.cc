#include "runtime/transfer/ucx_worker.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Open(const UcxTransportOptions& options,
                                                           unsigned am_id,
                                                           const UcxCallbacks& callbacks) {
  std::unique_ptr<UcxWorker> worker(new UcxWorker);
  RETURN_IF_ERROR(worker->OpenWorker(am_id, callbacks));
  RETURN_IF_ERROR(worker->OpenWakeup());
  RETURN_IF_ERROR(worker->OpenListener(options, callbacks));
  return worker;
}

UcxWorker::~UcxWorker() {
  StopListening();
  DestroyWorker();
  if (context_ != nullptr) ucp_cleanup(context_);
  if (epoll_fd_ >= 0) close(epoll_fd_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

absl::Status UcxWorker::OpenWorker(unsigned am_id, const UcxCallbacks& callbacks) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxError("UCX: reading the configuration (UCX_* variables)", status);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) return UcxError("UCX: start; check UCX_TLS and UCX_NET_DEVICES", status);

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Made by one thread and used by another, never by two at once.
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) return UcxError("UCX: worker; check UCX_TLS and UCX_NET_DEVICES", status);

  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  status = ucp_worker_query(worker_, &attributes);
  if (status != UCS_OK) return UcxError("UCX: worker attributes", status);
  header_bytes_max_ = static_cast<int64_t>(attributes.max_am_header);

  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = am_id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = callbacks.on_message;
  handler.arg = callbacks.arg;
  status = ucp_worker_set_am_recv_handler(worker_, &handler);
  return status == UCS_OK ? absl::OkStatus() : UcxError("UCX: active message handler", status);
}

absl::Status UcxWorker::OpenListener(const UcxTransportOptions& options,
                                     const UcxCallbacks& callbacks) {
  const std::string wanted = FormatSocketAddress(options.host, options.port);
  ASSIGN_OR_RETURN(const SocketAddress socket_address, ParseSocketAddress(wanted));
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = socket_address.get();
  params.sockaddr.addrlen = socket_address.length;
  params.conn_handler.cb = callbacks.on_connection;
  params.conn_handler.arg = callbacks.arg;
  ucs_status_t status = ucp_listener_create(worker_, &params, &listener_);
  if (status != UCS_OK)
    return UcxError(absl::StrFormat("transport: listening at %s", wanted), status);
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(listener_, &attributes);
  if (status != UCS_OK) return UcxError("transport: the listener's port", status);
  port_ = PortOf(attributes.sockaddr);
  return absl::OkStatus();
}

absl::Status UcxWorker::OpenWakeup() {
  int worker_fd = -1;  // owned by the worker
  const ucs_status_t status = ucp_worker_get_efd(worker_, &worker_fd);
  if (status != UCS_OK) return UcxError("UCX: event descriptor", status);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  if (wake_fd_ < 0 || epoll_fd_ < 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, worker_fd, &event) != 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) != 0) {
    return Unavailable("transport: event descriptors: %s", std::strerror(errno));
  }
  return absl::OkStatus();
}

bool UcxWorker::Progress(int calls) {
  bool busy = false;
  for (int i = 0; i < calls && ucp_worker_progress(worker_) != 0; ++i) busy = true;
  return busy;
}

void UcxWorker::Sleep(int timeout_ms) {
  const ucs_status_t status = ucp_worker_arm(worker_);
  if (status == UCS_ERR_BUSY) return;  // events are waiting
  if (status != UCS_OK) LogError("ucx.arm", {{"error", ucs_status_string(status)}});
  epoll_event events[2];
  epoll_wait(epoll_fd_, events, 2, timeout_ms);
}

void UcxWorker::Wake() {
  const uint64_t one = 1;
  CHECK(write(wake_fd_, &one, sizeof(one)) == sizeof(one), "eventfd: %s", std::strerror(errno));
}

void UcxWorker::ClearWake() {
  uint64_t count;
  [[maybe_unused]] const auto n = read(wake_fd_, &count, sizeof(count));
}

void UcxWorker::StopListening() {
  if (listener_ != nullptr) ucp_listener_destroy(std::exchange(listener_, nullptr));
}

void UcxWorker::DestroyWorker() {
  if (worker_ != nullptr) ucp_worker_destroy(std::exchange(worker_, nullptr));
}

}  // namespace deltamesh
