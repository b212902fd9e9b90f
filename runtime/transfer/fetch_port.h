// Questions of workers to workers for states that they hold, and refusals (proto/deltamesh/mesh/fetch.proto),
// over the transport. Knows no states: what is to be done is told as events.
//
// Thread-safe. The event callback runs on the transport's thread, with no lock held; it must not block.
// Destroy the transport before the port.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <variant>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "deltamesh/mesh/fetch.pb.h"
#include "runtime/transfer/transport.h"

namespace deltamesh {

// Somebody wants a state; refusals go back to `peer`.
struct FetchAsked {
  PeerId peer = 0;
  mesh::StateFetch fetch;
};
struct FetchRefused {
  PeerId peer = 0;
  mesh::StateFetchRefused refused;
};
// Whoever was asked over this connection will not answer any more.
struct FetchPeerLost {
  PeerId peer = 0;
  absl::Status reason;
};
using FetchEvent = std::variant<FetchAsked, FetchRefused, FetchPeerLost>;

class FetchPort final : public MessageHandler {
 public:
  using EventCallback = std::function<void(FetchEvent)>;

  // Registers itself with `transport`, which must be destroyed first.
  FetchPort(Transport* transport, EventCallback on_event);
  FetchPort(const FetchPort&) = delete;
  FetchPort& operator=(const FetchPort&) = delete;

  // Sends the question; one connection per address is kept. The connection that it went over.
  absl::StatusOr<PeerId> Ask(std::string_view address, const mesh::StateFetch& fetch);
  void Refuse(PeerId peer, const mesh::StateFetchRefused& refused);

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override;
  void OnPeerLost(PeerId peer, const absl::Status& reason) override;

 private:
  Transport* const transport_;
  const EventCallback on_event_;
  std::mutex mutex_;
  absl::flat_hash_map<std::string, PeerId> peers_;  // by address; guarded by mutex_
};

}  // namespace deltamesh
