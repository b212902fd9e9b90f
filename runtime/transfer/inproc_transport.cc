#include "runtime/transfer/inproc_transport.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/base/random.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr size_t kMessageTypes = 16;
using Done = std::function<void(absl::Status)>;
using Calls = std::vector<std::function<void()>>;

void Run(const Calls& calls) {
  for (const auto& call : calls) call();
}

// One transport as the network sees it. Guarded by the network's mutex.
struct Node {
  struct Remote {
    std::shared_ptr<Node> node;  // null: nobody was there
    PeerId id = 0;               // this node as the remote knows it
  };
  std::string address;
  bool dead = false;
  int active = 0;  // handler calls running on other threads' behalf
  std::array<MessageHandler*, kMessageTypes> handlers{};
  std::map<PeerId, Remote> peers;
  TransportStats stats;
};

// One queued step: a message to hand over, a payload to land, or a notice.
struct Step {
  std::shared_ptr<Node> from, to;
  PeerId from_peer = 0, to_peer = 0;  // the connection as each end knows it
  MessageType type{};
  std::string header;
  std::span<const std::byte> payload;
  std::shared_ptr<std::vector<std::byte>>
      copy;  // backs `payload` when it differs from the sender's memory
  bool fail_payload = false;
  Done sent;                            // null for a second delivery
  std::optional<PayloadTarget> target;  // set: the landing step
  std::function<void()> notice;         // set: only this is run
};

}  // namespace

struct InprocNetwork::Impl {
  explicit Impl(InprocOptions o) : options(o), random(o.seed) {}

  const InprocOptions options;
  mutable std::mutex mutex;
  std::condition_variable idle;
  SeededEntropy random;
  std::map<std::string, std::shared_ptr<Node>, std::less<>> nodes;
  std::deque<Step> queue;
  std::function<InprocFault(const InprocMessage&)> fault;
  std::array<int64_t, kMessageTypes> numbers{};
  PeerId next_peer = 1;

  bool queued_mode() const { return options.delivery == InprocDelivery::kQueued; }

  void Submit(Step step, const InprocFault& f);
  void Hand(Step step);
  void Land(Step step);
  void Execute(Step step);
  void Post(std::function<void()> notice);
  InprocFault Fate(const Step& step);
  bool Connected(const Step& step) const;
  void Cut(const std::shared_ptr<Node>& node, PeerId peer, const absl::Status& here,
           const absl::Status& there, bool notify_there, Calls& calls);
  void Leave(const std::shared_ptr<Node>& node);
};

namespace {

// Calls of OnPeerLost, one per distinct handler of `node`.
void AddLost(const std::shared_ptr<Node>& node, PeerId peer, const absl::Status& reason,
             Calls& calls) {
  std::vector<MessageHandler*> seen;
  for (MessageHandler* handler : node->handlers) {
    if (handler == nullptr || std::find(seen.begin(), seen.end(), handler) != seen.end()) continue;
    seen.push_back(handler);
    calls.push_back([handler, peer, reason] { handler->OnPeerLost(peer, reason); });
  }
}

void Flip(std::byte* data, size_t size, int64_t offset, uint8_t mask) {
  if (offset >= 0 && size > 0) data[static_cast<size_t>(offset) % size] ^= std::byte{mask};
}

void ApplyFault(const InprocFault& f, Step& step) {
  Flip(reinterpret_cast<std::byte*>(step.header.data()), step.header.size(), f.flip_header_byte,
       f.flip_mask);
  step.fail_payload = f.fail_payload;
  if ((f.flip_payload_byte >= 0 || f.duplicate) && !step.payload.empty()) {
    step.copy = std::make_shared<std::vector<std::byte>>(step.payload.begin(), step.payload.end());
    Flip(step.copy->data(), step.copy->size(), f.flip_payload_byte, f.flip_mask);
    step.payload = *step.copy;
  }
}

}  // namespace

InprocFault InprocNetwork::Impl::Fate(const Step& step) {
  std::function<InprocFault(const InprocMessage&)> hook;
  InprocMessage message{step.from->address,
                        step.to->address,
                        step.type,
                        step.header,
                        static_cast<int64_t>(step.payload.size()),
                        0};
  {
    std::lock_guard lock(mutex);
    message.number = numbers[static_cast<size_t>(step.type) % kMessageTypes]++;
    hook = fault;
  }
  return hook ? hook(message) : InprocFault{};
}

