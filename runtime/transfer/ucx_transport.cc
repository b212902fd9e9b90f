#include "runtime/transfer/ucx_transport.h"

#include <ucp/api/ucp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_util.h"
#include "runtime/transfer/ucx_worker.h"

namespace deltamesh {
namespace {

constexpr size_t kMessageTypes = 16;
constexpr unsigned kAmId = 1;
constexpr uint16_t kWireVersion = 1;
constexpr int kProgressPerRound = 256;  // calls between looks at the command queue
constexpr int kSleepMs = 1000;          // a missed wake-up costs at most this

// Before every message's own header.
struct WirePrefix {
  uint16_t version = kWireVersion;
  uint16_t type = 0;
};
static_assert(sizeof(WirePrefix) == 4);

using Done = std::function<void(absl::Status)>;

// A connection; lives as long as an operation on it does.
struct Peer {
  PeerId id = 0;
  ucp_ep_h ep = nullptr;
  std::string name;          // for messages
  bool closed_here = false;  // by Disconnect or the destructor, not by a failure
  bool lanes_seen = false;
};
using PeerPtr = std::shared_ptr<Peer>;
class UcxTransportImpl;

struct SendOp {
  UcxTransportImpl* transport = nullptr;
  PeerId id = 0;
  PeerPtr peer;
  std::string header;  // prefix and header; UCX reads it until completion
  std::span<const std::byte> payload;
  Done done;
};

struct ReceiveOp {
  UcxTransportImpl* transport = nullptr;
  PeerPtr peer;
  int64_t bytes = 0;
  PayloadDone done;
};

struct Command {
  enum Kind { kConnect, kDisconnect, kSend, kRefuse } kind = kSend;
  PeerId peer = 0;
  std::string address;
  std::unique_ptr<SendOp> send;
  absl::Status status;  // kRefuse: what `send` completes with
};

class UcxTransportImpl final : public UcxTransport {
 public:
  explicit UcxTransportImpl(UcxTransportOptions options) : options_(std::move(options)) {}
  ~UcxTransportImpl() override;

  absl::Status Open();

  std::string kind() const override { return "ucx"; }
  std::string address() const override { return address_; }
  std::string lanes() const override;
  int port() const override { return ucx_->port(); }
  TransportStats stats() const override;
  void SetHandler(MessageType type, MessageHandler* handler) override;
  absl::StatusOr<PeerId> Connect(std::string_view address) override;
  void Disconnect(PeerId peer) override;
  void Send(PeerId peer, MessageType type, std::string_view header,
            std::span<const std::byte> payload, Done done) override;

 private:
  void Push(Command command);

  // The progress thread.
  void Loop();
  bool RunCommands();  // true: there were some
  bool Housekeep();    // true: something was done
  void Shutdown();
  void Post(std::unique_ptr<SendOp> op);
  void FinishSend(SendOp* op, const absl::Status& status);
  void FinishReceive(ReceiveOp* op, ucs_status_t status);
  void StartConnect(PeerId id, const std::string& address);
  void Accept(ucp_conn_request_h request);
  void Adopt(PeerPtr peer);
  void Close(PeerPtr peer);
  void Lose(const PeerPtr& peer, const absl::Status& reason);
  void NoteLanes(Peer& peer);
  bool ReapClosed();
  ucp_ep_params_t EndpointParams();
  ucs_status_t OnActiveMessage(const void* header, size_t header_length, void* data, size_t length,
                               const ucp_am_recv_param_t* param);
  ucs_status_t Receive(const PeerPtr& peer, PayloadTarget target, void* data, size_t length,
                       bool rendezvous);

  static void OnSent(void* request, ucs_status_t status, void* op);
  static void OnReceived(void* request, ucs_status_t status, size_t length, void* op);
  static void OnEndpointError(void* self, ucp_ep_h ep, ucs_status_t status);
  static void OnConnection(ucp_conn_request_h request, void* self);

