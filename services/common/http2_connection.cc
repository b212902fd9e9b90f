#include "services/common/http2_connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "services/common/grpc_wire.h"

namespace deltamesh {
namespace {

constexpr uint32_t kStreamsMax = 4096;
constexpr size_t kHeaderBytesMax = 16 << 10;      // of one request
constexpr int32_t kStreamWindow = 1 << 20;        // bytes a client may send before they are taken
constexpr int32_t kConnectionWindow = 4 << 20;    // of all its streams
constexpr size_t kOutMax = 256 << 10;             // made ahead of the socket
constexpr int64_t kArrivingBytesMax = 1LL << 30;  // of the messages of all connections
constexpr auto kHandshakeMax = std::chrono::seconds(20);
constexpr size_t kArrivedKept = 64 << 10;  // memory a stream keeps between messages

nghttp2_nv Field(std::string_view name, std::string_view value) {
  // nghttp2 copies both before the call that takes them returns.
  return {reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
          reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())), name.size(), value.size(),
          NGHTTP2_NV_FLAG_NONE};
}

std::string_view View(const uint8_t* bytes, size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

Http2Clock::duration ToChrono(absl::Duration d) { return absl::ToChronoNanoseconds(d); }

// Status and trailing metadata of a call that ended.
class Ending {
 public:
  explicit Ending(const Http2Call& call)
      : code_(std::to_string(call.status().error_code())),
        message_(WriteGrpcMessage(call.status().error_message())),
        trailing_(call.trailing()) {}

  void AddTo(std::vector<nghttp2_nv>* fields) const {
    fields->push_back(Field("grpc-status", code_));
    if (!message_.empty()) fields->push_back(Field("grpc-message", message_));
    for (const auto& [name, value] : trailing_) fields->push_back(Field(name, value));
  }

 private:
  const std::string code_, message_;
  const GrpcCall::Metadata trailing_;
};

}  // namespace

// nghttp2's events. None of them may end the session or a connection: who called into nghttp2 is still in
// there.
struct Http2Connection::Callbacks {
  static Http2Connection& Of(void* user) { return *static_cast<Http2Connection*>(user); }

  static int OnBeginHeaders(nghttp2_session* session, const nghttp2_frame* frame, void* user) {
    if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
    Http2Connection& c = Of(user);
    const int32_t id = frame->hd.stream_id;
    Stream& s = c.streams_[id];
    s.call = std::make_shared<Http2Call>(c.shared_->inbox, c.peer_, id);
    s.call->SetOwner(&c);
    nghttp2_session_set_stream_user_data(session, id, &s);
    return 0;
  }
  static int OnHeader(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                      size_t name_bytes, const uint8_t* value, size_t value_bytes, uint8_t,
                      void* user) {
    Stream* s = Of(user).Find(frame->hd.stream_id);
    if (s == nullptr) return 0;
    return Of(user).OnHeader(*s, View(name, name_bytes), View(value, value_bytes));
  }
  static int OnFrame(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    Http2Connection& c = Of(user);
    if (frame->hd.type == NGHTTP2_SETTINGS) c.shaken_ = true;
    if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
    Stream* s = c.Find(frame->hd.stream_id);
    if (s == nullptr) return 0;
    if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) s->client_done = true;
    if (frame->hd.type == NGHTTP2_HEADERS && !s->begun) c.OnRequest(*s);
    if (s->client_done) c.Deliver(*s);
    return 0;
  }
  static int OnData(nghttp2_session*, uint8_t, int32_t id, const uint8_t* bytes, size_t size,
                    void* user) {
    Http2Connection& c = Of(user);
    if (Stream* s = c.Find(id)) {
      c.OnBytes(*s, View(bytes, size));
    } else {
      nghttp2_session_consume_connection(c.session_, size);
    }
    return 0;
  }
  static int OnSent(nghttp2_session* session, const nghttp2_frame* frame, void* user) {
    if (frame->hd.type != NGHTTP2_HEADERS || !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM)) return 0;
    Stream* s = Of(user).Find(frame->hd.stream_id);
    // What else the client would send is not wanted.
    if (s != nullptr && !s->client_done) {
      nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id, NGHTTP2_NO_ERROR);
    }
    return 0;
  }
  static int OnClosed(nghttp2_session*, int32_t id, uint32_t, void* user) {
    Of(user).OnStreamClosed(id);
    return 0;
  }
  static ssize_t OnProduce(nghttp2_session*, int32_t id, uint8_t* out, size_t most, uint32_t* flags,
                           nghttp2_data_source*, void* user) {
    Stream* s = Of(user).Find(id);
    if (s == nullptr) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
    return Of(user).Produce(*s, out, most, flags);
  }
};

