// The class behind UcxTransport; ucx_connections.cc has how connections open and close, ucx_transport.cc
// the rest.
//
// Threads: members below "any thread" take what they need with atomics and `mutex_`; all others belong to
// the holder of `worker_mutex_`: the own thread, or one within Drive or SendHere. Handlers and completions
// run on the holder and take their locks after it, so who holds such a lock must not call those two.
// Nobody sleeps as the holder.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "runtime/transfer/return_watch.h"
#include "runtime/transfer/ucx_address.h"
#include "runtime/transfer/ucx_transport.h"
#include "runtime/transfer/ucx_worker.h"

namespace deltamesh {

class UcxTransportImpl final : public UcxTransport {
 public:
  using Clock = std::chrono::steady_clock;

  explicit UcxTransportImpl(UcxTransportOptions options)
      : options_(std::move(options)), watch_("UCX", options_.hung_after) {}
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
            std::span<const std::byte> payload, std::function<void(absl::Status)> done) override;
  void SendHere(PeerId peer, MessageType type, std::string_view header,
                std::span<const std::byte> payload,
                std::function<void(absl::Status)> done) override;
  bool Drive(absl::FunctionRef<bool()> enough, Clock::time_point deadline) override;
  void Nudge() override;

 private:
  using Done = std::function<void(absl::Status)>;
  static constexpr size_t kMessageTypes = 16;

  struct SendOp;

  // A connection; lives as long as an operation on it does.
  struct Peer {
    enum State {
      kUnclaimed,  // made to get at another endpoint; its hello may still come
      kGreeting,   // our hello is under way
      kOpen
    };
    PeerId id = 0;  // 0: unclaimed
    ucp_ep_h ep = nullptr;
    State state = kGreeting;
    std::string name;                              // for messages
    std::string identity;                          // of the process at the other end
    std::string nonce;                             // of our hello
    Clock::time_point deadline{};                  // of the greeting, or of being unclaimed
    std::vector<std::unique_ptr<SendOp>> waiting;  // for the welcome
    bool greeted = false;                          // a hello came
    bool closed_here = false;  // by Disconnect or the destructor, not by a failure
    bool lanes_seen = false;
  };
  using PeerPtr = std::shared_ptr<Peer>;

  struct SendOp {
    UcxTransportImpl* transport = nullptr;
    PeerId id = 0;
    PeerPtr peer;
    std::string header;  // prefix and header; UCX reads it until completion
    std::span<const std::byte> payload;
    Done done;
    bool control = false;  // the transport's own; not counted
  };

  struct ReceiveOp {
    UcxTransportImpl* transport = nullptr;
    PeerPtr peer;
    PayloadTarget target;
  };

  struct Command {
    enum Kind { kConnect, kDisconnect, kSend, kRefuse } kind = kSend;
    PeerId peer = 0;
    std::unique_ptr<const UcxAddress> address;  // kConnect: of whom
    std::unique_ptr<SendOp> send;
    absl::Status status;  // kRefuse: what `send` completes with
  };

  // A message from an endpoint that is no connection yet.
  struct Arrived {
    ucp_ep_h ep = nullptr;
    bool is_hello = false;
    std::string bytes;
  };

  // Any thread.
  void Push(Command command);
  Command MakeSend(PeerId peer, MessageType type, std::string_view header,
                   std::span<const std::byte> payload, Done done);
  // The worker, for this thread. A thread that holds it already gets false from TryHold.
  void Hold();
  bool TryHold();
  void LetGo();

  // The loop (ucx_transport.cc).
  void Loop();
  void LetDriversIn();
  bool RunCommands();  // true: there were some
  bool HasCommands();
  bool Housekeep();  // true: something was done
  void Shutdown();
  bool Round();          // true: something was done, do it again before sleeping
  bool Look();           // at UCX, and what follows from what it shows; true: there was something
  void WakeOwnThread();  // to look once more
  // True: completed.
  bool Post(std::unique_ptr<SendOp> op);
  bool PostNow(const PeerPtr& peer, std::unique_ptr<SendOp> op);
  void FinishSend(SendOp* op, const absl::Status& status);
  // Rendezvous only: what came eagerly is landed at once.
  void FinishReceive(ReceiveOp* op, ucs_status_t status);
  ucs_status_t OnActiveMessage(const void* header, size_t header_length, void* data, size_t length,
                               const ucp_am_recv_param_t* param);
  void Land(const PayloadTarget& target, const absl::Status& status);
  ucs_status_t Receive(const PeerPtr& peer, PayloadTarget target, void* data);
  static void OnSent(void* request, ucs_status_t status, void* op);
  static void OnReceived(void* request, ucs_status_t status, size_t length, void* op);
  static void OnEndpointError(void* self, ucp_ep_h ep, ucs_status_t status);

