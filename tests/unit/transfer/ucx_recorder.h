// Collects what a transport delivers; shared by the UCX test and the process it talks to.
#pragma once

#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/transfer/ucx_transport.h"

namespace deltamesh {

inline UcxTransportOptions LoopbackOptions(int port = 0) {
  UcxTransportOptions options;
  options.port = port;
  return options;
}

// Listens on loopback with the project's UCX settings.
inline std::unique_ptr<UcxTransport> OpenLoopback(
    const UcxTransportOptions& options = LoopbackOptions()) {
  CHECK_OK(ApplyUcxDefaults(options));
  auto transport = UcxTransport::Create(options);
  CHECK_OK(transport.status());
  return *std::move(transport);
}

inline std::vector<std::byte> Pattern(size_t size, uint32_t salt) {
  std::vector<std::byte> bytes(size);
  uint32_t x = salt * 2654435761u + 1;
  for (std::byte& b : bytes) {
    x = x * 1664525u + 1013904223u;
    b = static_cast<std::byte>(x >> 24);
  }
  return bytes;
}

struct Recorded {
  PeerId peer = 0;
  MessageType type{};
  std::string header;
  std::vector<std::byte> payload;
  absl::Status status;
};

class Recorder : public MessageHandler {
 public:
  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override {
    auto message = std::make_shared<Recorded>();
    message->peer = arrival.peer;
    message->type = arrival.type;
    message->header = std::string(arrival.header);
    message->payload.resize(static_cast<size_t>(arrival.payload_bytes));
    {
      std::lock_guard lock(mutex_);
      if (refuse_) return InvalidArgument("refused by the test");
      ++started_;
    }
    changed_.notify_all();
    if (arrival.payload_bytes != 0 && on_payload_) on_payload_(arrival.peer);
    if (arrival.payload_bytes == 0) {
      Add(message);
      return PayloadTarget{};
    }
    return PayloadTarget{message->payload,
                         [this, message](absl::Status status) {
                           message->status = status;
                           Add(message);
                         },
                         crc32c_};
  }

  void OnPeerLost(PeerId peer, const absl::Status& reason) override {
    {
      std::lock_guard lock(mutex_);
      lost_.emplace_back(peer, reason);
    }
    changed_.notify_all();
  }

  void Sent(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      sent_.push_back(status);
    }
    changed_.notify_all();
  }
  std::function<void(absl::Status)> Count() {
    return [this](absl::Status status) { Sent(status); };
  }

  // True when `condition` held within `seconds`.
  bool Wait(double seconds, const std::function<bool(const Recorder&)>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return condition(*this); });
  }
  void Refuse(bool refuse) {
    std::lock_guard lock(mutex_);
    refuse_ = refuse;
  }

  // Read these inside Wait, or when nothing is under way.
  std::vector<Recorded> messages_;
  std::vector<std::pair<PeerId, absl::Status>> lost_;
  std::vector<absl::Status> sent_;
  int started_ = 0;
  std::optional<uint32_t> crc32c_;  // what payloads are checked against; set while there are none
  // Set before traffic: runs on the transport's thread when a payload is announced, before any of it
  // can arrive. What must happen in the middle of a payload happens here: a waiting test thread may
  // be woken only after all of it has passed.
  std::function<void(PeerId)> on_payload_;

 protected:
  virtual void Add(const std::shared_ptr<Recorded>& message) {
    {
      std::lock_guard lock(mutex_);
      messages_.push_back(std::move(*message));
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool refuse_ = false;
};

}  // namespace deltamesh