void Http2Connection::Prepare(Http2Shared* shared) {
  CHECK(nghttp2_session_callbacks_new(&shared->callbacks) == 0 &&
            nghttp2_option_new(&shared->nghttp2_options) == 0,
        "no memory");
  nghttp2_session_callbacks* c = shared->callbacks;
  nghttp2_session_callbacks_set_on_begin_headers_callback(c, &Callbacks::OnBeginHeaders);
  nghttp2_session_callbacks_set_on_header_callback(c, &Callbacks::OnHeader);
  nghttp2_session_callbacks_set_on_frame_recv_callback(c, &Callbacks::OnFrame);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(c, &Callbacks::OnData);
  nghttp2_session_callbacks_set_on_frame_send_callback(c, &Callbacks::OnSent);
  nghttp2_session_callbacks_set_on_stream_close_callback(c, &Callbacks::OnClosed);
  nghttp2_option_set_no_auto_window_update(shared->nghttp2_options, 1);
}

Http2Connection::Http2Connection(int socket, std::string peer, Http2Shared* shared)
    : socket_(socket),
      peer_(std::move(peer)),
      shared_(shared),
      heard_(shared->now),
      begun_(shared->now) {
  CHECK(
      nghttp2_session_server_new2(&session_, shared->callbacks, this, shared->nghttp2_options) == 0,
      "no memory");
  const std::array<nghttp2_settings_entry, 3> settings = {
      {{NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, kStreamsMax},
       {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kStreamWindow},
       {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, kHeaderBytesMax}}};
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings.data(), settings.size());
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
}

Http2Connection::~Http2Connection() {
  for (auto& [id, s] : streams_) End(s);
  nghttp2_session_del(session_);
  ::close(socket_);
}

bool Http2Connection::OnReadable(char* buffer, size_t size) {
  const ssize_t got = ::recv(socket_, buffer, size, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) return false;
  heard_ = shared_->now;
  awaits_ping_ = false;
  const auto bytes = static_cast<size_t>(got);
  // Anything but `bytes` is a breach that nghttp2 has answered already, if it could.
  const bool fine = nghttp2_session_mem_recv(session_, reinterpret_cast<uint8_t*>(buffer), bytes) ==
                    static_cast<ssize_t>(bytes);
  if (!fine) Flush();
  return fine;
}

bool Http2Connection::Flush() {
  while (true) {
    while (out_.size() - sent_ < kOutMax) {
      const uint8_t* bytes = nullptr;
      const ssize_t made = nghttp2_session_mem_send(session_, &bytes);
      if (made < 0) return false;
      if (made == 0) break;
      out_.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(made));
    }
    if (out_.empty()) break;
    const ssize_t put = ::send(socket_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      if (errno != EAGAIN) return false;
      out_.erase(0, std::exchange(sent_, 0));
      return true;
    }
    sent_ += static_cast<size_t>(put);
    if (sent_ < out_.size()) continue;
    out_.clear();
    sent_ = 0;
  }
  return nghttp2_session_want_read(session_) != 0 || nghttp2_session_want_write(session_) != 0;
}

int Http2Connection::OnHeader(Stream& s, std::string_view name, std::string_view value) {
  s.header_bytes += name.size() + value.size() + 32;  // as HTTP/2 counts them
  if (s.header_bytes > kHeaderBytesMax) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  if (name == ":path") {
    s.method = value;
  } else if (name == ":method") {
    s.verb = value;
  } else if (name == "content-type") {
    s.content_type = value;
  } else if (name == "grpc-timeout") {
    s.timeout = value;
  }
  return 0;
}

