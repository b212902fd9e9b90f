// Mesh.Link over real sockets: order, bounds, broken streams, dialling again, health and reflection.
#include <gtest/gtest.h>

#include <atomic>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "health/v1/health.grpc.pb.h"
#include "runtime/base/status.h"
#include "services/common/grpc_server.h"
#include "services/common/link_client.h"
#include "services/common/link_server.h"
#include "services/common/mailbox.h"

namespace deltamesh {
namespace {

struct Event {
  char kind = 0;  // o, m, c
  LinkId link = 0;
  mesh::WorkerMessage worker;
  mesh::RouterMessage router;
  absl::Status status;
};

class Inbox {
 public:
  explicit Inbox(size_t capacity = 100000) : box_(capacity) {}
  bool Push(Event event) { return box_.Push(std::move(event)); }
  // The next event; fails the test after ten seconds.
  Event Next() {
    const absl::Time until = absl::Now() + absl::Seconds(10);
    while (ready_.empty() && absl::Now() < until) {
      for (Event& event : box_.TakeAll(absl::Milliseconds(100))) ready_.push_back(std::move(event));
    }
    if (ready_.empty()) {
      ADD_FAILURE() << "no event";
      return {};
    }
    Event event = std::move(ready_.front());
    ready_.pop_front();
    return event;
  }

 private:
  Mailbox<Event> box_;
  std::deque<Event> ready_;
};

class LinkTest : public ::testing::Test {
 protected:
  void StartServer(const std::string& listen = "127.0.0.1:0") {
    links_ = std::make_unique<LinkServer>(
        options_, LinkServerEvents{[this](LinkId l, const std::string&) {
                                     at_router_.Push({'o', l});
                                   },
                                   [this](LinkId l, mesh::WorkerMessage m) {
                                     absl::MutexLock reading(&reading_);
                                     return accept_ && at_router_.Push({'m', l, std::move(m)});
                                   },
                                   [this](LinkId l, absl::Status s) {
                                     at_router_.Push({'c', l, {}, {}, std::move(s)});
                                   }});
    GrpcServerOptions server;
    server.listen = listen;
    auto started = GrpcServer::Start(server, {links_->service()});
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }
  void StopServer() {
    server_.reset();
    links_.reset();
  }
  void StartClient(std::vector<std::string> targets) {
    client_ = std::make_unique<LinkClient>(
        targets, options_,
        LinkClientEvents{[this](LinkId l, const std::string&) {
                           at_worker_.Push({'o', l});
                         },
                         [this](LinkId l, mesh::RouterMessage m) {
                           return at_worker_.Push({'m', l, {}, std::move(m)});
                         },
                         [this](LinkId l, absl::Status s) {
                           at_worker_.Push({'c', l, {}, {}, std::move(s)});
                         }});
    client_->Start();
  }
  void TearDown() override {
    client_.reset();
    StopServer();
  }
  static mesh::WorkerMessage Finished(uint32_t n) {
    mesh::WorkerMessage message;
    message.mutable_prefill_finished()->set_attempt(n);
    return message;
  }
  static mesh::RouterMessage View(uint64_t n) {
    mesh::RouterMessage message;
    message.mutable_view()->set_epoch(n);
    return message;
  }

