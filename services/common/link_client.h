// A worker's end of Mesh.Link: keeps one stream open to each router, dialling again with growing pauses,
// which start anew after a stream that lasted. A router that cannot be reached is logged once until it
// answers.
//
// Thread-safe. Handlers run on gRPC's threads, one at a time per link, and must not block; they may call
// Send. Each new stream is a new LinkId: what was said on the old one is forgotten by both sides.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.grpc.pb.h"
#include "services/common/link.h"

namespace deltamesh {

// Longest wait of an ending process for routers to read what it sent them.
inline constexpr absl::Duration kLinkFlushMax = absl::Seconds(2);

struct LinkClientEvents {
  // The router accepted the stream (not yet the registration).
  std::function<void(LinkId link, const std::string& target)> opened;
  // False: cannot be taken (inbox full); the link is cancelled and dialled anew.
  std::function<bool(LinkId link, mesh::RouterMessage message)> message;
  // The stream is gone; exactly once per opened link.
  std::function<void(LinkId link, absl::Status reason)> closed;
};

class LinkClient {
 public:
  // `targets` are gRPC names: "host:port", "dns:///name:port".
  LinkClient(std::vector<std::string> targets, const LinkOptions& options, LinkClientEvents events);
  // Stops.
  ~LinkClient();

  void Start();
  // Ends all streams and waits until their `closed` ran. What Send took reaches the routers that read
  // it within `flush_max`; a stream that has not ended by then is cancelled. `message` may run meanwhile:
  // a message that cannot be taken cancels the stream at once.
  void Stop(absl::Duration flush_max = kLinkFlushMax);

  // False when the link is unknown or closing, or its queue is full (the link is then cancelled).
  bool Send(LinkId link, mesh::WorkerMessage message);
  // Cancels the stream; it is dialled anew after a pause.
  void Reset(LinkId link);

 private:
  class Stream;
  class Dialer;
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::vector<std::unique_ptr<Dialer>> dialers_;
};

}  // namespace deltamesh