void InprocNetwork::Impl::Submit(Step step, const InprocFault& f) {
  if (f.drop) {
    Done sent = std::move(step.sent);
    return Post([sent = std::move(sent)] { sent(absl::OkStatus()); });
  }
  ApplyFault(f, step);
  Step second;
  if (f.duplicate) {
    second = step;
    second.sent = nullptr;
  }
  if (queued_mode()) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(step));
    if (f.duplicate) queue.push_back(std::move(second));
    return;
  }
  Hand(std::move(step));
  if (f.duplicate) Hand(std::move(second));
}

// Runs a notice now (inline) or as a step of its own.
void InprocNetwork::Impl::Post(std::function<void()> notice) {
  if (!queued_mode()) return notice();
  Step step;
  step.notice = std::move(notice);
  std::lock_guard lock(mutex);
  queue.push_back(std::move(step));
}

bool InprocNetwork::Impl::Connected(const Step& step) const {
  return !step.to->dead && !step.from->dead && step.to->peers.contains(step.to_peer);
}

// The receiver's handler decides; a payload then lands at once (inline) or in a step of its own.
void InprocNetwork::Impl::Hand(Step step) {
  MessageHandler* handler = nullptr;
  bool connected;
  {
    std::lock_guard lock(mutex);
    connected = Connected(step);
    if (connected) {
      handler = step.to->handlers[static_cast<size_t>(step.type) % kMessageTypes];
      if (handler == nullptr) ++step.to->stats.dropped;
      ++step.to->active;
    }
  }
  if (!connected) {
    if (step.sent) step.sent(Unavailable("peer %s is gone", step.to->address));
    return;
  }
  absl::StatusOr<PayloadTarget> target = absl::CancelledError("no handler");
  if (handler != nullptr) {
    target = handler->OnMessage(
        {step.to_peer, step.type, step.header, static_cast<int64_t>(step.payload.size())});
  }
  if (target.ok() && !step.payload.empty()) {
    target = FittingTarget(*std::move(target), static_cast<int64_t>(step.payload.size()));
  }
  const bool accepted = target.ok();
  const bool lands = accepted && !step.payload.empty();
  {
    std::lock_guard lock(mutex);
    TransportStats& stats = step.to->stats;
    if (handler != nullptr && !accepted) ++stats.dropped;
    if (accepted) ++stats.messages_received;
    if (!lands || queued_mode()) {
      if (--step.to->active == 0) idle.notify_all();
    }
  }
  if (!lands) {
    if (step.sent) step.sent(absl::OkStatus());
    return;
  }
  step.target = *std::move(target);
  if (!queued_mode()) {
    std::shared_ptr<Node> to = step.to;
    Land(std::move(step));
    std::lock_guard lock(mutex);
    if (--to->active == 0) idle.notify_all();
    return;
  }
  {
    std::lock_guard lock(mutex);
    connected = Connected(step);  // the handler may have cut the connection
    if (connected) {
      queue.push_back(std::move(step));
      return;
    }
  }
  step.target->done(Unavailable("connection closed"));
  if (step.sent) step.sent(Unavailable("peer %s is gone", step.to->address));
}

void InprocNetwork::Impl::Land(Step step) {
  if (step.fail_payload) {
    step.target->done(Unavailable("payload failed to arrive"));
  } else {
    const absl::Status status = LandPayload(*step.target, step.payload);
    if (status.ok()) {
      std::lock_guard lock(mutex);
      step.to->stats.bytes_received += step.payload.size();
    }
    step.target->done(status);
  }
  if (step.sent) step.sent(absl::OkStatus());
}

void InprocNetwork::Impl::Execute(Step step) {
  if (step.notice) return step.notice();
  if (step.target) return Land(std::move(step));
  Hand(std::move(step));
}

