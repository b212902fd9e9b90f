#include "runtime/transfer/ucx_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_port.h"
#include "runtime/transfer/ucx_transport_impl.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {
namespace {

constexpr unsigned kAmId = 1;
constexpr int kProgressPerRound = 256;               // calls between looks at the command queue
constexpr std::chrono::milliseconds kSleep{1000};    // a missed wake-up costs at most this
constexpr std::chrono::milliseconds kDriverWake{1};  // longest for one that waits to come in
constexpr std::chrono::milliseconds kWatch{20};      // the same while a deadline runs

}  // namespace

// ---- opening ------------------------------------------------------------------------------------

absl::Status UcxTransportImpl::Open() {
  if (options_.peers_max < 1 || options_.sends_max < 1 || options_.rendezvous_bytes < 1 ||
      options_.spin < absl::ZeroDuration()) {
    return InvalidArgument(
        "transport: peers_max %d, sends_max %d, rendezvous_bytes %d must be at least 1, spin %s 0",
        options_.peers_max, options_.sends_max, options_.rendezvous_bytes,
        absl::FormatDuration(options_.spin));
  }
  UcxCallbacks callbacks{};
  callbacks.arg = this;
  callbacks.on_message = [](void* self, const void* header, size_t header_length, void* data,
                            size_t length, const ucp_am_recv_param_t* param) {
    return static_cast<UcxTransportImpl*>(self)->OnActiveMessage(header, header_length, data,
                                                                 length, param);
  };
  ASSIGN_OR_RETURN(ucx_, UcxWorker::Open(options_, kAmId, callbacks));
  header_bytes_max_ = std::min<int64_t>(
      kHeaderBytesMax, ucx_->header_bytes_max() - static_cast<int64_t>(sizeof(UcxWirePrefix)));
  identity_ = RandomHex(32);
  address_ = FormatUcxAddress({
      .identity = identity_,
      .host_port = FormatSocketAddress(
          options_.advertise_host.empty() ? options_.host : options_.advertise_host, ucx_->port()),
      .worker = ucx_->address(),
  });
  RETURN_IF_ERROR(ParseUcxAddress(address_).status());  // UCX's part may be too long
  RaiseFileLimit();
  thread_ = std::thread([this] { Loop(); });
  return absl::OkStatus();
}

UcxTransportImpl::~UcxTransportImpl() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  Push({});
  thread_.join();
}

// ---- any thread ---------------------------------------------------------------------------------

std::string UcxTransportImpl::lanes() const {
  std::lock_guard lock(mutex_);
  return lanes_.empty() ? "not connected yet" : lanes_;
}

TransportStats UcxTransportImpl::stats() const {
  TransportStats stats;
  stats.messages_sent = messages_sent_;
  stats.messages_received = messages_received_;
  stats.bytes_sent = bytes_sent_;
  stats.bytes_received = bytes_received_;
  stats.dropped = dropped_;
  stats.refused = refused_;
  stats.peers = static_cast<uint64_t>(peer_count_.load());
  return stats;
}

void UcxTransportImpl::SetHandler(MessageType type, MessageHandler* handler) {
  CHECK(static_cast<size_t>(type) < kMessageTypes, "message type %d", static_cast<int>(type));
  handlers_[static_cast<size_t>(type)] = handler;
}

void UcxTransportImpl::Push(Command command) {
  const bool seen = holder_ == std::this_thread::get_id() && in_round_;
  std::lock_guard lock(mutex_);
  commands_.push_back(std::move(command));
  // Under the mutex: who takes the command must find the mark that it clears, or nobody ever sleeps again.
  if (!seen && !std::exchange(awake_, true)) ucx_->Wake();
}

absl::StatusOr<PeerId> UcxTransportImpl::Connect(std::string_view address) {
  ASSIGN_OR_RETURN(UcxAddress parsed, ParseUcxAddress(address));
  if (parsed.identity == identity_) {
    return InvalidArgument("transport address %s: it is this transport's own; name another",
                           parsed.host_port);
  }
  if (peer_count_ >= options_.peers_max) {
    return ResourceExhausted(
        "transport: %d connections, as many as allowed; raise --transport-peers",
        peer_count_.load());
  }
  Command command;
  command.kind = Command::kConnect;
  command.peer = next_peer_++;
  command.address = std::make_unique<const UcxAddress>(std::move(parsed));
  const PeerId id = command.peer;
  Push(std::move(command));
  return id;
}

