// Transports within one process, for tests and simulation of a whole mesh.
//
// Inline: Send runs the receiver's handler, the copy and the completion before it returns, on the
// sender's thread. Queued: nothing moves until Deliver*, which makes a run reproducible and lets
// tests choose order and faults; a payload then takes two steps, the handler's decision and the
// landing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/transfer/transport.h"

namespace deltamesh {

// What happens to one message on its way. Offsets beyond the end are taken modulo the length.
struct InprocFault {
  bool drop = false;              // the sender sees a completed send
  bool duplicate = false;         // delivered twice
  bool fail_payload = false;      // the payload fails to land with UNAVAILABLE
  int64_t flip_header_byte = -1;  // offset; -1: none
  int64_t flip_payload_byte = -1;
  uint8_t flip_mask = 0x01;
};

// What a fault hook sees of a message.
struct InprocMessage {
  std::string_view from, to;  // addresses
  MessageType type{};
  std::string_view header;
  int64_t payload_bytes = 0;
  int64_t number = 0;  // of this type within the network, from 0
};

enum class InprocDelivery { kInline, kQueued };

struct InprocOptions {
  InprocDelivery delivery = InprocDelivery::kInline;
  bool reorder = false;  // queued: deliver in an order drawn from `seed`
  uint64_t seed = 1;
};

// Thread-safe. Outlived by nothing: transports keep what they share with it alive. Hooks run on the
// sender's thread (inline) or the delivering thread.
class InprocNetwork {
 public:
  explicit InprocNetwork(InprocOptions options = {});
  ~InprocNetwork();

  // `address` is unique among living transports; a killed or destroyed one may be opened again.
  absl::StatusOr<std::unique_ptr<Transport>> Open(std::string_view address);

  // Queued: one step; false when nothing is queued.
  bool DeliverOne();
  // Queued: steps until nothing is queued or `limit` steps were taken; returns the steps.
  int64_t DeliverAll(int64_t limit = int64_t{1} << 20);
  int64_t queued() const;

  // Decides the fate of every message from now on; null for none.
  void SetFault(std::function<InprocFault(const InprocMessage&)> hook);

  // The process at `address` dies: its peers get OnPeerLost, everything in flight from or to it
  // fails with UNAVAILABLE. The transport object stays; whatever it sends fails.
  void Kill(std::string_view address);

  struct Impl;  // shared with the transports

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace deltamesh
