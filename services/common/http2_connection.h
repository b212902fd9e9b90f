// One HTTP/2 connection of a gRPC port: nghttp2 keeps the protocol's rules, this moves bytes and makes calls
// of streams. No waiting here: the engine says when there is something to read or write.
//
// One thread, the engine's. Bounded: streams, headers, windows, messages, what waits for the socket. What a
// client leaves unread waits in the calls' own queues.
#pragma once

#include <nghttp2/nghttp2.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "services/common/grpc_engine.h"
#include "services/common/http2_call.h"

namespace deltamesh {

using Http2Clock = std::chrono::steady_clock;

// What the connections of a port share.
struct Http2Shared {
  GrpcPortOptions options;
  GrpcEngine::Take take;
  Http2Inbox* inbox = nullptr;
  nghttp2_session_callbacks* callbacks = nullptr;
  nghttp2_option* nghttp2_options = nullptr;
  Http2Clock::time_point now;  // of the turn in progress
  int64_t arriving_bytes = 0;  // of messages that have not wholly arrived
};

class Http2Connection {
 public:
  // Takes the socket, which must not block.
  Http2Connection(int socket, std::string peer, Http2Shared* shared);
  ~Http2Connection();  // ends all its calls
  Http2Connection(const Http2Connection&) = delete;
  Http2Connection& operator=(const Http2Connection&) = delete;

  // Callbacks and options for Http2Shared.
  static void Prepare(Http2Shared* shared);

  int socket() const { return socket_; }
  // One read into `buffer`. False when the connection is over, as for those below.
  bool OnReadable(char* buffer, size_t size);
  // Writes what there is, as far as the socket takes it.
  bool Flush();
  // The socket took no more: Flush when it does.
  bool blocked() const { return sent_ < out_.size(); }
  // The call, one of this connection's, wants something.
  void Tend(Http2Call* call);
  // Ends calls whose time is over; finds out whether the peer is there. Now and then.
  bool Tick();
  // No new calls; no call at all.
  void GoAway();
  void CancelAll();
  bool idle() const { return streams_.empty(); }
  bool WantsWrite() const { return nghttp2_session_want_write(session_) != 0; }
  // In the engine's list of those to flush.
  bool listed = false;

 private:
  struct Stream {
    std::shared_ptr<Http2Call> call;
    std::shared_ptr<GrpcCall::Events> events;
    std::string method, verb, content_type, timeout;
    size_t header_bytes = 0;
    bool begun = false;        // who answers was asked
    bool answering = false;    // the response's head is on its way
    bool ended = false;        // its end is
    bool client_done = false;  // the client sends no more
    bool cancelled = false;    // who answers was told
    std::string arrived;       // and was not told
    size_t held = 0;           // bytes whose part of the windows was not given back
    Http2Clock::time_point deadline = Http2Clock::time_point::max();
  };
  struct Callbacks;

  Stream* Find(int32_t stream) {
    return static_cast<Stream*>(nghttp2_session_get_stream_user_data(session_, stream));
  }
  int OnHeader(Stream& s, std::string_view name, std::string_view value);
  void OnRequest(Stream& s);
  void OnBytes(Stream& s, std::string_view bytes);
  void Deliver(Stream& s);
  // Tells one message that lies whole in `bytes`; its length, 0: there is none.
  size_t Tell(Stream& s, std::string_view bytes);
  void GiveBack(Stream& s);
  void OnStreamClosed(int32_t id);
  // Nothing follows for it.
  void End(Stream& s);
  static void Cancel(Stream& s);
  void Refuse(Stream& s, const char* http_status);
  void Answer(Stream& s, bool only_end);
  ssize_t Produce(Stream& s, uint8_t* out, size_t most, uint32_t* flags);
  void Reset(Stream& s);
  bool CanSend(const Stream& s) const;

  const int socket_;
  const std::string peer_;
  Http2Shared* const shared_;
  nghttp2_session* session_ = nullptr;
  std::map<int32_t, Stream> streams_;
  std::string out_;  // made and not sent
  size_t sent_ = 0;  // of it
  Http2Clock::time_point heard_, begun_, pinged_;
  bool awaits_ping_ = false;
  bool shaken_ = false;  // the client's settings came
};

}  // namespace deltamesh
