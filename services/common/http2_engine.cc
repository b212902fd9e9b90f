#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/status.h"
#include "services/common/grpc_engine.h"
#include "services/common/http2_connection.h"

namespace deltamesh {
namespace {

constexpr int kEventsMax = 64;           // of one turn
constexpr size_t kReadBytes = 64 << 10;  // at once from one connection
constexpr size_t kConnectionsMax = 16384;
constexpr auto kTick =
    std::chrono::milliseconds(250);  // deadlines and silent peers are noticed so late
constexpr auto kLastTurn = absl::Milliseconds(20);  // while the last calls end

std::string PeerName(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size());
    return absl::StrFormat("ipv4:%s:%d", text.data(), ntohs(v4.sin_port));
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size());
  return absl::StrFormat("ipv6:[%s]:%d", text.data(), ntohs(v6.sin6_port));
}

int PortOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  // The port is at one place in both families.
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// -1 when it cannot be.
int ListenAt(const addrinfo& at, int port) {
  sockaddr_storage address{};
  std::memcpy(&address, at.ai_addr, at.ai_addrlen);
  reinterpret_cast<sockaddr_in&>(address).sin_port = htons(static_cast<uint16_t>(port));
  const int s = ::socket(at.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (s < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (at.ai_family == AF_INET6) setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (::bind(s, reinterpret_cast<sockaddr*>(&address), at.ai_addrlen) == 0 &&
      ::listen(s, SOMAXCONN) == 0) {
    return s;
  }
  ::close(s);
  return -1;
}

class Http2Engine final : public GrpcEngine, public Http2Inbox {
 public:
  Http2Engine(const GrpcPortOptions& options, Take take) {
    shared_.options = options;
    shared_.take = std::move(take);
    shared_.inbox = this;
    shared_.now = Http2Clock::now();
    Http2Connection::Prepare(&shared_);
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(epoll_ >= 0 && wake_ >= 0, "no descriptors are left: %s", strerror(errno));
    Watch(EPOLL_CTL_ADD, wake_, EPOLLIN, &wake_);
  }
  ~Http2Engine() override {
    connections_.clear();
    StopListening();
    ::close(wake_);
    ::close(epoll_);
    nghttp2_session_callbacks_del(shared_.callbacks);
    nghttp2_option_del(shared_.nghttp2_options);
  }

  absl::Status Listen();
  int port() const override { return port_; }
  bool Poll(absl::Duration wait) override;
  void Wake() override;
  void Shutdown(absl::Duration grace) override;
  void Touch(std::shared_ptr<Http2Call> call) override;

 private:
  using Calls = std::vector<std::shared_ptr<Http2Call>>;

  void Watch(int operation, int descriptor, uint32_t events, void* what) const {
    epoll_event event{};
    event.events = events;
    event.data.ptr = what;
    epoll_ctl(epoll_, operation, descriptor, &event);
  }
  void WatchListeners(uint32_t events) {
    for (const int s : listeners_) Watch(EPOLL_CTL_MOD, s, events, &listeners_);
  }
  void StopListening() {
    for (const int s : listeners_) ::close(s);
    listeners_.clear();
  }
  void Accept();
  void Serve(Http2Connection* c, uint32_t events);
  void Tick();
  // Carries to the sockets what is wanted of them.
  void Settle();
  void List(Http2Connection* c) {
    if (!std::exchange(c->listed, true)) to_flush_.push_back(c);
  }
  void Flush(Http2Connection* c);
  void Drop(Http2Connection* c);

  struct Served {
    std::unique_ptr<Http2Connection> connection;
    bool awaits_room = false;  // for more bytes in its socket
  };

  Http2Shared shared_;
  int epoll_ = -1, wake_ = -1, port_ = 0;
  std::vector<int> listeners_;
  bool paused_ = false;  // no descriptors were left for more connections
  std::array<char, kReadBytes> buffer_;
  absl::flat_hash_map<Http2Connection*, Served> connections_;
  std::vector<Http2Connection*> to_flush_;
  Calls tending_;
  Http2Clock::time_point next_tick_ = Http2Clock::now();

  std::atomic<std::thread::id> poller_;
  std::atomic<bool> wake_pending_ = false;
  absl::Mutex mu_;
  Calls touched_ ABSL_GUARDED_BY(mu_);
};

absl::Status Http2Engine::Listen() {
  const std::string& listen = shared_.options.listen;
  const size_t colon = listen.rfind(':');
  std::string host = listen.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  int port = 0;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), listen.c_str() + colon + 1, &hints,
                  &found) == 0) {
    port = ntohs(reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_port);
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      const int s = ListenAt(*at, port);
      if (s < 0) continue;
      listeners_.push_back(s);
      port = PortOf(s);
    }
    freeaddrinfo(found);
  }
  if (listeners_.empty()) {
    return Unavailable("gRPC: cannot listen on %s; is the port taken or the address not ours?",
                       listen);
  }
  port_ = port;
  for (const int s : listeners_) Watch(EPOLL_CTL_ADD, s, EPOLLIN, &listeners_);
  return absl::OkStatus();
}

void Http2Engine::Touch(std::shared_ptr<Http2Call> call) {
  {
    absl::MutexLock lock(&mu_);
    touched_.push_back(std::move(call));
  }
  Wake();
}

