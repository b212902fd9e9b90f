// A call as gRPC's own library serves it. That library allows one write at a time and nothing after the end:
// the order is kept here.
//
// Thread-safe, as every GrpcCall; what happens is told on the engine's thread.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/common/grpc_call.h"

namespace deltamesh {

// What the queue of a server hands back when something it was asked for is done.
class GrpcTag {
 public:
  virtual ~GrpcTag() = default;
  virtual void Run(bool ok) = 0;
};

class GrpcCoreCall final : public GrpcCall {
 public:
  GrpcCoreCall();

  void Open() override;
  void Read() override;
  Written Write(const google::protobuf::MessageLite& message, size_t unwritten_max) override;
  void Finish(const grpc::Status& status, const Metadata& trailing = {}) override;
  void Abort(const grpc::Status& status) override;
  void Reply(const google::protobuf::MessageLite& message) override;

  // ---- the engine's part ----
  // Asks for the next call; `arrived` runs on the engine's thread, with false when the server stops.
  using Arrived = std::function<void(bool ok)>;
  void Await(grpc::AsyncGenericService* service, grpc::ServerCompletionQueue* queue,
             Arrived arrived);
  // The call arrived: who answers it, and what to do when nothing follows.
  void Begin(std::shared_ptr<Events> events, std::function<void(GrpcCoreCall*)> done);
  // Nothing more may be asked of gRPC: its queue is about to close.
  void Close();

 private:
  // gRPC's side; gone once nothing follows.
  struct Wire {
    grpc::GenericServerContext context;
    grpc::GenericServerAsyncReaderWriter stream{&context};
  };
  class Tag final : public GrpcTag {
   public:
    Tag(GrpcCoreCall* call, void (GrpcCoreCall::*react)(bool)) : call_(call), react_(react) {}
    void Run(bool ok) override { (call_->*react_)(ok); }

   private:
    GrpcCoreCall* const call_;
    void (GrpcCoreCall::*const react_)(bool);
  };

  void OnArrived(bool ok);
  void OnLeft(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  void OnFinished(bool ok);
  // What was asked of gRPC came back; the last one ends this object.
  void Settle();
  // Starts the next write, or the end when all is written.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ending_ || over_; }

  Tag arrived_tag_, left_tag_, read_tag_, write_tag_, finish_tag_;

  // The engine's thread only.
  Arrived arrived_;
  std::shared_ptr<Events> events_;
  std::function<void(GrpcCoreCall*)> done_;
  std::shared_ptr<GrpcCall> self_;  // while gRPC may come back
  grpc::ByteBuffer incoming_;       // of the read in flight

  absl::Mutex mu_;
  std::unique_ptr<Wire> wire_ ABSL_GUARDED_BY(mu_);
  std::deque<grpc::ByteBuffer> queue_ ABSL_GUARDED_BY(mu_);
  int asked_ ABSL_GUARDED_BY(mu_) = 0;  // of gRPC and not come back yet
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;    // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mu_) = false;  // the end was asked for
  bool over_ ABSL_GUARDED_BY(mu_) = false;      // nothing more may be asked for
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace deltamesh
