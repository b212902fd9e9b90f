// One granted transfer as its receiver keeps it, from the grant until nothing can write into its memory.
//
// Plain data, guarded by the receiver's mutex.
#pragma once

#include <utility>

#include "absl/time/time.h"
#include "deltamesh/mesh/handoff.pb.h"
#include "runtime/base/ids.h"
#include "runtime/transfer/handoff_receiver.h"
#include "runtime/transfer/incoming_state.h"

namespace deltamesh {

struct IncomingTransfer {
  IncomingTransfer(RequestId id, uint32_t grant_serial, HandoffBuffers granted, IncomingState state)
      : request_id(std::move(id)),
        serial(grant_serial),
        buffers(std::move(granted)),
        incoming(std::move(state)) {}

  const RequestId request_id;
  const uint32_t serial;
  HandoffBuffers buffers;
  IncomingState incoming;  // into the memory of `buffers`
  mesh::TransferKey key;
  std::string prefix;  // that the manifest must name
  absl::Duration unclaimed_max;
  absl::Time limit;     // the request's deadline
  absl::Time deadline;  // never after `limit`; moves with what arrives until the seal does
  PeerId peer = 0;      // bound by the first manifest
  absl::Time first_segment = absl::InfiniteFuture(), last_segment = absl::InfinitePast();

  int in_flight = 0;  // payloads that may still write
  bool ended = false;
  bool silent = false;  // revoked: no event
  Refusal refusal;
  bool disconnect_asked = false;

  double seconds() const {
    return last_segment < first_segment ? 0.0 : absl::ToDoubleSeconds(last_segment - first_segment);
  }
};

}  // namespace deltamesh
