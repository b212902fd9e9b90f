#include "runtime/transfer/fetch_port.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {

FetchPort::FetchPort(Transport* transport, EventCallback on_event)
    : transport_(transport), on_event_(std::move(on_event)) {
  transport->SetHandler(MessageType::kStateFetch, this);
  transport->SetHandler(MessageType::kStateFetchRefused, this);
}

absl::StatusOr<PeerId> FetchPort::Ask(std::string_view address, const mesh::StateFetch& fetch) {
  if (address.empty())
    return InvalidArgument("fetch.transport_address: empty; the router gives it");
  PeerId peer = 0;
  {
    std::lock_guard lock(mutex_);
    const std::string key(address);
    auto it = peers_.find(key);
    if (it == peers_.end()) {
      ASSIGN_OR_RETURN(peer, transport_->Connect(address));
      it = peers_.emplace(key, peer).first;
    }
    peer = it->second;
  }
  transport_->Send(peer, MessageType::kStateFetch, fetch.SerializeAsString(), {},
                   [this, peer](const absl::Status& sent) {
                     if (!sent.ok()) on_event_(FetchPeerLost{peer, sent});
                   });
  return peer;
}

void FetchPort::Refuse(PeerId peer, const mesh::StateFetchRefused& refused) {
  transport_->Send(peer, MessageType::kStateFetchRefused, refused.SerializeAsString(), {},
                   [](const absl::Status&) {});
}

absl::StatusOr<PayloadTarget> FetchPort::OnMessage(const Arrival& arrival) {
  if (arrival.payload_bytes > 0) {
    return InvalidArgument("fetch: %d bytes of payload; none is expected", arrival.payload_bytes);
  }
  const int size = static_cast<int>(arrival.header.size());
  FetchAsked asked{.peer = arrival.peer, .fetch = {}};
  FetchRefused refused{.peer = arrival.peer, .refused = {}};
  if (arrival.type == MessageType::kStateFetch &&
      asked.fetch.ParseFromArray(arrival.header.data(), size)) {
    on_event_(std::move(asked));
  } else if (arrival.type == MessageType::kStateFetchRefused &&
             refused.refused.ParseFromArray(arrival.header.data(), size)) {
    on_event_(std::move(refused));
  } else {
    // Whoever waits for an answer gives up by itself.
    return InvalidArgument("fetch: a message of %d bytes does not parse", size);
  }
  return PayloadTarget{};
}

void FetchPort::OnPeerLost(PeerId peer, const absl::Status& reason) {
  {
    std::lock_guard lock(mutex_);
    absl::erase_if(peers_, [&](const auto& entry) { return entry.second == peer; });
  }
  on_event_(FetchPeerLost{peer, reason});
}

}  // namespace deltamesh
