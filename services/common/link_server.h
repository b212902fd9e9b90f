// The router's end of Mesh.Link: turns gRPC streams into events and queues what is sent to them.
//
// Thread-safe. Handlers run on the gRPC server's thread, one at a time, and must not block; they may call
// Send and Close.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "services/common/grpc_call.h"
#include "services/common/link.h"

namespace deltamesh {

struct LinkServerEvents {
  // A worker opened a stream. `peer` is gRPC's name of the remote address, for logs.
  std::function<void(LinkId link, const std::string& peer)> opened;
  // False: cannot be taken (inbox full); the link is closed with RESOURCE_EXHAUSTED.
  std::function<bool(LinkId link, mesh::WorkerMessage message)> message;
  // The stream is gone; exactly once per opened link, nothing follows.
  std::function<void(LinkId link, absl::Status reason)> closed;
};

class LinkServer {
 public:
  LinkServer(const LinkOptions& options, LinkServerEvents events);
  // All streams must have ended: shut the gRPC server down first.
  ~LinkServer();

  // Register it with the gRPC server. Owned by this object.
  GrpcService* service();

  // Queues a message. False when the link is unknown or closing. A full queue means a reader that does
  // not keep up: the link is closed with RESOURCE_EXHAUSTED and false is returned.
  bool Send(LinkId link, const mesh::RouterMessage& message);

  // Writes what is queued, then ends the stream with `status` (its code and message reach the worker).
  void Close(LinkId link, const absl::Status& status);
  void CloseAll(const absl::Status& status);

 private:
  class Stream;
  class Service;
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<Service> service_;
};

}  // namespace deltamesh