void Http2Connection::OnRequest(Stream& s) {
  s.begun = true;
  if (s.verb != "POST") return Refuse(s, "405");
  if (!s.content_type.starts_with("application/grpc")) return Refuse(s, "415");
  s.call->SetMethod(std::move(s.method));
  if (!s.timeout.empty()) {
    const auto timeout = ReadGrpcTimeout(s.timeout);
    if (!timeout) {
      s.call->Finish({grpc::StatusCode::INTERNAL, "grpc-timeout: is malformed"});
      return;
    }
    s.deadline = shared_->now +
                 std::min<std::chrono::nanoseconds>(*timeout, std::chrono::hours(24 * 365 * 10));
    s.call->SetDeadline(std::chrono::system_clock::now() +
                        std::chrono::duration_cast<std::chrono::system_clock::duration>(*timeout));
  }
  s.events = shared_->take(s.call);
}

void Http2Connection::OnBytes(Stream& s, std::string_view bytes) {
  s.held += bytes.size();
  if (s.arrived.empty()) bytes.remove_prefix(Tell(s, bytes));
  if (!bytes.empty()) {
    s.arrived += bytes;
    shared_->arriving_bytes += static_cast<int64_t>(bytes.size());
    if (shared_->arriving_bytes > kArrivingBytesMax) {
      s.call->Abort({grpc::StatusCode::RESOURCE_EXHAUSTED,
                     "the server has too many messages that have not arrived whole; retry later"});
    }
  }
  Deliver(s);
}

size_t Http2Connection::Tell(Stream& s, std::string_view bytes) {
  if (s.events == nullptr || bytes.size() < kGrpcPrefixBytes) return 0;
  const GrpcPrefix prefix = ReadGrpcPrefix(bytes.data());
  if (prefix.compressed) {
    s.call->Abort({grpc::StatusCode::UNIMPLEMENTED,
                   "the message is compressed; send it without compression (identity)"});
    return 0;
  }
  if (prefix.bytes > shared_->options.message_bytes_max) {
    s.call->Abort({grpc::StatusCode::RESOURCE_EXHAUSTED,
                   absl::StrFormat("the message has %d bytes; this server takes at most %d",
                                   prefix.bytes, shared_->options.message_bytes_max)});
    return 0;
  }
  const size_t whole = kGrpcPrefixBytes + prefix.bytes;
  if (bytes.size() < whole || !s.call->TakeRead()) return 0;
  s.events->OnMessage(bytes.substr(kGrpcPrefixBytes, prefix.bytes));
  return whole;
}

void Http2Connection::Deliver(Stream& s) {
  size_t told = 0;
  while (told < s.arrived.size()) {
    const size_t bytes = Tell(s, std::string_view(s.arrived).substr(told));
    if (bytes == 0) break;
    told += bytes;
  }
  if (told > 0) {
    shared_->arriving_bytes -= static_cast<int64_t>(told);
    s.arrived.erase(0, told);
    if (s.arrived.empty() && s.arrived.capacity() > kArrivedKept) std::string().swap(s.arrived);
  }
  GiveBack(s);
  // A part of a message that never comes whole is none.
  const bool more = s.arrived.size() >= kGrpcPrefixBytes &&
                    s.arrived.size() - kGrpcPrefixBytes >= ReadGrpcPrefix(s.arrived.data()).bytes;
  if (s.client_done && !more && s.events != nullptr && s.call->TakeRead()) {
    s.events->OnMessagesEnd();
  }
}

// The client may send as much again as is told, and the rest of a message that is awaited.
void Http2Connection::GiveBack(Stream& s) {
  const bool awaited = s.call->WantsRead();
  const size_t keep = awaited ? 0 : std::min(s.arrived.size(), s.held);
  if (s.held == keep) return;
  nghttp2_session_consume(session_, s.call->stream(), s.held - keep);
  s.held = keep;
}

void Http2Connection::Tend(Http2Call* call) {
  Stream* s = Find(call->stream());
  if (s == nullptr || s->ended) {
    call->Look();
    return;
  }
  const Http2Call::Wants wants = call->Look();
  if (wants.aborted && (wants.torn || (s->answering && !CanSend(*s)))) return Reset(*s);
  if (wants.head && !s->answering) {
    Answer(*s, wants.end);
  } else if (wants.data) {
    nghttp2_session_resume_data(session_, call->stream());
  }
  if (wants.read) Deliver(*s);
}