// Ends one connection. Adds what must be called once the mutex is released. Caller holds the mutex.
void InprocNetwork::Impl::Cut(const std::shared_ptr<Node>& node, PeerId peer,
                              const absl::Status& here, const absl::Status& there,
                              bool notify_there, Calls& calls) {
  const auto it = node->peers.find(peer);
  if (it == node->peers.end()) return;
  const Node::Remote remote = it->second;
  node->peers.erase(it);
  node->stats.peers = node->peers.size();

  std::deque<Step> keep;
  for (Step& step : queue) {
    const bool ours = !step.notice && ((step.from == node && step.from_peer == peer) ||
                                       (step.to == node && step.to_peer == peer));
    if (!ours) {
      keep.push_back(std::move(step));
      continue;
    }
    const bool from_here = step.from == node && step.from_peer == peer;
    if (step.target) {
      calls.push_back(
          [done = std::move(step.target->done), s = from_here ? there : here] { done(s); });
    }
    if (step.sent) {
      calls.push_back([sent = std::move(step.sent), s = from_here ? here : there] { sent(s); });
    }
  }
  queue = std::move(keep);

  if (remote.node == nullptr) return;
  remote.node->peers.erase(remote.id);
  remote.node->stats.peers = remote.node->peers.size();
  if (notify_there) AddLost(remote.node, remote.id, there, calls);
}

// Cuts all connections of a transport that is being destroyed and waits for calls into its
// handlers.
void InprocNetwork::Impl::Leave(const std::shared_ptr<Node>& node) {
  Calls calls;
  {
    std::lock_guard lock(mutex);
    while (!node->peers.empty()) {
      Cut(node, node->peers.begin()->first, Cancelled("transport %s was closed", node->address),
          Unavailable("peer %s closed the connection", node->address), true, calls);
    }
    node->dead = true;
    const auto it = nodes.find(node->address);
    if (it != nodes.end() && it->second == node) nodes.erase(it);
  }
  Run(calls);
  std::unique_lock lock(mutex);
  idle.wait(lock, [&] { return node->active == 0; });
  node->handlers.fill(nullptr);
}

namespace {

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<InprocNetwork::Impl> network, std::shared_ptr<Node> node)
      : network_(std::move(network)), node_(std::move(node)) {}
  ~InprocTransport() override { network_->Leave(node_); }

  std::string kind() const override { return "inproc"; }
  std::string address() const override { return node_->address; }
  std::string lanes() const override { return "memcpy"; }

  void SetHandler(MessageType type, MessageHandler* handler) override {
    CHECK(static_cast<size_t>(type) < kMessageTypes, "message type %d", static_cast<int>(type));
    std::lock_guard lock(network_->mutex);
    node_->handlers[static_cast<size_t>(type)] = handler;
  }

  absl::StatusOr<PeerId> Connect(std::string_view address) override;
  void Disconnect(PeerId peer) override;
  void Send(PeerId peer, MessageType type, std::string_view header,
            std::span<const std::byte> payload, Done done) override;

  TransportStats stats() const override {
    std::lock_guard lock(network_->mutex);
    return node_->stats;
  }

 private:
  const std::shared_ptr<InprocNetwork::Impl> network_;
  const std::shared_ptr<Node> node_;
};

absl::StatusOr<PeerId> InprocTransport::Connect(std::string_view address) {
  std::lock_guard lock(network_->mutex);
  const PeerId here = network_->next_peer++;
  const auto it = network_->nodes.find(address);
  const bool found = it != network_->nodes.end() && !it->second->dead && !node_->dead;
  Node::Remote remote;
  if (found) {
    remote = {it->second, network_->next_peer++};
    remote.node->peers[remote.id] = {node_, here};
    remote.node->stats.peers = remote.node->peers.size();
  }
  node_->peers[here] = remote;
  node_->stats.peers = node_->peers.size();
  if (!found && network_->queued_mode()) {
    Step step;
    step.notice = [network = network_.get(), node = node_, here, to = std::string(address)] {
      Calls calls;
      {
        std::lock_guard inner(network->mutex);
        if (node->peers.erase(here) == 0) return;
        AddLost(node, here, Unavailable("nobody listens at %s", to), calls);
      }
      Run(calls);
    };
    network_->queue.push_back(std::move(step));
  }
  return here;
}

