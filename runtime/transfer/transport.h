// How bytes move between processes: messages with a small header and an optional large payload that
// lands in a buffer the receiver picks. Implementations: UCX (ucx_transport.h) and in-process
// (inproc_transport.h).
//
// There is no remote write: a payload only ever lands where the receiver's handler said, decided
// after the message arrived. Messages between two peers may be reordered.
//
// Threads: all methods are thread-safe. Handlers and completions run on the transport's own thread, on
// one that called Drive or SendHere (in process: on the sender's thread), never on two at once, and must
// not block or call back into a method that waits.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace deltamesh {

// Numbers on the wire; never reuse one.
enum class MessageType : uint16_t {
  kHandoffManifest = 1,
  kHandoffSegment = 2,
  kHandoffSeal = 3,
  kHandoffVerdict = 4,
  kExpertDispatch = 5,
  kExpertCombine = 6,
  kProbe = 7,
  kHandoffAlive = 8,
  kStateFetch = 9,
  kStateFetchRefused = 10,
};

// A connection as this side knows it; never reused within a process. 0 is none.
using PeerId = uint64_t;

// UCX 1.13 keeps the length of an eager header in 16 bits and cuts longer ones without an error.
inline constexpr int64_t kHeaderBytesMax = 60 << 10;
inline constexpr int64_t kPayloadBytesMax = int64_t{1} << 30;

struct Arrival {
  PeerId peer = 0;  // answers can be sent to it
  MessageType type{};
  std::string_view header;  // valid during the call only
  int64_t payload_bytes = 0;
};

// Called when the payload is in place (or failed to arrive). Exactly once per accepted payload.
using PayloadDone = std::function<void(absl::Status)>;

// What a handler decides about a payload: where it goes and whom to tell. An error drops the
// payload, and so does a buffer of another size.
struct PayloadTarget {
  std::span<std::byte> buffer;  // payload_bytes long, valid until `done` ran
  PayloadDone done;
  // What Crc32c of the payload must be; of another one `done` gets DATA_LOSS, and what the buffer holds is
  // undefined. Looked at where the bytes pass through the caches: later it costs several times as much.
  std::optional<uint32_t> crc32c = std::nullopt;
  // Nobody reads the buffer soon, so that its content need not take room in the caches.
  bool cold = false;
};

// `target` when its buffer holds exactly the payload. Else the error that drops the message: a
// peer picks the payload's size, so a handler that misjudged it must not end the process. Logs it
// and runs `done`, if there is one, with the error.
absl::StatusOr<PayloadTarget> FittingTarget(PayloadTarget target, int64_t payload_bytes);

// DATA_LOSS when `payload` has another checksum than `target` names.
absl::Status CheckPayload(const PayloadTarget& target, std::span<const std::byte> payload);

// Copies a payload that is at hand and agrees with `target`. The result is for `done`.
absl::Status LandPayload(const PayloadTarget& target, std::span<const std::byte> payload);

class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // A message without payload calls this with payload_bytes == 0 and ignores the target.
  virtual absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) = 0;
  // The connection is gone; no more arrivals from it.
  virtual void OnPeerLost(PeerId peer, const absl::Status& reason) = 0;
};

struct TransportStats {
  uint64_t messages_sent = 0, messages_received = 0;
  uint64_t bytes_sent = 0, bytes_received = 0;  // payloads
  uint64_t dropped = 0;                         // refused by handlers or malformed
  uint64_t refused = 0;  // connections turned away: malformed, too many, unknown
  uint64_t peers = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string kind() const = 0;     // "ucx" or "inproc"
  virtual std::string address() const = 0;  // what others pass to Connect; opaque bytes
  virtual std::string lanes() const = 0;    // selected lanes and devices, for logs and metrics

  // Before any message arrives: one handler per type. Not owned; must outlive the transport.
  virtual void SetHandler(MessageType type, MessageHandler* handler) = 0;

  // Returns at once; a failure to reach the address shows as OnPeerLost and in the completions of
  // Send.
  virtual absl::StatusOr<PeerId> Connect(std::string_view address) = 0;
  // Cancels what is in flight to the peer; its completions run with CANCELLED. Unknown peers are
  // ignored.
  virtual void Disconnect(PeerId peer) = 0;

  // `header` is copied. `payload` must stay valid until `done` ran, which happens exactly once: OK
  // when the payload may be reused (not: when it was received), UNAVAILABLE when the peer is gone.
  virtual void Send(PeerId peer, MessageType type, std::string_view header,
                    std::span<const std::byte> payload, std::function<void(absl::Status)> done) = 0;

  // As Send, for a caller that holds no lock: the sending, and completions, may run within the call
  // instead of waking another thread for them.
  virtual void SendHere(PeerId peer, MessageType type, std::string_view header,
                        std::span<const std::byte> payload,
                        std::function<void(absl::Status)> done) {
    Send(peer, type, header, payload, std::move(done));
  }

  // Lends the calling thread, which holds no lock, to the transport until `enough` holds or the deadline
  // has passed: what arrives is handled on it, so that no other thread need be woken first. `enough` is
  // asked on this thread whenever something may have changed and must not call the transport. False, at
  // once, when the transport cannot be driven or another thread does: wait in another way.
  virtual bool Drive(absl::FunctionRef<bool()> /*enough*/,
                     std::chrono::steady_clock::time_point /*deadline*/) {
    return false;
  }
  // Makes Drive ask `enough` again. Any thread, with any lock.
  virtual void Nudge() {}

  virtual TransportStats stats() const = 0;
};

}  // namespace deltamesh
