// How connections of the UCX transport open and close.
//
// UCX pairs the endpoints of two processes by counting: the n-th that one makes to the other belongs to
// the n-th the other makes back. A hello names the endpoint it came through (`reply_ep`); the answering
// side makes endpoints until it has that one, and keeps the others for hellos that overtook each other.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "absl/strings/ascii.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_port.h"
#include "runtime/transfer/ucx_transport_impl.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {
namespace {

constexpr int kPairingTries = 8;      // endpoints made for one hello
constexpr size_t kUnclaimedMax = 16;  // beyond peers_max
constexpr size_t kArrivedMax = 256;   // waiting to be answered
constexpr size_t kReasonBytesMax = 256;
constexpr size_t kGreetingBytesMax = kUcxAddressBytesMax + 256;
constexpr std::chrono::milliseconds kWatchEvery{1000};

}  // namespace

// ---- opening ------------------------------------------------------------------------------------

absl::StatusOr<ucp_ep_h> UcxTransportImpl::CreateEndpoint(const UcxAddress& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.err_mode = options_.error_mode == UcxErrorMode::kPeer ? UCP_ERR_HANDLING_MODE_PEER
                                                               : UCP_ERR_HANDLING_MODE_NONE;
  params.err_handler.cb = &UcxTransportImpl::OnEndpointError;
  params.err_handler.arg = this;
  params.address = reinterpret_cast<const ucp_address_t*>(address.worker.data());
  ucp_ep_h ep = nullptr;
  const ucs_status_t status = ucp_ep_create(ucx_->worker(), &params, &ep);
  if (status == UCS_OK) return ep;
  return UcxError(absl::StrFormat("connecting to %s", address.host_port), status);
}

void UcxTransportImpl::SetDeadline(const PeerPtr& peer) {
  peer->deadline = Clock::now() + absl::ToChronoMilliseconds(options_.greeting_max);
  timed_.push_back(peer);
}

void UcxTransportImpl::StartConnect(PeerId id, const UcxAddress& address) {
  auto peer = std::make_shared<Peer>();
  peer->id = id;
  peer->name = address.host_port;
  peer->identity = address.identity;
  peer->nonce = RandomHex(16);
  absl::StatusOr<ucp_ep_h> ep = CreateEndpoint(address);
  if (!ep.ok()) {
    peers_[id] = peer;
    lost_.emplace_back(peer, ep.status());
    return;
  }
  peer->ep = *ep;
  Adopt(peer);
  SetDeadline(peer);
  SendControl(peer, UcxWirePrefix::kHello,
              EncodeUcxHello({.to = peer->identity, .nonce = peer->nonce, .address = address_}));
}

void UcxTransportImpl::SendControl(const PeerPtr& peer, uint16_t type, std::string_view bytes) {
  auto op = std::make_unique<SendOp>();
  op->transport = this;
  op->id = peer->id;
  const UcxWirePrefix prefix{.version = UcxWirePrefix::kVersion, .type = type};
  op->header.append(reinterpret_cast<const char*>(&prefix), sizeof(prefix));
  op->header.append(bytes);
  op->control = true;
  op->done = [](const absl::Status&) {};  // a failure shows at the endpoint
  ++outstanding_;
  PostNow(peer, std::move(op));
}

void UcxTransportImpl::Adopt(PeerPtr peer) {
  by_endpoint_[peer->ep] = peer;
  peers_[peer->id] = std::move(peer);
  peer_count_ = static_cast<int64_t>(peers_.size());
}

// ---- greetings ----------------------------------------------------------------------------------

void UcxTransportImpl::OnGreeting(ucp_ep_h ep, const PeerPtr& peer, uint16_t type,
                                  std::string_view bytes) {
  if (type == UcxWirePrefix::kWelcome && peer != nullptr) return OnWelcome(peer, bytes);
  if (type == UcxWirePrefix::kBye) return OnBye(peer, bytes);
  if (arrived_.size() >= kArrivedMax) {
    ++refused_;
    return;
  }
  const bool hello = type == UcxWirePrefix::kHello && bytes.size() <= kGreetingBytesMax;
  arrived_.push_back({ep, hello, hello ? std::string(bytes) : std::string()});
}