void InprocTransport::Disconnect(PeerId peer) {
  Calls calls;
  {
    std::lock_guard lock(network_->mutex);
    network_->Cut(node_, peer, Cancelled("disconnected from peer %d", peer),
                  Unavailable("peer %s closed the connection", node_->address), true, calls);
  }
  Run(calls);
}

void InprocTransport::Send(PeerId peer, MessageType type, std::string_view header,
                           std::span<const std::byte> payload, Done done) {
  if (static_cast<int64_t>(header.size()) > kHeaderBytesMax ||
      static_cast<int64_t>(payload.size()) > kPayloadBytesMax) {
    auto error = InvalidArgument("message: header of %d and payload of %d bytes; at most %d and %d",
                                 header.size(), payload.size(), kHeaderBytesMax, kPayloadBytesMax);
    return network_->Post([done = std::move(done), error] { done(error); });
  }
  Step step;
  step.from = node_;
  step.from_peer = peer;
  step.type = type;
  step.payload = payload;
  Calls lost;
  {
    std::lock_guard lock(network_->mutex);
    const auto it = node_->peers.find(peer);
    if (!node_->dead && it != node_->peers.end()) {
      step.to = it->second.node;
      step.to_peer = it->second.id;
      if (step.to == nullptr && !network_->queued_mode()) {
        node_->peers.erase(it);
        AddLost(node_, peer, Unavailable("nobody listens at the address of peer %d", peer), lost);
      }
    }
    if (step.to != nullptr) {
      ++node_->stats.messages_sent;
      node_->stats.bytes_sent += payload.size();
    }
  }
  if (step.to == nullptr) {
    network_->Post([done = std::move(done), peer] { done(Unavailable("peer %d is gone", peer)); });
    return Run(lost);
  }
  step.header.assign(header);
  step.sent = std::move(done);
  const InprocFault fault = network_->Fate(step);
  network_->Submit(std::move(step), fault);
}

}  // namespace

InprocNetwork::InprocNetwork(InprocOptions options) : impl_(std::make_shared<Impl>(options)) {}
InprocNetwork::~InprocNetwork() = default;

absl::StatusOr<std::unique_ptr<Transport>> InprocNetwork::Open(std::string_view address) {
  auto node = std::make_shared<Node>();
  node->address = std::string(address);
  std::lock_guard lock(impl_->mutex);
  auto& slot = impl_->nodes[node->address];
  if (slot != nullptr && !slot->dead) {
    return Unavailable("inproc address %s is in use; close that transport first", node->address);
  }
  slot = node;
  return std::make_unique<InprocTransport>(impl_, node);
}

bool InprocNetwork::DeliverOne() {
  Step step;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->queue.empty()) return false;
    const size_t pick = impl_->options.reorder ? impl_->random.Next() % impl_->queue.size() : 0;
    step = std::move(impl_->queue[pick]);
    impl_->queue.erase(impl_->queue.begin() + static_cast<std::ptrdiff_t>(pick));
  }
  impl_->Execute(std::move(step));
  return true;
}

int64_t InprocNetwork::DeliverAll(int64_t limit) {
  int64_t steps = 0;
  while (steps < limit && DeliverOne()) ++steps;
  return steps;
}

int64_t InprocNetwork::queued() const {
  std::lock_guard lock(impl_->mutex);
  return static_cast<int64_t>(impl_->queue.size());
}

void InprocNetwork::SetFault(std::function<InprocFault(const InprocMessage&)> hook) {
  std::lock_guard lock(impl_->mutex);
  impl_->fault = std::move(hook);
}

void InprocNetwork::Kill(std::string_view address) {
  Calls calls;
  {
    std::lock_guard lock(impl_->mutex);
    const auto it = impl_->nodes.find(address);
    if (it == impl_->nodes.end()) return;
    const std::shared_ptr<Node> node = it->second;
    const absl::Status gone = Unavailable("peer %s died", node->address);
    while (!node->peers.empty()) {
      impl_->Cut(node, node->peers.begin()->first, gone, gone, true, calls);
    }
    node->dead = true;
  }
  Run(calls);
}

}  // namespace deltamesh