void Http2Engine::Wake() {
  if (poller_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
  if (wake_pending_.exchange(true)) return;
  const uint64_t one = 1;
  // It cannot be full: one of these is on its way at most.
  CHECK(::write(wake_, &one, sizeof(one)) == sizeof(one), "eventfd: %s", strerror(errno));
}

bool Http2Engine::Poll(absl::Duration wait) {
  poller_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  Settle();
  const absl::Duration most =
      std::clamp(absl::FromChrono(next_tick_ - shared_.now), absl::ZeroDuration(), wait);
  std::array<epoll_event, kEventsMax> events;
  const int ready = epoll_wait(
      epoll_, events.data(), kEventsMax,
      static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(most, absl::Milliseconds(1)))));
  shared_.now = Http2Clock::now();
  for (int i = 0; i < ready; ++i) {
    void* const what = events[static_cast<size_t>(i)].data.ptr;
    if (what == &wake_) {
      uint64_t count = 0;
      (void)!::read(wake_, &count, sizeof(count));
      wake_pending_.exchange(false);
    } else if (what == &listeners_) {
      Accept();
    } else {
      Serve(static_cast<Http2Connection*>(what), events[static_cast<size_t>(i)].events);
    }
  }
  if (shared_.now >= next_tick_) Tick();
  Settle();
  return ready > 0;
}

void Http2Engine::Accept() {
  for (const int listener : listeners_) {
    for (int i = 0; i < kEventsMax; ++i) {
      sockaddr_storage address{};
      socklen_t size = sizeof(address);
      const int s = accept4(listener, reinterpret_cast<sockaddr*>(&address), &size,
                            SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (s < 0) {
        paused_ = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (paused_) return WatchListeners(0);  // until the next tick
        break;
      }
      if (connections_.size() >= kConnectionsMax) {
        ::close(s);
        continue;
      }
      const int on = 1;
      const auto unacknowledged_max =
          static_cast<unsigned>(absl::ToInt64Milliseconds(shared_.options.keepalive_timeout));
      setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      setsockopt(s, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_max, sizeof(unacknowledged_max));
      auto connection = std::make_unique<Http2Connection>(s, PeerName(address), &shared_);
      Http2Connection* const c = connection.get();
      connections_[c].connection = std::move(connection);
      Watch(EPOLL_CTL_ADD, s, EPOLLIN, c);
      List(c);
    }
  }
}

void Http2Engine::Serve(Http2Connection* c, uint32_t events) {
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0 &&
      !c->OnReadable(buffer_.data(), buffer_.size())) {
    return Drop(c);
  }
  List(c);
}

void Http2Engine::Tick() {
  next_tick_ = shared_.now + kTick;
  if (std::exchange(paused_, false)) WatchListeners(EPOLLIN);
  std::vector<Http2Connection*> lost;
  for (auto& [c, served] : connections_) {
    if (!c->Tick()) lost.push_back(c);
  }
  for (Http2Connection* c : lost) Drop(c);
  for (auto& [c, served] : connections_) {
    if (c->WantsWrite()) List(c);
  }
}

void Http2Engine::Settle() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      tending_.swap(touched_);
    }
    if (tending_.empty() && to_flush_.empty()) return;
    for (const auto& call : tending_) {
      Http2Connection* const c = call->owner();
      if (c == nullptr) continue;
      c->Tend(call.get());
      List(c);
    }
    tending_.clear();
    while (!to_flush_.empty()) {
      Http2Connection* const c = to_flush_.back();
      to_flush_.pop_back();
      c->listed = false;
      Flush(c);
    }
  }
}

void Http2Engine::Flush(Http2Connection* c) {
  if (!c->Flush()) return Drop(c);
  Served& served = connections_.at(c);
  if (served.awaits_room == c->blocked()) return;
  served.awaits_room = c->blocked();
  Watch(EPOLL_CTL_MOD, c->socket(), c->blocked() ? EPOLLIN | EPOLLOUT : EPOLLIN, c);
}

void Http2Engine::Drop(Http2Connection* c) {
  if (c->listed) std::erase(to_flush_, c);
  auto served = connections_.extract(c);  // closing the socket ends its watch
}

void Http2Engine::Shutdown(absl::Duration grace) {
  poller_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  StopListening();
  Settle();
  for (auto& [c, served] : connections_) {
    c->GoAway();
    List(c);
  }
  const absl::Time until = absl::Now() + grace;
  const auto busy = [this] {
    return std::any_of(connections_.begin(), connections_.end(),
                       [](const auto& each) { return !each.first->idle(); });
  };
  do {
    Poll(std::clamp(until - absl::Now(), absl::ZeroDuration(), kLastTurn));
  } while (busy() && absl::Now() < until);
  for (auto& [c, served] : connections_) {
    c->CancelAll();
    List(c);
  }
  Settle();
  connections_.clear();
  to_flush_.clear();
  Settle();
}

absl::StatusOr<std::unique_ptr<GrpcEngine>> StartHttp2(const GrpcPortOptions& options,
                                                       GrpcEngine::Take take) {
  auto engine = std::make_unique<Http2Engine>(options, std::move(take));
  RETURN_IF_ERROR(engine->Listen());
  return engine;
}

}  // namespace

StartGrpcEngine GrpcOverHttp2() { return &StartHttp2; }

}  // namespace deltamesh