bool Http2Connection::CanSend(const Stream& s) const {
  const int32_t id = s.call->stream();
  return !blocked() && nghttp2_session_get_remote_window_size(session_) > 0 &&
         nghttp2_session_get_stream_remote_window_size(session_, id) > 0;
}

void Http2Connection::Refuse(Stream& s, const char* http_status) {
  s.answering = s.ended = true;
  const nghttp2_nv field = Field(":status", http_status);
  nghttp2_submit_response(session_, s.call->stream(), &field, 1, nullptr);
}

void Http2Connection::Answer(Stream& s, bool only_end) {
  s.answering = true;
  std::vector<nghttp2_nv> fields = {Field(":status", "200"),
                                    Field("content-type", "application/grpc")};
  if (only_end) {
    s.ended = true;
    const Ending ending(*s.call);
    ending.AddTo(&fields);
    nghttp2_submit_response(session_, s.call->stream(), fields.data(), fields.size(), nullptr);
    return;
  }
  nghttp2_data_provider data;
  data.source.ptr = nullptr;
  data.read_callback = &Callbacks::OnProduce;
  nghttp2_submit_response(session_, s.call->stream(), fields.data(), fields.size(), &data);
}

ssize_t Http2Connection::Produce(Stream& s, uint8_t* out, size_t most, uint32_t* flags) {
  bool last = false;
  const size_t bytes = s.call->Take(reinterpret_cast<char*>(out), most, &last);
  if (last) {
    *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
    s.ended = true;
    std::vector<nghttp2_nv> fields;
    const Ending ending(*s.call);
    ending.AddTo(&fields);
    nghttp2_submit_trailer(session_, s.call->stream(), fields.data(), fields.size());
    return static_cast<ssize_t>(bytes);
  }
  if (bytes == 0) return NGHTTP2_ERR_DEFERRED;
  return static_cast<ssize_t>(bytes);
}

void Http2Connection::Reset(Stream& s) {
  nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, s.call->stream(), NGHTTP2_CANCEL);
  // A client that reads nothing would keep the call until the connection ends.
  const int32_t id = s.call->stream();
  nghttp2_session_set_stream_user_data(session_, id, nullptr);
  OnStreamClosed(id);
}

void Http2Connection::OnStreamClosed(int32_t id) {
  auto node = streams_.extract(id);
  if (node.empty()) return;
  Stream& s = node.mapped();
  if (s.held > 0) nghttp2_session_consume_connection(session_, s.held);
  End(s);
}

void Http2Connection::End(Stream& s) {
  const bool wanted = s.call->TakeRead();
  s.call->Close();
  s.call->SetOwner(nullptr);
  shared_->arriving_bytes -= static_cast<int64_t>(s.arrived.size());
  if (s.events == nullptr) return;
  if (!s.ended) Cancel(s);
  if (wanted) s.events->OnMessagesEnd();
  s.events->OnDone();
}

void Http2Connection::Cancel(Stream& s) {
  if (!std::exchange(s.cancelled, true)) s.events->OnCancelled();
}

bool Http2Connection::Tick() {
  const Http2Clock::time_point now = shared_->now;
  for (auto& [id, s] : streams_) {
    if (s.deadline > now) continue;
    s.deadline = Http2Clock::time_point::max();
    s.call->Abort({grpc::StatusCode::DEADLINE_EXCEEDED, "the call's deadline passed"});
    if (s.events != nullptr && !s.ended) Cancel(s);
  }
  if (!shaken_ && now - begun_ > kHandshakeMax) return false;
  if (awaits_ping_) return now - pinged_ < ToChrono(shared_->options.keepalive_timeout);
  if (now - heard_ >= ToChrono(shared_->options.keepalive_time)) {
    nghttp2_submit_ping(session_, NGHTTP2_FLAG_NONE, nullptr);
    awaits_ping_ = true;
    pinged_ = now;
  }
  return true;
}

void Http2Connection::GoAway() {
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_), NGHTTP2_NO_ERROR,
                        nullptr, 0);
}

void Http2Connection::CancelAll() {
  while (!streams_.empty()) Reset(streams_.begin()->second);
}

}  // namespace deltamesh
