// Transport over UCX active messages. A small payload comes eagerly: it is sent from where it lies, checked
// in UCX's buffer and copied to the handler's within the call that hears of it. A large one comes by
// rendezvous.
//
// One context, worker and progress thread. One thread at a time calls UCX, the one that holds the
// worker: the progress thread, or one that called Drive or SendHere. Others queue commands and wake the
// progress thread. It sleeps on the worker's event descriptor when there is nothing to do, and sees no
// events while another thread drives.
//
// A connection opens with a hello from the connecting side and a welcome from the other; until then sends
// wait. What is no hello and comes from elsewhere is counted and its endpoint closed.
//
// UCX notices a dead process, not a hung one, and a sender with unacknowledged data may never hear
// of a cut link: callers need deadlines of their own and Disconnect.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/transfer/transport.h"

namespace deltamesh {

enum class UcxErrorMode {
  kPeer,  // a lost peer is reported; shared-memory lanes are left out by UCX
  kNone,  // keeps shared-memory lanes; a lost peer is not reported. Both sides must use the same
          // mode
};

struct UcxTransportOptions {
  // Numeric. Its interface carries the connections, in and out; UCX listens at the interface's first
  // address.
  std::string host = "127.0.0.1";
  int port = 0;                // 0: any free one
  int port_last = 0;           // above `port`: the first free one of the range
  std::string advertise_host;  // numeric; names the interface when `host` is a wildcard
  UcxErrorMode error_mode = UcxErrorMode::kPeer;

  // Used by ApplyUcxDefaults, which leaves variables that are already set alone.
  std::string transports = "tcp";  // UCX_TLS
  std::string devices;             // UCX_NET_DEVICES; empty: the interface that has `host`

  // Longest look for events before a thread sleeps, yielding to whoever has work. A sleeper costs its peer
  // a wake-up per message.
  absl::Duration spin = absl::ZeroDuration();
  int64_t rendezvous_bytes = 64 << 10;  // payloads from here on use rendezvous
  int64_t peers_max = 240;              // connections, both directions
  int64_t sends_max = 1 << 16;  // queued or in flight; more complete with RESOURCE_EXHAUSTED
  int64_t payload_bytes_max = kPayloadBytesMax;
  absl::Duration greeting_max = absl::Seconds(5);      // from Connect to the welcome
  absl::Duration stranger_silence = absl::Seconds(3);  // before UCX's first bytes
  int64_t strangers_max = 256;  // connections that have not sent them; the oldest are cut
  absl::Duration hung_after = absl::Seconds(20);     // of one call into UCX; the process ends
  absl::Duration shutdown_grace = absl::Seconds(2);  // closing connections at destruction
};

// Sets the environment variables UCX reads (once per process, before the first transport; not
// thread-safe, as setenv is not).
absl::Status ApplyUcxDefaults(const UcxTransportOptions& options);

// Listens and handles messages at once; a message without a handler is dropped and counted. The
// destructor closes all connections; completions of what was in flight run with CANCELLED.
class UcxTransport : public Transport {
 public:
  // UNAVAILABLE names the address and the cause when listening fails. Raises the process's limit of open
  // files as far as it may: UCX stops listening for good when there are none.
  static absl::StatusOr<std::unique_ptr<UcxTransport>> Create(const UcxTransportOptions& options);

  virtual int port() const = 0;  // of UCX's tcp
};

}  // namespace deltamesh
