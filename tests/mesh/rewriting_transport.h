// A transport whose messages a test may write anew before they leave: what a faulty sender, or one of
// another time, could send with everything else in order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "runtime/transfer/transport.h"

namespace deltamesh::testing {

// Gets a copy of header and payload; returns whether it changed them.
using Rewrite = std::function<bool(MessageType type, std::string& header, std::string& payload)>;

class RewritingTransport final : public Transport {
 public:
  // `rewrite` may be set and cleared at any time; null: everything passes as it is.
  RewritingTransport(std::unique_ptr<Transport> inner, const Rewrite* rewrite)
      : inner_(std::move(inner)), rewrite_(rewrite) {}

  std::string kind() const override { return inner_->kind(); }
  std::string address() const override { return inner_->address(); }
  std::string lanes() const override { return inner_->lanes(); }
  void SetHandler(MessageType type, MessageHandler* handler) override {
    inner_->SetHandler(type, handler);
  }
  absl::StatusOr<PeerId> Connect(std::string_view address) override {
    return inner_->Connect(address);
  }
  void Disconnect(PeerId peer) override { inner_->Disconnect(peer); }
  void Send(PeerId peer, MessageType type, std::string_view header,
            std::span<const std::byte> payload, std::function<void(absl::Status)> done) override {
    if (*rewrite_ != nullptr) {
      std::string head(header);
      auto body = std::make_shared<std::string>(reinterpret_cast<const char*>(payload.data()),
                                                payload.size());
      if ((*rewrite_)(type, head, *body)) {
        const auto bytes = std::as_bytes(std::span(*body));
        return inner_->Send(peer, type, head, bytes,
                            [body, done = std::move(done)](absl::Status sent) { done(sent); });
      }
    }
    inner_->Send(peer, type, header, payload, std::move(done));
  }
  TransportStats stats() const override { return inner_->stats(); }

 private:
  const std::unique_ptr<Transport> inner_;
  const Rewrite* const rewrite_;
};

}  // namespace deltamesh::testing