void UcxTransportImpl::OnWelcome(const PeerPtr& peer, std::string_view bytes) {
  const absl::StatusOr<UcxWelcome> welcome = DecodeUcxWelcome(bytes);
  const bool meant = welcome.ok() && !peer->nonce.empty() && welcome->nonce == peer->nonce &&
                     welcome->from == peer->identity;
  if (!meant) {
    ++refused_;
    lost_.emplace_back(peer, Unavailable("peer %s answered for another connection", peer->name));
    return;
  }
  if (peer->state != Peer::kGreeting) return;  // both sides said hello on one connection
  peer->state = Peer::kOpen;
  opened_.push_back(peer);
}

void UcxTransportImpl::OnBye(const PeerPtr& peer, std::string_view why) {
  if (peer == nullptr) return;  // both left at once
  std::string text(why.substr(0, kReasonBytesMax));
  for (char& c : text) c = absl::ascii_isprint(static_cast<unsigned char>(c)) ? c : '?';
  lost_.emplace_back(peer, Unavailable("peer %s: %s", peer->name, text));
}

bool UcxTransportImpl::HandleArrived() {
  if (arrived_.empty()) return false;
  while (!arrived_.empty()) {
    const Arrived arrived = std::move(arrived_.front());
    arrived_.pop_front();
    const absl::Status status = Answer(arrived);
    if (!status.ok()) Refuse(arrived.ep, status);
  }
  return true;
}

absl::Status UcxTransportImpl::Answer(const Arrived& arrived) {
  if (!arrived.is_hello) return InvalidArgument("a message before the connection is open");
  ASSIGN_OR_RETURN(const UcxHello hello, DecodeUcxHello(arrived.bytes));
  ASSIGN_OR_RETURN(const UcxAddress address, ParseUcxAddress(hello.address));
  const auto it = by_endpoint_.find(arrived.ep);
  PeerPtr peer = it == by_endpoint_.end() ? nullptr : it->second;
  if (peer != nullptr && peer->greeted)
    return InvalidArgument("a second hello from %s", peer->name);
  if (peer != nullptr && peer->identity != address.identity)
    return InvalidArgument("a hello of another process than %s", peer->name);
  // Counted by UCX's pairing even when it is turned away, so the endpoint is made first.
  if (peer == nullptr) {
    ASSIGN_OR_RETURN(peer, Claim(arrived.ep, address));
  }
  if (hello.to != identity_)
    return FailedPrecondition("%s means a process that listened here before", address.host_port);
  if (peer->state == Peer::kUnclaimed && static_cast<int64_t>(peers_.size()) >= options_.peers_max)
    return ResourceExhausted("%d connections, as many as allowed; raise --transport-peers",
                             peers_.size());
  if (peer->state == Peer::kUnclaimed) {
    peer->id = next_peer_++;
    Adopt(peer);
  }
  // Open already when both sides said hello and the other welcomed ours first.
  if (std::exchange(peer->state, Peer::kOpen) != Peer::kOpen) opened_.push_back(peer);
  peer->greeted = true;
  SendControl(peer, UcxWirePrefix::kWelcome,
              EncodeUcxWelcome({.from = identity_, .nonce = hello.nonce}));
  return absl::OkStatus();
}

// The endpoint `ep`, unclaimed, with an error handler of ours.
absl::StatusOr<UcxTransportImpl::PeerPtr> UcxTransportImpl::Claim(ucp_ep_h ep,
                                                                  const UcxAddress& address) {
  const size_t most = static_cast<size_t>(options_.peers_max) + kUnclaimedMax;
  for (int i = 0; i < kPairingTries && by_endpoint_.size() < most; ++i) {
    auto peer = std::make_shared<Peer>();
    ASSIGN_OR_RETURN(peer->ep, CreateEndpoint(address));
    peer->state = Peer::kUnclaimed;
    peer->name = address.host_port;
    peer->identity = address.identity;
    by_endpoint_[peer->ep] = peer;
    SetDeadline(peer);
    if (peer->ep == ep) return peer;
  }
  return Unavailable("no endpoint pairs with the hello of %s", address.host_port);
}

void UcxTransportImpl::Refuse(ucp_ep_h ep, const absl::Status& why) {
  ++refused_;
  LogWarning("ucx.refused", {{"reason", MessageOf(why)}});
  const auto it = by_endpoint_.find(ep);
  if (it == by_endpoint_.end()) return CloseEndpoint(ep);
  const PeerPtr peer = it->second;
  SendControl(peer, UcxWirePrefix::kBye, absl::StrFormat("it turned us away: %s", MessageOf(why)));
  Lose(peer, why);
}

// ---- failures and time --------------------------------------------------------------------------