void UcxTransportImpl::Disconnect(PeerId peer) {
  Command command;
  command.kind = Command::kDisconnect;
  command.peer = peer;
  Push(std::move(command));
}

UcxTransportImpl::Command UcxTransportImpl::MakeSend(PeerId peer, MessageType type,
                                                     std::string_view header,
                                                     std::span<const std::byte> payload,
                                                     Done done) {
  auto op = std::make_unique<SendOp>();
  op->transport = this;
  op->id = peer;
  op->payload = payload;
  op->done = std::move(done);
  Command command;
  const int64_t outstanding = outstanding_++;
  if (static_cast<int64_t>(header.size()) > header_bytes_max_ ||
      static_cast<int64_t>(payload.size()) > options_.payload_bytes_max) {
    command.kind = Command::kRefuse;
    command.status = InvalidArgument(
        "message: header of %d and payload of %d bytes; at most %d and %d", header.size(),
        payload.size(), header_bytes_max_, options_.payload_bytes_max);
  } else if (outstanding >= options_.sends_max) {
    command.kind = Command::kRefuse;
    command.status = ResourceExhausted(
        "transport: %d sends are outstanding, as many as allowed; wait for some", outstanding);
  } else {
    const UcxWirePrefix prefix{UcxWirePrefix::kVersion, static_cast<uint16_t>(type)};
    op->header.reserve(sizeof(prefix) + header.size());
    op->header.append(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
    op->header.append(header);
  }
  command.send = std::move(op);
  return command;
}

void UcxTransportImpl::Send(PeerId peer, MessageType type, std::string_view header,
                            std::span<const std::byte> payload, Done done) {
  Push(MakeSend(peer, type, header, payload, std::move(done)));
}

void UcxTransportImpl::SendHere(PeerId peer, MessageType type, std::string_view header,
                                std::span<const std::byte> payload, Done done) {
  Command command = MakeSend(peer, type, header, payload, std::move(done));
  if (command.kind != Command::kSend || !TryHold()) return Push(std::move(command));
  bool first;  // of what this thread asked for; its Connect may still be queued
  {
    std::lock_guard lock(mutex_);
    first = commands_.empty();
  }
  if (closed_ || !first) {
    LetGo();
    return Push(std::move(command));
  }
  const bool completed = Post(std::move(command.send));
  if (!completed || !failures_.empty() || !lost_.empty()) WakeOwnThread();
  LetGo();
  if (driver_sleeps_) Nudge();
}

// ---- holding the worker -------------------------------------------------------------------------

void UcxTransportImpl::Hold() {
  worker_mutex_.lock();
  holder_ = std::this_thread::get_id();
}

bool UcxTransportImpl::TryHold() {
  if (holder_ == std::this_thread::get_id() || !worker_mutex_.try_lock()) return false;
  holder_ = std::this_thread::get_id();
  return true;
}

void UcxTransportImpl::LetGo() {
  holder_ = std::thread::id();
  worker_mutex_.unlock();
}

void UcxTransportImpl::WakeOwnThread() { Push({}); }

void UcxTransportImpl::Nudge() { ucx_->WakeDriver(); }

// Leaves the worker unarmed: an event that was handled here and needs arming to show again has left its
// mark at the descriptor, which then wakes the progress thread for nothing. Only a failed Arm may have
// taken marks away.
bool UcxTransportImpl::Drive(absl::FunctionRef<bool()> enough, Clock::time_point deadline) {
  CHECK(holder_ != std::this_thread::get_id(), "a handler or completion must not drive");
  ++drivers_wanting_;
  Hold();
  --drivers_wanting_;
  if (driven_ || closed_) {
    LetGo();
    return false;
  }
  driven_ = true;
  ucx_->ShowEventsToSleep(false);
  auto spin_end = Clock::now() + absl::ToChronoNanoseconds(options_.spin);
  while (!closed_) {
    const bool busy = Round();
    if (enough() || stopping_) break;
    const auto now = Clock::now();
    if (now >= deadline) break;
    if (busy) continue;
    if (now < spin_end) {
      std::this_thread::yield();
      continue;
    }
    rearm_ = !ucx_->Arm();
    if (rearm_) continue;
    driver_sleeps_ = true;
    LetGo();
    ucx_->SleepDriving(std::min<std::chrono::nanoseconds>(deadline - now, sleep_time_.load()));
    Hold();
    driver_sleeps_ = false;
  }
  driven_ = false;
  if (!closed_) ucx_->ShowEventsToSleep(true);
  if (rearm_ || stopping_ || HasCommands()) WakeOwnThread();
  LetGo();
  return true;
}

// ---- the loop -----------------------------------------------------------------------------------

void UcxTransportImpl::Loop() {
  const auto spin = absl::ToChronoNanoseconds(options_.spin);
  Clock::time_point spin_end{};
  for (;;) {
    Hold();
    const bool busy = Round();
    if (stopping_) {
      Shutdown();
      closed_ = true;
      LetGo();
      return Nudge();
    }
    WatchStrangers();
    const auto now = Clock::now();
    if (busy) spin_end = now + spin;
    bool sleep = !busy && (driven_ || drivers_wanting_ > 0 || now >= spin_end);
    if (sleep && !driven_) {
      rearm_ = !ucx_->Arm();
      sleep = !rearm_;
    }
    LetGo();
    if (busy && driver_sleeps_) Nudge();
    LetDriversIn();
    if (sleep) {
      ucx_->Sleep(static_cast<int>(sleep_time_.load() / std::chrono::milliseconds(1)));
    } else if (!busy) {
      std::this_thread::yield();
    }
  }
}

// A mutex that is let go of and taken again at once hardly ever reaches whoever waits for it.
void UcxTransportImpl::LetDriversIn() {
  if (drivers_wanting_ == 0) return;
  const auto until = Clock::now() + kDriverWake;
  while (drivers_wanting_ > 0 && Clock::now() < until) std::this_thread::yield();
}

bool UcxTransportImpl::Round() {
  const ReturnWatch::Call call(watch_);
  in_round_ = true;
  bool busy = RunCommands();
  if (!stopping_) busy |= Look();
  in_round_ = false;
  return busy || HasCommands();
}

bool UcxTransportImpl::Look() {
  // What came from no connection names endpoints that UCX may free later on.
  bool busy = ucx_->Progress(kProgressPerRound, [this] { return !arrived_.empty(); });
  busy |= Housekeep();
  sleep_time_ = timed_.empty() ? kSleep : kWatch;
  return busy;
}

bool UcxTransportImpl::HasCommands() {
  std::lock_guard lock(mutex_);
  return !commands_.empty();
}

bool UcxTransportImpl::RunCommands() {
  running_.clear();
  {
    std::lock_guard lock(mutex_);
    running_.swap(commands_);
    if (std::exchange(awake_, false)) ucx_->ClearWake();
    stopping_ = stop_;
  }
  for (Command& command : running_) {
    switch (command.kind) {
      case Command::kConnect:
        if (!stopping_) StartConnect(command.peer, *command.address);
        break;
      case Command::kDisconnect:
        if (const auto it = peers_.find(command.peer); it != peers_.end()) {
          const PeerPtr peer = it->second;
          peer->closed_here = true;
          Leave(peer, "it closed the connection");
        }
        break;
      case Command::kSend:
        if (command.send != nullptr) Post(std::move(command.send));
        break;
      case Command::kRefuse:
        FinishSend(command.send.release(), command.status);
        break;
    }
  }
  return !running_.empty();
}

bool UcxTransportImpl::Housekeep() {
  bool busy = HandleArrived();
  for (const PeerPtr& peer : std::exchange(opened_, {})) {
    if (peer->ep == nullptr) continue;
    NoteLanes(*peer);
    for (auto& op : std::exchange(peer->waiting, {})) PostNow(peer, std::move(op));
    busy = true;
  }
  busy |= HandleFailures();
  busy |= HandleDeadlines();
  return ReapClosed() || busy;
}

// ---- sending ------------------------------------------------------------------------------------

bool UcxTransportImpl::Post(std::unique_ptr<SendOp> op) {
  const auto it = peers_.find(op->id);
  if (it == peers_.end() || it->second->ep == nullptr) {
    const PeerId id = op->id;
    FinishSend(op.release(), Unavailable("peer %d is gone", id));
    return true;
  }
  const PeerPtr peer = it->second;
  if (peer->state == Peer::kGreeting) {
    peer->waiting.push_back(std::move(op));
    return false;
  }
  return PostNow(peer, std::move(op));
}

bool UcxTransportImpl::PostNow(const PeerPtr& peer, std::unique_ptr<SendOp> op) {
  op->peer = peer;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = &UcxTransportImpl::OnSent;
  param.user_data = op.get();
  const bool rendezvous = static_cast<int64_t>(op->payload.size()) >= options_.rendezvous_bytes;
  param.flags =
      UCP_AM_SEND_FLAG_REPLY | (rendezvous ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER);
  SendOp* raw = op.release();
  sends_.insert(raw);
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(raw->peer->ep, kAmId, raw->header.data(), raw->header.size(),
                      raw->payload.data(), raw->payload.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return false;  // OnSent follows
  OnSent(nullptr, UCS_PTR_RAW_STATUS(request), raw);
  return true;
}

void UcxTransportImpl::OnSent(void* request, ucs_status_t status, void* op) {
  auto* send = static_cast<SendOp*>(op);
  if (request != nullptr) ucp_request_free(request);
  absl::Status result;
  if (status != UCS_OK) {
    result = send->peer->closed_here
                 ? Cancelled("disconnected from peer %s", send->peer->name)
                 : UcxError(absl::StrFormat("peer %s", send->peer->name), status);
  }
  send->transport->FinishSend(send, result);
}

void UcxTransportImpl::FinishSend(SendOp* op, const absl::Status& status) {
  std::unique_ptr<SendOp> owned(op);
  sends_.erase(op);
  --outstanding_;
  if (status.ok() && !owned->control) {
    ++messages_sent_;
    bytes_sent_ += owned->payload.size();
  }
  owned->done(status);
}

// ---- receiving ----------------------------------------------------------------------------------

void UcxTransportImpl::OnEndpointError(void* self, ucp_ep_h ep, ucs_status_t status) {
  static_cast<UcxTransportImpl*>(self)->failures_.emplace_back(ep, status);
}

ucs_status_t UcxTransportImpl::OnActiveMessage(const void* header, size_t header_length, void* data,
                                               size_t length, const ucp_am_recv_param_t* param) {
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const bool has_reply = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  if (!has_reply) {
    ++dropped_;
    return UCS_OK;
  }
  UcxWirePrefix prefix{.version = 0};
  const size_t prefix_bytes = std::min(header_length, sizeof(prefix));
  std::memcpy(&prefix, header, prefix_bytes);
  const std::string_view rest{static_cast<const char*>(header) + prefix_bytes,
                              header_length - prefix_bytes};
  const auto it = by_endpoint_.find(param->reply_ep);
  const PeerPtr peer = it == by_endpoint_.end() ? nullptr : it->second;
  const bool known = prefix_bytes == sizeof(prefix) && prefix.version == UcxWirePrefix::kVersion;
  const bool greets =
      known && prefix.type >= UcxWirePrefix::kHello && prefix.type <= UcxWirePrefix::kBye;
  if (peer == nullptr || peer->state != Peer::kOpen || greets) {
    OnGreeting(param->reply_ep, peer, greets && length == 0 ? prefix.type : uint16_t{0}, rest);
    return UCS_OK;
  }
  MessageHandler* handler =
      known && prefix.type < kMessageTypes ? handlers_[prefix.type].load() : nullptr;
  if (handler == nullptr || static_cast<int64_t>(length) > options_.payload_bytes_max) {
    ++dropped_;
    return UCS_OK;
  }
  Arrival arrival;
  arrival.peer = peer->id;
  arrival.type = static_cast<MessageType>(prefix.type);
  arrival.header = rest;
  arrival.payload_bytes = static_cast<int64_t>(length);
  absl::StatusOr<PayloadTarget> target = handler->OnMessage(arrival);
  if (target.ok() && length > 0) {
    target = FittingTarget(*std::move(target), arrival.payload_bytes);
  }
  if (!target.ok()) {
    ++dropped_;
    return UCS_OK;
  }
  ++messages_received_;
  NoteLanes(*peer);
  if (length == 0) return UCS_OK;
  if (rendezvous) return Receive(peer, *std::move(target), data);
  Land(*target, LandPayload(*target, {static_cast<const std::byte*>(data), length}));
  return UCS_OK;
}

// `status` of a payload that is in place, or of one that did not come.
void UcxTransportImpl::Land(const PayloadTarget& target, const absl::Status& status) {
  if (status.ok()) bytes_received_ += target.buffer.size();
  target.done(status);
}

// By rendezvous: UCX owns the descriptor `data` from now on.
ucs_status_t UcxTransportImpl::Receive(const PeerPtr& peer, PayloadTarget target, void* data) {
  auto* op = new ReceiveOp{.transport = this, .peer = peer, .target = std::move(target)};
  receives_.insert(op);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = &UcxTransportImpl::OnReceived;
  param.user_data = op;
  const std::span<std::byte> buffer = op->target.buffer;
  const ucs_status_ptr_t request =
      ucp_am_recv_data_nbx(ucx_->worker(), data, buffer.data(), buffer.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) FinishReceive(op, UCS_PTR_RAW_STATUS(request));
  return UCS_INPROGRESS;
}

void UcxTransportImpl::OnReceived(void* request, ucs_status_t status, size_t, void* op) {
  ucp_request_free(request);
  auto* receive = static_cast<ReceiveOp*>(op);
  receive->transport->FinishReceive(receive, status);
}

void UcxTransportImpl::FinishReceive(ReceiveOp* op, ucs_status_t status) {
  const std::unique_ptr<ReceiveOp> owned(op);
  receives_.erase(op);
  const PayloadTarget& target = owned->target;
  if (status == UCS_OK) return Land(target, CheckPayload(target, target.buffer));
  Land(target, owned->peer->closed_here
                   ? Cancelled("disconnected from peer %s", owned->peer->name)
                   : UcxError(absl::StrFormat("payload from %s", owned->peer->name), status));
}

// ---- closing ------------------------------------------------------------------------------------

void UcxTransportImpl::Shutdown() {
  while (!by_endpoint_.empty()) {
    const PeerPtr peer = by_endpoint_.begin()->second;
    peer->closed_here = true;
    Leave(peer, "it closed the connection");
  }
  peers_.clear();  // those without an endpoint
  const auto deadline =
      std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(options_.shutdown_grace);
  while ((!closing_.empty() || !sends_.empty() || !receives_.empty()) &&
         std::chrono::steady_clock::now() < deadline) {
    bool busy;
    {
      const ReturnWatch::Call call(watch_);
      busy = ucx_->Progress(1, [] { return true; });
    }
    if (!busy) std::this_thread::sleep_for(std::chrono::microseconds(50));
    ReapClosed();
    RunCommands();  // completions may have sent more; every peer is gone, so these fail at once
  }
  if (!closing_.empty()) LogWarning("ucx.shutdown", {{"connections_left", closing_.size()}});
  {
    const ReturnWatch::Call call(watch_);
    ucx_->DestroyWorker();
  }
  // Nothing can write or read any more, so what UCX never completed may be given back.
  const absl::Status cancelled = Cancelled("the transport was closed");
  while (!sends_.empty()) FinishSend(*sends_.begin(), cancelled);
  while (!receives_.empty()) {
    const auto op = *receives_.begin();
    receives_.erase(receives_.begin());
    op->target.done(cancelled);
    delete op;
  }
  while (RunCommands()) {
  }
}

absl::StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::Create(
    const UcxTransportOptions& options) {
  auto transport = std::make_unique<UcxTransportImpl>(options);
  RETURN_IF_ERROR(transport->Open());
  return transport;
}

}  // namespace deltamesh