  const UcxTransportOptions options_;
  std::string address_;
  int64_t header_bytes_max_ = 0;
  std::unique_ptr<UcxWorker> ucx_;
  std::thread thread_;

  std::array<std::atomic<MessageHandler*>, kMessageTypes> handlers_{};
  std::atomic<PeerId> next_peer_{1};
  std::atomic<int64_t> outstanding_{0};
  std::atomic<int64_t> peer_count_{0};
  std::atomic<uint64_t> messages_sent_{0}, messages_received_{0}, bytes_sent_{0},
      bytes_received_{0}, dropped_{0};

  mutable std::mutex mutex_;
  std::deque<Command> commands_;  // guarded by mutex_
  bool awake_ = false;            // guarded by mutex_: a wake-up is under way
  bool stop_ = false;             // guarded by mutex_
  std::string lanes_;             // guarded by mutex_

  // Of the progress thread.
  std::unordered_map<PeerId, PeerPtr> peers_;
  std::unordered_map<ucp_ep_h, PeerPtr> by_endpoint_;
  std::vector<ucp_conn_request_h> requests_;
  std::vector<std::pair<ucp_ep_h, ucs_status_t>> failures_;
  std::vector<std::pair<PeerPtr, absl::Status>> lost_;  // never connected
  std::vector<void*> closing_;
  std::unordered_set<SendOp*> sends_;
  std::unordered_set<ReceiveOp*> receives_;
  bool stopping_ = false;
};

// ---- opening ------------------------------------------------------------------------------------

absl::Status UcxTransportImpl::Open() {
  if (options_.peers_max < 1 || options_.sends_max < 1 || options_.rendezvous_bytes < 1 ||
      options_.spin < 0) {
    return InvalidArgument(
        "transport: peers_max %d, sends_max %d, rendezvous_bytes %d must be at least 1, spin %d 0",
        options_.peers_max, options_.sends_max, options_.rendezvous_bytes, options_.spin);
  }
  UcxCallbacks callbacks{};
  callbacks.arg = this;
  callbacks.on_connection = &UcxTransportImpl::OnConnection;
  callbacks.on_message = [](void* self, const void* header, size_t header_length, void* data,
                            size_t length, const ucp_am_recv_param_t* param) {
    return static_cast<UcxTransportImpl*>(self)->OnActiveMessage(header, header_length, data,
                                                                 length, param);
  };
  ASSIGN_OR_RETURN(ucx_, UcxWorker::Open(options_, kAmId, callbacks));
  header_bytes_max_ = std::min<int64_t>(
      kHeaderBytesMax, ucx_->header_bytes_max() - static_cast<int64_t>(sizeof(WirePrefix)));
  address_ = FormatSocketAddress(
      options_.advertise_host.empty() ? options_.host : options_.advertise_host, ucx_->port());
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
  stats.peers = static_cast<uint64_t>(peer_count_.load());
  return stats;
}

void UcxTransportImpl::SetHandler(MessageType type, MessageHandler* handler) {
  CHECK(static_cast<size_t>(type) < kMessageTypes, "message type %d", static_cast<int>(type));
  handlers_[static_cast<size_t>(type)] = handler;
}

void UcxTransportImpl::Push(Command command) {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    wake = !std::exchange(awake_, true);
  }
  if (wake) ucx_->Wake();
}

absl::StatusOr<PeerId> UcxTransportImpl::Connect(std::string_view address) {
  RETURN_IF_ERROR(ParseSocketAddress(address).status());
  if (peer_count_ >= options_.peers_max) {
    return ResourceExhausted("transport: %d connections, as many as allowed; raise peers_max",
                             peer_count_.load());
  }
  Command command;
  command.kind = Command::kConnect;
  command.peer = next_peer_++;
  command.address = std::string(address);
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

void UcxTransportImpl::Send(PeerId peer, MessageType type, std::string_view header,
                            std::span<const std::byte> payload, Done done) {
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
    const WirePrefix prefix{kWireVersion, static_cast<uint16_t>(type)};
    op->header.reserve(sizeof(prefix) + header.size());
    op->header.append(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
    op->header.append(header);
  }
  command.send = std::move(op);
  Push(std::move(command));
}

// ---- the progress thread ------------------------------------------------------------------------

void UcxTransportImpl::Loop() {
  int idle = 0;
  while (true) {
    bool busy = RunCommands();
    if (stopping_) return Shutdown();
    busy |= ucx_->Progress(kProgressPerRound);
    busy |= Housekeep();
    if (busy) {
      idle = 0;
    } else if (idle++ >= options_.spin) {
      ucx_->Sleep(kSleepMs);
    }
  }
}

bool UcxTransportImpl::RunCommands() {
  std::deque<Command> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
    if (std::exchange(awake_, false)) ucx_->ClearWake();
    stopping_ = stop_;
  }
  for (Command& command : commands) {
    switch (command.kind) {
      case Command::kConnect:
        if (!stopping_) StartConnect(command.peer, command.address);
        break;
      case Command::kDisconnect:
        if (const auto it = peers_.find(command.peer); it != peers_.end()) {
          it->second->closed_here = true;
          Close(it->second);
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
  return !commands.empty();
}

bool UcxTransportImpl::Housekeep() {
  bool busy = false;
  for (const ucp_conn_request_h request : std::exchange(requests_, {})) {
    Accept(request);
    busy = true;
  }
  for (const auto& [endpoint, status] : std::exchange(failures_, {})) {
    const auto it = by_endpoint_.find(endpoint);
    if (it == by_endpoint_.end()) continue;
    const PeerPtr peer = it->second;
    // An orderly close arrives as a reset.
    Lose(peer, status == UCS_ERR_CONNECTION_RESET
                   ? Unavailable("peer %s closed the connection", peer->name)
                   : UcxError(absl::StrFormat("peer %s", peer->name), status));
    busy = true;
  }
  for (const auto& [peer, reason] : std::exchange(lost_, {})) {
    Lose(peer, reason);
    busy = true;
  }
  return ReapClosed() || busy;
}

ucp_ep_params_t UcxTransportImpl::EndpointParams() {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.err_mode = options_.error_mode == UcxErrorMode::kPeer ? UCP_ERR_HANDLING_MODE_PEER
                                                               : UCP_ERR_HANDLING_MODE_NONE;
  params.err_handler.cb = &UcxTransportImpl::OnEndpointError;
  params.err_handler.arg = this;
  return params;
}

void UcxTransportImpl::Adopt(PeerPtr peer) {
  by_endpoint_[peer->ep] = peer;
  peers_[peer->id] = std::move(peer);
  peer_count_ = static_cast<int64_t>(peers_.size());
}

void UcxTransportImpl::StartConnect(PeerId id, const std::string& address) {
  auto peer = std::make_shared<Peer>();
  peer->id = id;
  peer->name = address;
  const SocketAddress socket_address = *ParseSocketAddress(address);
  ucp_ep_params_t params = EndpointParams();
  params.field_mask |= UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = socket_address.get();
  params.sockaddr.addrlen = socket_address.length;
  const ucs_status_t status = ucp_ep_create(ucx_->worker(), &params, &peer->ep);
  if (status == UCS_OK) return Adopt(std::move(peer));
  peer->ep = nullptr;
  peers_[id] = peer;
  lost_.emplace_back(peer, UcxError(absl::StrFormat("connecting to %s", address), status));
}

void UcxTransportImpl::Accept(ucp_conn_request_h request) {
  if (static_cast<int64_t>(peers_.size()) >= options_.peers_max) {
    ++dropped_;
    LogWarning("ucx.peer_refused", {{"peers", peers_.size()}, {"remedy", "raise peers_max"}});
    ucp_listener_reject(ucx_->listener(), request);
    return;
  }
  auto peer = std::make_shared<Peer>();
  peer->id = next_peer_++;
  peer->name = absl::StrFormat("#%d", peer->id);
  ucp_ep_params_t params = EndpointParams();
  params.field_mask |= UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  const ucs_status_t status = ucp_ep_create(ucx_->worker(), &params, &peer->ep);
  if (status == UCS_OK) return Adopt(std::move(peer));
  ++dropped_;
  LogWarning("ucx.accept", {{"error", ucs_status_string(status)}});
}

// Forgets the peer and closes its endpoint; operations on it complete with an error as UCX lets go of them.
void UcxTransportImpl::Close(PeerPtr peer) {
  peers_.erase(peer->id);
  peer_count_ = static_cast<int64_t>(peers_.size());
  if (peer->ep == nullptr) return;
  by_endpoint_.erase(peer->ep);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(peer->ep, nullptr), &param);
  if (UCS_PTR_IS_PTR(request)) closing_.push_back(request);
}

void UcxTransportImpl::Lose(const PeerPtr& peer, const absl::Status& reason) {
  Close(peer);
  LogInfo("ucx.peer_lost", {{"peer", peer->name}, {"reason", MessageOf(reason)}});
  std::set<MessageHandler*> told;
  for (const auto& slot : handlers_) {
    MessageHandler* handler = slot;
    if (handler != nullptr && told.insert(handler).second) handler->OnPeerLost(peer->id, reason);
  }
}

bool UcxTransportImpl::ReapClosed() {
  return std::erase_if(closing_, [](void* request) {
           if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
           ucp_request_free(request);
           return true;
         }) > 0;
}

void UcxTransportImpl::NoteLanes(Peer& peer) {
  if (peer.lanes_seen || peer.ep == nullptr) return;
  peer.lanes_seen = true;
  char* text = nullptr;
  size_t size = 0;
  FILE* stream = open_memstream(&text, &size);
  if (stream == nullptr) return;
  ucp_ep_print_info(peer.ep, stream);
  fclose(stream);
  const std::string lanes = LanesOf({text, size});
  free(text);
  std::lock_guard lock(mutex_);
  if (lanes == lanes_) return;
  lanes_ = lanes;
  LogInfo("ucx.lanes", {{"peer", peer.name}, {"lanes", lanes}});
}

// ---- sending ------------------------------------------------------------------------------------

void UcxTransportImpl::Post(std::unique_ptr<SendOp> op) {
  const auto it = peers_.find(op->id);
  if (it == peers_.end() || it->second->ep == nullptr) {
    const PeerId id = op->id;
    return FinishSend(op.release(), Unavailable("peer %d is gone", id));
  }
  op->peer = it->second;
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
  if (UCS_PTR_IS_PTR(request)) return;  // OnSent follows
  OnSent(nullptr, UCS_PTR_RAW_STATUS(request), raw);
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
  if (status.ok()) {
    ++messages_sent_;
    bytes_sent_ += owned->payload.size();
  }
  owned->done(status);
}

// ---- receiving ----------------------------------------------------------------------------------

void UcxTransportImpl::OnConnection(ucp_conn_request_h request, void* self) {
  static_cast<UcxTransportImpl*>(self)->requests_.push_back(request);
}

void UcxTransportImpl::OnEndpointError(void* self, ucp_ep_h ep, ucs_status_t status) {
  static_cast<UcxTransportImpl*>(self)->failures_.emplace_back(ep, status);
}

ucs_status_t UcxTransportImpl::OnActiveMessage(const void* header, size_t header_length, void* data,
                                               size_t length, const ucp_am_recv_param_t* param) {
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const bool has_reply = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  const auto it = has_reply ? by_endpoint_.find(param->reply_ep) : by_endpoint_.end();
  WirePrefix prefix;
  if (it == by_endpoint_.end() || header_length < sizeof(prefix) ||
      static_cast<int64_t>(length) > options_.payload_bytes_max) {
    ++dropped_;
    return UCS_OK;
  }
  std::memcpy(&prefix, header, sizeof(prefix));
  MessageHandler* handler = prefix.version == kWireVersion && prefix.type < kMessageTypes
                                ? handlers_[prefix.type].load()
                                : nullptr;
  if (handler == nullptr) {
    ++dropped_;
    return UCS_OK;
  }
  const PeerPtr peer = it->second;
  Arrival arrival;
  arrival.peer = peer->id;
  arrival.type = static_cast<MessageType>(prefix.type);
  arrival.header = {static_cast<const char*>(header) + sizeof(prefix),
                    header_length - sizeof(prefix)};
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
  return Receive(peer, *std::move(target), data, length, rendezvous);
}

ucs_status_t UcxTransportImpl::Receive(const PeerPtr& peer, PayloadTarget target, void* data,
                                       size_t length, bool rendezvous) {
  auto* op = new ReceiveOp;
  op->transport = this;
  op->peer = peer;
  op->bytes = static_cast<int64_t>(length);
  op->done = std::move(target.done);
  receives_.insert(op);
  if (!rendezvous) {
    std::memcpy(target.buffer.data(), data, length);
    FinishReceive(op, UCS_OK);
    return UCS_OK;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = &UcxTransportImpl::OnReceived;
  param.user_data = op;
  const ucs_status_ptr_t request = ucp_am_recv_data_nbx(ucx_->worker(), data, target.buffer.data(),
                                                        target.buffer.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) FinishReceive(op, UCS_PTR_RAW_STATUS(request));
  return UCS_INPROGRESS;  // UCX owns the descriptor now
}

void UcxTransportImpl::OnReceived(void* request, ucs_status_t status, size_t, void* op) {
  ucp_request_free(request);
  auto* receive = static_cast<ReceiveOp*>(op);
  receive->transport->FinishReceive(receive, status);
}

void UcxTransportImpl::FinishReceive(ReceiveOp* op, ucs_status_t status) {
  std::unique_ptr<ReceiveOp> owned(op);
  receives_.erase(op);
  if (status == UCS_OK) {
    bytes_received_ += static_cast<uint64_t>(owned->bytes);
    return owned->done(absl::OkStatus());
  }
  owned->done(owned->peer->closed_here
                  ? Cancelled("disconnected from peer %s", owned->peer->name)
                  : UcxError(absl::StrFormat("payload from %s", owned->peer->name), status));
}

// ---- closing ------------------------------------------------------------------------------------

void UcxTransportImpl::Shutdown() {
  for (const ucp_conn_request_h request : std::exchange(requests_, {}))
    ucp_listener_reject(ucx_->listener(), request);
  ucx_->StopListening();
  while (!peers_.empty()) {
    const PeerPtr peer = peers_.begin()->second;
    peer->closed_here = true;
    Close(peer);
  }
  const auto deadline =
      std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(options_.shutdown_grace);
  while ((!closing_.empty() || !sends_.empty() || !receives_.empty()) &&
         std::chrono::steady_clock::now() < deadline) {
    if (!ucx_->Progress(1)) std::this_thread::sleep_for(std::chrono::microseconds(50));
    ReapClosed();
    RunCommands();  // completions may have sent more; every peer is gone, so these fail at once
  }
  if (!closing_.empty()) LogWarning("ucx.shutdown", {{"connections_left", closing_.size()}});
  ucx_->DestroyWorker();
  // Nothing can write or read any more, so what UCX never completed may be given back.
  const absl::Status cancelled = Cancelled("the transport was closed");
  while (!sends_.empty()) FinishSend(*sends_.begin(), cancelled);
  while (!receives_.empty()) {
    const auto op = *receives_.begin();
    receives_.erase(receives_.begin());
    op->done(cancelled);
    delete op;
  }
  while (RunCommands()) {
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::Create(
    const UcxTransportOptions& options) {
  auto transport = std::make_unique<UcxTransportImpl>(options);
  RETURN_IF_ERROR(transport->Open());
  return transport;
}

}  // namespace deltamesh