bool UcxTransportImpl::HandleFailures() {
  const bool busy = !failures_.empty() || !lost_.empty();
  while (!failures_.empty()) {
    const auto [ep, status] = failures_.back();
    failures_.pop_back();
    const auto it = by_endpoint_.find(ep);
    if (it == by_endpoint_.end()) continue;
    const PeerPtr peer = it->second;
    absl::Status reason = UcxError(absl::StrFormat("peer %s", peer->name), status);
    if (peer->state == Peer::kGreeting) {
      reason = Unavailable("connecting to %s: %s; nobody answers there, or it turned us away",
                           peer->name, ucs_status_string(status));
    } else if (status == UCS_ERR_CONNECTION_RESET) {  // so an orderly close arrives
      reason = Unavailable("peer %s closed the connection", peer->name);
    }
    Lose(peer, reason);
  }
  for (const auto& [peer, reason] : std::exchange(lost_, {})) Lose(peer, reason);
  return busy;
}

bool UcxTransportImpl::HandleDeadlines() {
  if (timed_.empty()) return false;
  const Clock::time_point now = Clock::now();
  std::vector<PeerPtr> expired;
  std::erase_if(timed_, [&](const std::weak_ptr<Peer>& weak) {
    const PeerPtr peer = weak.lock();
    if (peer == nullptr || peer->ep == nullptr || peer->state == Peer::kOpen) return true;
    if (now < peer->deadline) return false;
    expired.push_back(peer);
    return true;
  });
  for (const PeerPtr& peer : expired) {
    Lose(peer,
         Unavailable("connecting to %s: no answer within %s; nobody listens there, or another "
                     "process than the address names",
                     peer->name, absl::FormatDuration(options_.greeting_max)));
  }
  return !expired.empty();
}

void UcxTransportImpl::WatchStrangers() {
  const Clock::time_point now = Clock::now();
  if (now < next_watch_) return;
  next_watch_ = now + kWatchEvery;
  const StrangerSweep sweep =
      CutStrangers(ucx_->port(), options_.stranger_silence, options_.strangers_max);
  if (sweep.cut > 0) {
    refused_ += static_cast<uint64_t>(sweep.cut);
    LogWarning("ucx.strangers", {{"cut", sweep.cut}, {"port", ucx_->port()}});
  }
  if (!sweep.listening && !std::exchange(port_lost_, true)) {
    LogError("ucx.port_lost",
             {{"port", ucx_->port()},
              {"effect", "no new peer can connect"},
              {"remedy", "restart this process with a higher limit of open files"}});
  }
}

// ---- closing ------------------------------------------------------------------------------------

// Closes with a word to the other side. When that cannot go out at once UCX's keepalive tells it, within
// a few of its intervals.
void UcxTransportImpl::Leave(const PeerPtr& peer, std::string_view why) {
  if (peer->state == Peer::kOpen) SendControl(peer, UcxWirePrefix::kBye, why);
  Close(peer, absl::OkStatus());
}

// Forgets the peer and closes its endpoint; operations on it complete with an error as UCX lets go of
// them, sends that wait for the welcome at once.
void UcxTransportImpl::Close(PeerPtr peer, const absl::Status& reason) {
  if (peer->id != 0) peers_.erase(peer->id);
  peer_count_ = static_cast<int64_t>(peers_.size());
  const absl::Status status =
      peer->closed_here ? Cancelled("disconnected from peer %s", peer->name) : reason;
  for (auto& op : std::exchange(peer->waiting, {})) FinishSend(op.release(), status);
  if (peer->ep == nullptr) return;
  by_endpoint_.erase(peer->ep);
  CloseEndpoint(std::exchange(peer->ep, nullptr));
}

void UcxTransportImpl::CloseEndpoint(ucp_ep_h ep) {
  // UCX may give the address to another endpoint from now on.
  std::erase_if(failures_, [ep](const auto& failure) { return failure.first == ep; });
  std::erase_if(arrived_, [ep](const Arrived& arrived) { return arrived.ep == ep; });
  ucp_request_param_t param{};
  if (options_.error_mode == UcxErrorMode::kPeer) {
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  }
  const ucs_status_ptr_t request = ucp_ep_close_nbx(ep, &param);
  if (UCS_PTR_IS_PTR(request)) closing_.push_back(request);
}

void UcxTransportImpl::Lose(const PeerPtr& peer, const absl::Status& reason) {
  const bool known = peer->id != 0 && peers_.contains(peer->id);
  Close(peer, reason);
  if (!known) return;
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

}  // namespace deltamesh
