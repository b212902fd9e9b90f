#include "runtime/transfer/ucx_worker.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_port.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {

namespace {

constexpr int kPortTries = 8;  // somebody may take a free port before UCX does

void Raise(int event_fd) {
  const uint64_t one = 1;
  CHECK(write(event_fd, &one, sizeof(one)) == sizeof(one), "eventfd: %s", std::strerror(errno));
}

void Clear(int event_fd) {
  uint64_t count;
  [[maybe_unused]] const auto n = read(event_fd, &count, sizeof(count));
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Open(const UcxTransportOptions& options,
                                                           unsigned am_id,
                                                           const UcxCallbacks& callbacks) {
  const int last = std::max(options.port, options.port_last);
  const int tries = options.port == 0 ? kPortTries : last - options.port + 1;
  absl::Status status;
  for (int i = 0; i < tries; ++i) {
    // UCX has one port for its data in its configuration, or takes any; knowing it allows to guard it.
    const absl::StatusOr<int> port =
        FindFreePort(options.host, options.port == 0 ? 0 : options.port + i);
    status = port.status();
    if (!port.ok()) continue;
    std::unique_ptr<UcxWorker> worker(new UcxWorker);
    status = worker->OpenWorker(*port);
    if (!status.ok()) continue;
    RETURN_IF_ERROR(worker->OpenAddress());
    RETURN_IF_ERROR(worker->OpenHandler(am_id, callbacks));
    RETURN_IF_ERROR(worker->OpenWakeup());
    return worker;
  }
  if (tries == 1) return status;
  return Annotate(status,
                  absl::StrFormat("no port of %s from %d to %d", options.host, options.port, last));
}

UcxWorker::~UcxWorker() {
  DestroyWorker();
  if (context_ != nullptr) ucp_cleanup(context_);
  if (epoll_fd_ >= 0) close(epoll_fd_);
  if (wake_fd_ >= 0) close(wake_fd_);
  if (driver_fd_ >= 0) close(driver_fd_);
}

absl::Status UcxWorker::OpenWorker(int port) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxError("UCX: reading the configuration (UCX_* variables)", status);
  const std::string range = absl::StrFormat("%d-%d", port, port);
  status = ucp_config_modify(config, "PORT_RANGE", range.c_str());
  // UCX goes on using a tcp connection of an endpoint that was closed by force. Puts would write memory
  // that was given back, and sends that keep the caller's memory would read it (and abort). So data comes as
  // messages, of which late ones are dropped, and what a socket does not take within the call that sends it
  // goes out of UCX's own buffers.
  if (status == UCS_OK) status = ucp_config_modify(config, "PUT_ENABLE", "n");
  if (status == UCS_OK) status = ucp_config_modify(config, "ZCOPY_THRESH", "inf");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (status == UCS_OK) status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) return UcxError("UCX: start; check UCX_TLS and UCX_NET_DEVICES", status);

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Made by one thread and used by another, never by two at once.
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) {
    return UcxError(
        absl::StrFormat("UCX: worker at port %d; check UCX_TLS and UCX_NET_DEVICES", port), status);
  }
  port_ = port;
  return absl::OkStatus();
}

absl::Status UcxWorker::OpenAddress() {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  ucs_status_t status = ucp_worker_query(worker_, &attributes);
  if (status != UCS_OK) return UcxError("UCX: worker attributes", status);
  header_bytes_max_ = static_cast<int64_t>(attributes.max_am_header);
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  status = ucp_worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) return UcxError("UCX: worker address", status);
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  ucp_worker_release_address(worker_, address);
  return absl::OkStatus();
}

absl::Status UcxWorker::OpenHandler(unsigned am_id, const UcxCallbacks& callbacks) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = am_id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = callbacks.on_message;
  handler.arg = callbacks.arg;
  const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_, &handler);
  return status == UCS_OK ? absl::OkStatus() : UcxError("UCX: active message handler", status);
}

absl::Status UcxWorker::OpenWakeup() {
  const ucs_status_t status = ucp_worker_get_efd(worker_, &worker_fd_);
  if (status != UCS_OK) return UcxError("UCX: event descriptor", status);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  driver_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  if (wake_fd_ < 0 || driver_fd_ < 0 || epoll_fd_ < 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, worker_fd_, &event) != 0 ||
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) != 0) {
    return Unavailable("transport: event descriptors: %s", std::strerror(errno));
  }
  return absl::OkStatus();
}

bool UcxWorker::Arm() {
  const ucs_status_t status = ucp_worker_arm(worker_);
  if (status == UCS_ERR_BUSY) return false;
  if (status != UCS_OK) LogError("ucx.arm", {{"error", ucs_status_string(status)}});
  return true;
}

void UcxWorker::Sleep(int timeout_ms) {
  epoll_event events[2];
  epoll_wait(epoll_fd_, events, 2, timeout_ms);
}

void UcxWorker::Wake() { Raise(wake_fd_); }

void UcxWorker::ClearWake() { Clear(wake_fd_); }

void UcxWorker::ShowEventsToSleep(bool show) {
  epoll_event event{};
  event.events = show ? EPOLLIN : 0;
  CHECK(epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, worker_fd_, &event) == 0, "epoll: %s",
        std::strerror(errno));
}

void UcxWorker::SleepDriving(std::chrono::nanoseconds timeout) {
  if (timeout.count() <= 0) return;
  pollfd fds[2] = {{.fd = worker_fd_, .events = POLLIN, .revents = 0},
                   {.fd = driver_fd_, .events = POLLIN, .revents = 0}};
  const timespec wait = {.tv_sec = timeout.count() / 1000000000,
                         .tv_nsec = timeout.count() % 1000000000};
  if (ppoll(fds, 2, &wait, nullptr) > 0 && fds[1].revents != 0) Clear(driver_fd_);
}

void UcxWorker::WakeDriver() { Raise(driver_fd_); }

void UcxWorker::DestroyWorker() {
  if (worker_ != nullptr) ucp_worker_destroy(std::exchange(worker_, nullptr));
}

}  // namespace deltamesh