  LinkOptions options_;
  Inbox at_router_, at_worker_;
  std::atomic<bool> accept_ = true;
  absl::Mutex reading_;  // a test that holds it keeps the router from reading on
  std::unique_ptr<LinkServer> links_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<LinkClient> client_;
};

TEST_F(LinkTest, CarriesMessagesInOrderBothWays) {
  StartServer();
  StartClient({server_->address()});
  const LinkId worker = at_worker_.Next().link;
  const Event opened = at_router_.Next();
  ASSERT_EQ(opened.kind, 'o');
  for (uint32_t i = 0; i < 1000; ++i) {
    ASSERT_TRUE(client_->Send(worker, Finished(i)));
    ASSERT_TRUE(links_->Send(opened.link, View(i)));
  }
  for (uint32_t i = 0; i < 1000; ++i) {
    ASSERT_EQ(at_router_.Next().worker.prefill_finished().attempt(), i);
    ASSERT_EQ(at_worker_.Next().router.view().epoch(), i);
  }
}

TEST_F(LinkTest, ClosingDeliversWhatWasQueuedAndTheReason) {
  StartServer();
  StartClient({server_->address()});
  const LinkId worker = at_worker_.Next().link;
  const LinkId link = at_router_.Next().link;
  for (uint64_t i = 0; i < 50; ++i) links_->Send(link, View(i));
  links_->Close(link, FailedPrecondition("digest: ours is a, yours is b"));
  EXPECT_FALSE(links_->Send(link, View(99)));
  for (uint64_t i = 0; i < 50; ++i) ASSERT_EQ(at_worker_.Next().router.view().epoch(), i);
  const Event closed = at_worker_.Next();
  EXPECT_EQ(closed.kind, 'c');
  EXPECT_EQ(closed.link, worker);
  EXPECT_EQ(closed.status, FailedPrecondition("digest: ours is a, yours is b"));
  EXPECT_FALSE(client_->Send(worker, Finished(1)));
  EXPECT_EQ(at_router_.Next().kind, 'c');
  const Event again = at_worker_.Next();  // dialled anew, under a new name
  EXPECT_EQ(again.kind, 'o');
  EXPECT_NE(again.link, worker);
}

TEST_F(LinkTest, WorkerDialsUntilTheRouterIsThereAndAgainAfterItDied) {
  StartServer();
  const std::string address = server_->address();
  StopServer();
  StartClient({address});
  absl::SleepFor(absl::Milliseconds(300));
  StartServer(address);
  EXPECT_EQ(at_worker_.Next().kind, 'o');
  EXPECT_EQ(at_router_.Next().kind, 'o');
  StopServer();
  EXPECT_EQ(at_worker_.Next().kind, 'c');
  EXPECT_EQ(at_router_.Next().kind, 'c');
  StartServer(address);
  EXPECT_EQ(at_worker_.Next().kind, 'o');
}

// As of a worker that the router refuses, one of its name being newer or its model another.
TEST_F(LinkTest, AStreamThatTheRouterSoonEndsIsDialledWithGrowingPauses) {
  StartServer();
  StartClient({server_->address()});
  const absl::Time until = absl::Now() + absl::Milliseconds(1200);
  int opened = 0;
  while (absl::Now() < until) {
    const Event event = at_router_.Next();
    if (event.kind != 'o') continue;
    ++opened;
    links_->Close(event.link, Aborted("another took its place"));
  }
  EXPECT_GE(opened, 3);
  EXPECT_LE(opened, 6) << "after 0, 0.1, 0.3, 0.7 and 1.5 s, and one that was awaited";
}

TEST_F(LinkTest, SeveralRouters) {
  StartServer();
  auto first = std::move(server_);
  auto first_links = std::move(links_);
  StartServer();
  StartClient({first->address(), server_->address()});
  const LinkId a = at_worker_.Next().link;
  const LinkId b = at_worker_.Next().link;
  EXPECT_NE(a, b);
  client_.reset();
  first.reset();
}

TEST_F(LinkTest, FullInboxClosesTheLink) {
  StartServer();
  StartClient({server_->address()});
  const LinkId worker = at_worker_.Next().link;
  at_router_.Next();
  accept_ = false;
  client_->Send(worker, Finished(1));
  const Event closed = at_worker_.Next();
  EXPECT_EQ(closed.kind, 'c');
  EXPECT_EQ(closed.status.code(), absl::StatusCode::kResourceExhausted);
  accept_ = true;
}

TEST_F(LinkTest, FullQueueClosesTheLinkInsteadOfGrowing) {
  options_.queue_max = 8;
  StartServer();
  StartClient({server_->address()});
  at_worker_.Next();
  const LinkId link = at_router_.Next().link;
  mesh::RouterMessage big;  // fills the socket soon
  for (int i = 0; i < 1 << 20; ++i) big.mutable_start_prefill()->add_tokens(1 << 20);
  bool refused = false;
  for (int i = 0; i < 200 && !refused; ++i) refused = !links_->Send(link, big);
  EXPECT_TRUE(refused);
  EXPECT_EQ(at_router_.Next().kind, 'c');
}

TEST_F(LinkTest, StopReportsEveryLinkClosed) {
  StartServer();
  StartClient({server_->address()});
  at_worker_.Next();
  at_router_.Next();
  client_->Stop();
  EXPECT_EQ(at_worker_.Next().kind, 'c');
  EXPECT_EQ(at_router_.Next().kind, 'c');
}

// What the worker said last is partly in its queue and partly on the way when it ends.
TEST_F(LinkTest, StopDeliversWhatWasSent) {
  StartServer();
  StartClient({server_->address()});
  const LinkId worker = at_worker_.Next().link;
  ASSERT_EQ(at_router_.Next().kind, 'o');
  mesh::WorkerMessage big;  // more than a stream takes before the router reads
  mesh::SequenceOutput* output = big.mutable_outputs()->add_sequences();
  for (int i = 0; i < 1 << 18; ++i) output->add_tokens(1 << 20);
  for (uint32_t i = 0; i < 8; ++i) {
    output->set_attempt(i);
    ASSERT_TRUE(client_->Send(worker, big));
  }
  ASSERT_TRUE(client_->Send(worker, Finished(8)));
  client_->Stop();
  EXPECT_FALSE(client_->Send(worker, Finished(9)));
  for (uint32_t i = 0; i < 8; ++i) {
    const Event event = at_router_.Next();
    ASSERT_EQ(event.kind, 'm') << "message " << i << ": " << event.status;
    ASSERT_EQ(event.worker.outputs().sequences(0).attempt(), i);
  }
  EXPECT_EQ(at_router_.Next().worker.prefill_finished().attempt(), 8u);
  EXPECT_EQ(at_router_.Next().kind, 'c');
  EXPECT_EQ(at_worker_.Next().kind, 'c');
}

// One that hangs holds a worker up for so long and no longer.
TEST_F(LinkTest, StopGivesUpOnARouterThatReadsNothing) {
  StartServer();
  StartClient({server_->address()});
  const LinkId worker = at_worker_.Next().link;
  ASSERT_EQ(at_router_.Next().kind, 'o');
  absl::MutexLock hang(&reading_);
  for (uint32_t i = 0; i < 2; ++i) ASSERT_TRUE(client_->Send(worker, Finished(i)));
  client_->Stop(absl::Milliseconds(50));
  EXPECT_EQ(at_worker_.Next().kind, 'c');
}

TEST_F(LinkTest, HealthFollowsServingAndPortsAreExclusive) {
  StartServer();
  auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  auto check = [&] {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckResponse response;
    EXPECT_TRUE(stub->Check(&context, {}, &response).ok());
    return response.status();
  };
  EXPECT_EQ(check(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  server_->SetServing(true);
  EXPECT_EQ(check(), grpc::health::v1::HealthCheckResponse::SERVING);
  GrpcServerOptions same;
  same.listen = server_->address();
  const auto second = GrpcServer::Start(same, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  GrpcServerOptions bad;
  bad.listen = "nowhere";
  EXPECT_EQ(GrpcServer::Start(bad, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace deltamesh
