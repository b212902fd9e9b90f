// The router as a running object: one thread owns the core, a mailbox stands in front of it. Knows no
// gRPC and no HTTP: clients come in through Generate and Cancel, workers through the link events.
//
// The thread can be lent: what waits for the network then runs on it too, and a worker's message becomes a
// client's without waking anybody in between.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/clock.h"
#include "services/common/mailbox.h"
#include "services/common/metrics.h"
#include "services/router/front.h"
#include "services/router/router_core.h"
#include "services/router/router_metrics.h"

namespace deltamesh {

struct RouterServerOptions {
  RouterOptions core;
  int64_t mailbox_max = 65536;  // events waiting for the router's thread
  absl::Duration tick = absl::Milliseconds(50);
};

// Where messages to workers go. Called on the router's thread; must not block.
struct LinkOutput {
  std::function<void(LinkId, const mesh::RouterMessage&)> send;
  std::function<void(LinkId, const absl::Status&)> close;
};

// Other work of the router's thread.
struct RouterWaiter {
  // Waits up to so long for something to do, does it and returns whether there was anything; wake() ends it
  // early.
  std::function<bool(absl::Duration)> wait;
  // From any thread.
  std::function<void()> wake;
};

class RouterServer {
 public:
  // `clock` and `metrics` must outlive this.
  RouterServer(RouterServerOptions options, const Clock* clock, Metrics* metrics);
  ~RouterServer();
  RouterServer(const RouterServer&) = delete;
  RouterServer& operator=(const RouterServer&) = delete;

  // As RouterCore's, on the router's thread. Before Start.
  void OnConcluded(RouterCore::Concluded concluded) { core_.OnConcluded(std::move(concluded)); }
  // Starts the thread, which waits in `waiter`, if there is one. Once.
  void Start(LinkOutput links, RouterWaiter waiter = {});
  // Ends every request with UNAVAILABLE and the thread. Idempotent; later calls are refused.
  void Stop();

  // New requests are refused from now on; running ones go on.
  void Drain();
  // Requests that Generate took and whose sinks have not heard of their end. After Drain it only falls.
  int64_t unfinished() const;
  // Whether a request that came now would be taken, as far as is known without looking at it: asked
  // before costly work on one.
  absl::Status Admits() const;

  // The sink hears of the end, also when the request is refused. Its id must not have been used before.
  void Generate(PreparedRequest request, std::shared_ptr<AnswerSink> sink);
  // Notes a request that was refused before Generate could be asked, for who asks later. Its id must not have
  // been used before. While the router is too busy to hear of it, it is only logged.
  void NoteRefusal(RefusedRequest refusal);
  // The client of this request left: its sink hears nothing more, the request is freed everywhere.
  void Cancel(const RequestId& id);

  // `done` hears the answer exactly once, on the router's thread or, when the call is refused, at once; it
  // must not block. The call's id must not have been used before.
  using SessionDone = std::function<void(SessionAnswered)>;
  void CallSession(SessionCall call, SessionDone done);
  // Its `done` hears CANCELLED unless it has heard something else.
  void CancelSession(const RequestId& id);
  // Calls `ask` on the router's thread, once; with null when the router is too busy or stops.
  void Ask(std::function<void(const RouterCore* core)> ask);

  void OnLinkOpened(LinkId link);
  // False when the mailbox is full: the link cannot be served.
  bool OnLinkMessage(LinkId link, mesh::WorkerMessage message);
  void OnLinkClosed(LinkId link, absl::Status status);

  // As of the last turn of the thread.
  struct Snapshot {
    absl::Status ready = absl::UnavailableError("the router is starting");
    int64_t context_tokens = 0;
    std::string digest;
    RouterGauges gauges;
    absl::Duration retry_after = absl::Seconds(1);  // for who finds no room now
  };
  Snapshot snapshot() const;
  absl::Time now() const { return clock_->Now(); }

 private:
  struct NewRequest {
    PreparedRequest prepared;
    std::shared_ptr<AnswerSink> sink;
  };
  struct ClientLeft {
    RequestId id;
  };
  struct NewSessionCall {
    SessionCall call;
    SessionDone done;
  };
  struct SessionCallLeft {
    RequestId id;
  };
  struct LinkOpened {
    LinkId link;
  };
  struct LinkMessage {
    LinkId link;
    mesh::WorkerMessage message;
  };
  struct LinkClosed {
    LinkId link;
    absl::Status status;
  };
  struct Refused {
    RefusedRequest refusal;
  };
  struct Question {
    std::function<void(const RouterCore* core)> ask;
  };
  using Event = std::variant<NewRequest, ClientLeft, NewSessionCall, SessionCallLeft, LinkOpened,
                             LinkMessage, LinkClosed, Refused, Question>;

  // A request whose client is still there.
  struct Live {
    std::unique_ptr<AnswerStream> answer;
    std::shared_ptr<AnswerSink> sink;
    absl::Time submitted;
    absl::Time last_token;
    int64_t prompt_tokens = 0;
    int64_t cached_tokens = 0;
    SessionId session;  // whose turn it is; empty: nobody's
  };

  // As the mailbox's, and the thread hears of it.
  bool Push(Event&& event);
  bool PushAlways(Event event);
  void Wake();
  // Why the mailbox takes no event.
  absl::Status NotHeard() const;
  // OK, and the request counts as unfinished.
  absl::Status TakeIn();
  void Ended();
  void Loop();
  // What came into the mailbox, waiting for it up to `wait`.
  std::deque<Event> Next(absl::Duration wait);
  void Handle(Event event, absl::Time now);
  void Accept(NewRequest event, absl::Time now);
  void Refuse(NewRequest event, const absl::Status& status, absl::Time now);
  // The same once its request was given away.
  void Refuse(const std::shared_ptr<AnswerSink>& sink, const RefusedRequest& refusal,
              absl::Time now);
  // A turn that is appended: its session's tokens come first.
  void OpenSession(NewRequest event, absl::Time now);
  void OnSession(SessionAnswered answer, absl::Time now);
  void StopSessions();
  void Perform(RouterAction action, absl::Time now);
  void Deliver(ClientTokens tokens, absl::Time now);
  void Complete(const ClientFinished& finished, absl::Time now);
  void Fail(const RequestId& id, const absl::Status& status, absl::Time now);
  void Publish();

  const RouterServerOptions options_;
  const Clock* const clock_;
  RouterMetrics metrics_;
  Mailbox<Event> mailbox_;
  LinkOutput links_;
  RouterWaiter waiter_;
  absl::Time ticked_ = absl::InfinitePast();  // by thread_
  std::thread thread_;

  // The router's thread only.
  RouterCore core_;
  std::map<RequestId, Live> live_;
  std::map<RequestId, NewRequest> opening_;  // wait for their session's tokens
  std::map<RequestId, SessionDone> session_calls_;

  mutable absl::Mutex mu_;
  Snapshot snapshot_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  int64_t unfinished_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace deltamesh