  // Connections (ucx_connections.cc).
  void StartConnect(PeerId id, const UcxAddress& address);
  // Within UCX's callback. `type`: 0 for what is no greeting.
  void OnGreeting(ucp_ep_h ep, const PeerPtr& peer, uint16_t type, std::string_view bytes);
  void OnBye(const PeerPtr& peer, std::string_view why);
  void OnWelcome(const PeerPtr& peer, std::string_view bytes);
  absl::Status Answer(const Arrived& arrived);
  void SetDeadline(const PeerPtr& peer);
  absl::StatusOr<PeerPtr> Claim(ucp_ep_h ep, const UcxAddress& address);
  absl::StatusOr<ucp_ep_h> CreateEndpoint(const UcxAddress& address);
  void SendControl(const PeerPtr& peer, uint16_t type, std::string_view bytes);
  void Refuse(ucp_ep_h ep, const absl::Status& why);
  bool HandleFailures();
  bool HandleArrived();
  bool HandleDeadlines();
  void WatchStrangers();
  void Adopt(PeerPtr peer);
  void Leave(const PeerPtr& peer, std::string_view why);
  void Close(PeerPtr peer, const absl::Status& reason);
  void CloseEndpoint(ucp_ep_h ep);
  void Lose(const PeerPtr& peer, const absl::Status& reason);
  void NoteLanes(Peer& peer);
  bool ReapClosed();

  const UcxTransportOptions options_;
  std::string identity_, address_;
  int64_t header_bytes_max_ = 0;
  std::unique_ptr<UcxWorker> ucx_;
  ReturnWatch watch_;
  std::thread thread_;

  std::array<std::atomic<MessageHandler*>, kMessageTypes> handlers_{};
  std::atomic<PeerId> next_peer_{1};
  std::atomic<int64_t> outstanding_{0};
  std::atomic<int64_t> peer_count_{0};
  std::atomic<uint64_t> messages_sent_{0}, messages_received_{0}, bytes_sent_{0},
      bytes_received_{0}, dropped_{0}, refused_{0};

  mutable std::mutex mutex_;
  std::vector<Command> commands_;  // guarded by mutex_
  bool awake_ = false;             // guarded by mutex_: a wake-up is under way
  bool stop_ = false;              // guarded by mutex_
  std::string lanes_;              // guarded by mutex_

  std::mutex worker_mutex_;
  std::atomic<std::thread::id> holder_;  // of worker_mutex_
  std::atomic<bool> driver_sleeps_{false};
  std::atomic<int> drivers_wanting_{0};  // for the own thread's looking to end
  std::atomic<std::chrono::milliseconds> sleep_time_{std::chrono::milliseconds{20}};  // longest

  // Of the holder.
  bool driven_ = false;           // a thread is within Drive
  bool in_round_ = false;         // what is queued now is seen before anybody sleeps
  bool rearm_ = true;             // the last Arm found events: later ones may not show
  bool closed_ = false;           // the worker is gone
  std::vector<Command> running_;  // taken from commands_; keeps its memory
  std::unordered_map<PeerId, PeerPtr> peers_;
  std::unordered_map<ucp_ep_h, PeerPtr> by_endpoint_;  // with the unclaimed ones
  std::deque<Arrived> arrived_;
  std::vector<PeerPtr> opened_;  // by a welcome
  std::vector<std::pair<ucp_ep_h, ucs_status_t>> failures_;
  std::vector<std::pair<PeerPtr, absl::Status>> lost_;
  std::vector<void*> closing_;
  std::unordered_set<SendOp*> sends_;
  std::unordered_set<ReceiveOp*> receives_;
  std::vector<std::weak_ptr<Peer>> timed_;  // whose deadline runs
  Clock::time_point next_watch_{};
  bool port_lost_ = false;
  bool stopping_ = false;
};

// Before every message's own header.
struct UcxWirePrefix {
  uint16_t version = kVersion;
  uint16_t type = 0;

  static constexpr uint16_t kVersion = 2;
  // Types of the transport itself, beside those of MessageType.
  static constexpr uint16_t kHello = 0xff01, kWelcome = 0xff02, kBye = 0xff03;
};
static_assert(sizeof(UcxWirePrefix) == 4);

}  // namespace deltamesh
