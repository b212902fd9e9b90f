#include "runtime/expert/remote_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "deltamesh/mesh/expert.pb.h"
#include "runtime/expert/expert_server.h"
#include "runtime/transfer/inproc_transport.h"
#include "tests/unit/expert/fake_experts.h"

namespace deltamesh {
namespace {

using testing::FakeBatch;
using testing::FakeExperts;
using ::testing::HasSubstr;

constexpr int64_t kExperts = 11, kWidth = 24, kTopK = 4;

// Passes everything on, except what a test takes into its own hands.
class TamperedTransport final : public Transport {
 public:
  explicit TamperedTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  std::function<void(PeerId, MessageType, std::string_view)> on_header;
  std::function<absl::Status()> on_send;             // an error fails the send, the peer stays
  std::function<void(std::string_view)> on_connect;  // before the address is dialled
  std::function<void(PeerId)> on_connected;          // before the caller learns of it

  std::string kind() const override { return inner_->kind(); }
  std::string address() const override { return inner_->address(); }
  std::string lanes() const override { return inner_->lanes(); }
  void SetHandler(MessageType type, MessageHandler* handler) override {
    inner_->SetHandler(type, handler);
  }
  absl::StatusOr<PeerId> Connect(std::string_view address) override {
    if (on_connect) on_connect(address);
    absl::StatusOr<PeerId> peer = inner_->Connect(address);
    if (peer.ok() && on_connected) on_connected(*peer);
    return peer;
  }
  void Disconnect(PeerId peer) override { inner_->Disconnect(peer); }
  void Send(PeerId peer, MessageType type, std::string_view header,
            std::span<const std::byte> payload, std::function<void(absl::Status)> done) override {
    if (on_header) on_header(peer, type, header);
    const absl::Status failure = on_send ? on_send() : absl::OkStatus();
    if (!failure.ok()) return done(failure);
    inner_->Send(peer, type, header, payload, std::move(done));
  }
  TransportStats stats() const override { return inner_->stats(); }

 private:
  const std::unique_ptr<Transport> inner_;
};

// One caller and some shards in one process.
class Mesh {
 public:
  struct Shard {
    ExpertSet set;
    std::unique_ptr<ThreadPool> pool;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<ExpertServer> server;
    ExpertShardInfo info;
    ~Shard() {
      if (server != nullptr) server->Stop();
      transport.reset();
    }
  };

  explicit Mesh(InprocOptions network_options = {}, RemoteExpertsOptions options = {})
      : network(network_options),
        fake(77, 3, kExperts, kWidth, 40),
        local_pool(2),
        local(&fake.set(), &local_pool) {
    auto tampered_transport = std::make_unique<TamperedTransport>(*network.Open("caller"));
    tampered = tampered_transport.get();
    transport = std::move(tampered_transport);
    options.caller = "decode-0";
    options.model_digest = "d1";
    options.experts = kExperts;
    options.width = kWidth;
    if (network_options.delivery == InprocDelivery::kQueued && options.pump == nullptr) {
      options.pump = [this] { return network.DeliverOne(); };
    }
    remote = std::make_unique<RemoteExperts>(transport.get(), options);
  }
  ~Mesh() {
    shards.clear();
    transport.reset();
  }

  // Adds a shard with experts e where e % of == index.
  Shard& Add(int64_t index, int64_t of, ExpertServerOptions options = {.compute_inline = true}) {
    auto shard = std::make_unique<Shard>();
    const std::string name = "shard-" + std::to_string(shards.size());
    shard->set = fake.Shard(index, of);
    shard->pool = std::make_unique<ThreadPool>(1);
    shard->transport = *network.Open(name);
    options.name = name;
    if (options.epoch == 0) options.epoch = 5;
    if (options.model_digest.empty()) options.model_digest = "d1";
    shard->server = std::make_unique<ExpertServer>(shard->transport.get(), &shard->set,
                                                   shard->pool.get(), options);
    shard->info = {.name = name, .epoch = 5, .address = name, .experts = {}};
    for (int32_t e = static_cast<int32_t>(index); e < kExperts; e += static_cast<int32_t>(of)) {
      shard->info.experts.push_back(e);
    }
    shards.push_back(std::move(shard));
    return *shards.back();
  }

  void View(uint64_t epoch = 1) {
    ExpertView view{.epoch = epoch, .shards = {}};
    for (const auto& s : shards) view.shards.push_back(s->info);
    remote->SetView(view);
  }

  absl::Status Run(FakeBatch& b) {
    const auto ticket = remote->Start(b.batch);
    return ticket.ok() ? remote->Finish(*ticket) : ticket.status();
  }

  // Computes the batch in process and compares bits.
  void ExpectExact(const FakeBatch& b) {
    FakeBatch want = b;
    want.batch.x = want.x.data();
    want.batch.ids = want.ids.data();
    want.batch.out = want.out.data();
    ASSERT_TRUE(local.Start(want.batch).ok());
    EXPECT_EQ(std::memcmp(want.out.data(), b.out.data(), b.out.size() * sizeof(float)), 0);
  }

  void ExpectIdle() {
    for (const auto& s : shards) {
      EXPECT_EQ(s->server->stats().queued, 0);
      EXPECT_EQ(s->server->stats().landing_bytes, 0);
    }
  }

  InprocNetwork network;
  FakeExperts fake;
  ThreadPool local_pool;
  LocalExperts local;
  std::unique_ptr<Transport> transport;
  TamperedTransport* tampered;  // the same
  std::unique_ptr<RemoteExperts> remote;
  std::vector<std::unique_ptr<Shard>> shards;
};

TEST(RemoteExperts, BitsEqualInProcessWithOneTwoThreeShards) {
  for (int64_t n = 1; n <= 3; ++n) {
    for (const auto delivery : {InprocDelivery::kInline, InprocDelivery::kQueued}) {
      Mesh mesh({.delivery = delivery, .reorder = true, .seed = 9});
      for (int64_t i = 0; i < n; ++i) mesh.Add(i, n);
      mesh.View();
      EXPECT_TRUE(mesh.remote->complete());
      for (const int64_t tokens : {1, 2, 17, 150}) {
        for (const int64_t layer : {1, 2}) {
          FakeBatch b(static_cast<uint64_t>(tokens), layer, tokens, kTopK, mesh.fake.set());
          const absl::Status s = mesh.Run(b);
          ASSERT_TRUE(s.ok()) << s;
          mesh.ExpectExact(b);
        }
      }
      EXPECT_LE(mesh.remote->stats().calls, static_cast<uint64_t>(n) * 8);  // once per shard
      mesh.ExpectIdle();
    }
  }
}

TEST(RemoteExperts, EachShardIsToldOfEachRequestOnce) {
  Mesh mesh;
  std::map<PeerId, std::vector<std::string>> told;
  mesh.tampered->on_header = [&](PeerId peer, MessageType type, std::string_view header) {
    mesh::ExpertDispatch d;
    ASSERT_TRUE(type == MessageType::kExpertDispatch && d.ParseFromString(std::string(header)));
    told[peer].insert(told[peer].end(), d.requests().begin(), d.requests().end());
  };
  const auto run = [&](int64_t tokens) {
    told.clear();
    FakeBatch b(7, 1, tokens, kTopK, mesh.fake.set());
    ASSERT_TRUE(mesh.Run(b).ok());
    mesh.ExpectExact(b);
  };
  using Names = std::vector<std::string>;
  mesh.Add(0, 2);
  mesh.Add(1, 2);
  mesh.View();
  mesh.remote->Note("a");
  mesh.remote->Note("b");
  run(2500);  // several calls to each shard
  ASSERT_EQ(told.size(), 2u);
  for (const auto& [peer, names] : told) EXPECT_EQ(names, (Names{"a", "b"}));
  run(40);
  for (const auto& [peer, names] : told) EXPECT_EQ(names, Names{});

  // A new view keeps what is known; a shard that joins learns of requests from then on.
  mesh.remote->Note("c");
  mesh.Add(0, 2);
  mesh.View(2);
  run(40);
  ASSERT_EQ(told.size(), 3u);
  Names all;
  for (const auto& [peer, names] : told) all.insert(all.end(), names.begin(), names.end());
  EXPECT_EQ(all, (Names{"c", "c"}));

  for (int i = 0; i < 100; ++i) mesh.remote->Note(std::to_string(i));
  run(40);
  for (const auto& [peer, names] : told) {
    EXPECT_EQ(names.size(), kNotedRequestsMax);
    EXPECT_EQ(names.front(), "36");
    EXPECT_EQ(names.back(), "99");
  }
}

TEST(RemoteExperts, RowsBeyondOneCallAreSplit) {
  Mesh mesh;
  mesh.Add(0, 2);
  mesh.Add(1, 2);
  mesh.View();
  FakeBatch b(3, 1, 2500, kTopK, mesh.fake.set());
  ASSERT_TRUE(mesh.Run(b).ok());
  mesh.ExpectExact(b);
  EXPECT_EQ(mesh.remote->stats().calls, 6u);
}

TEST(RemoteExperts, ShardThreadsAnswerWhileTheCallerWaits) {
  Mesh mesh;
  mesh.Add(0, 2, {});
  mesh.Add(1, 2, {});
  mesh.View();
  for (uint64_t round = 0; round < 30; ++round) {
    FakeBatch b1(round, 1, 20, kTopK, mesh.fake.set()), b2(round + 1, 2, 9, kTopK, mesh.fake.set());
    const auto first = mesh.remote->Start(b1.batch), second = mesh.remote->Start(b2.batch);
    ASSERT_TRUE(first.ok() && second.ok());
    ASSERT_TRUE(mesh.remote->Finish(*second).ok());
    ASSERT_TRUE(mesh.remote->Finish(*first).ok());
    mesh.ExpectExact(b1);
    mesh.ExpectExact(b2);
  }
  for (const auto& s : mesh.shards) s->server->Stop();
  mesh.ExpectIdle();
}

TEST(RemoteExperts, ReplicasShareTheRowsAndTakeOver) {
  Mesh mesh;
  mesh.Add(0, 1);
  mesh.Add(0, 1);
  mesh.View();
  FakeBatch b(5, 1, 40, kTopK, mesh.fake.set());
  ASSERT_TRUE(mesh.Run(b).ok());
  mesh.ExpectExact(b);
  EXPECT_GT(mesh.shards[0]->server->stats().expert_rows, 30u);
  EXPECT_GT(mesh.shards[1]->server->stats().expert_rows, 30u);

  mesh.network.Kill("shard-0");
  FakeBatch again(5, 1, 40, kTopK, mesh.fake.set());
  ASSERT_TRUE(mesh.Run(again).ok());
  mesh.ExpectExact(again);
}

TEST(RemoteExperts, AnExpertWithoutAShardIsUnavailable) {
  Mesh mesh;
  mesh.Add(0, 2);
  FakeBatch b(6, 1, 5, kTopK, mesh.fake.set());
  EXPECT_FALSE(mesh.remote->complete());
  EXPECT_EQ(mesh.Run(b).code(), absl::StatusCode::kUnavailable);  // no view yet
  mesh.View();
  EXPECT_FALSE(mesh.remote->complete());
  EXPECT_EQ(mesh.Run(b).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(mesh.remote->stats().calls, 0u);  // nothing was sent
  mesh.Add(1, 2);
  mesh.View(2);
  EXPECT_TRUE(mesh.Run(b).ok());
  mesh.ExpectExact(b);
}

TEST(RemoteExperts, AShardKilledDuringACallFailsAtOnce) {
  Mesh mesh({.delivery = InprocDelivery::kQueued});
  mesh.Add(0, 2);
  mesh.Add(1, 2);
  mesh.View();
  for (int delivered = 0; delivered < 6; ++delivered) {
    FakeBatch b(7, 1, 5, kTopK, mesh.fake.set());
    const auto ticket = mesh.remote->Start(b.batch);
    ASSERT_TRUE(ticket.ok());
    for (int i = 0; i < delivered; ++i) mesh.network.DeliverOne();
    mesh.network.Kill("shard-1");
    const absl::Status s = mesh.remote->Finish(*ticket);
    EXPECT_EQ(s.code(), absl::StatusCode::kUnavailable) << s;
    EXPECT_THAT(std::string(s.message()), HasSubstr("shard-1"));
    mesh.network.DeliverAll();

    // It comes back as a new process.
    mesh.shards[1]->server->Stop();
    mesh.shards[1]->transport.reset();
    auto old = std::move(mesh.shards[1]);
    mesh.shards.pop_back();
    old.reset();
    mesh.Add(1, 2, {.epoch = 6, .compute_inline = true});
    mesh.shards[1]->info.epoch = 6;
    mesh.View(static_cast<uint64_t>(delivered) + 2);
    FakeBatch again(8, 2, 5, kTopK, mesh.fake.set());
    const absl::Status healed = mesh.Run(again);
    ASSERT_TRUE(healed.ok()) << healed;
    mesh.ExpectExact(again);
    mesh.shards[1]->info.epoch = 6;
  }
}

TEST(RemoteExperts, ALateAnswerTouchesNothing) {
  Mesh mesh({.delivery = InprocDelivery::kQueued}, {.pump = [] { return false; }});
  mesh.Add(0, 1);
  mesh.View();
  FakeBatch b(9, 1, 3, kTopK, mesh.fake.set());
  const absl::Status s = mesh.Run(b);
  EXPECT_EQ(s.code(), absl::StatusCode::kUnavailable) << s;
  EXPECT_EQ(mesh.remote->stats().expired, 1u);
  mesh.network.DeliverAll();
  EXPECT_EQ(mesh.remote->stats().ignored, 1u);
  for (const float f : b.out) EXPECT_TRUE(std::isnan(f));
  mesh.ExpectIdle();
}

TEST(RemoteExperts, ASilentShardEndsAtTheDeadline) {
  Mesh mesh({}, {.deadline = absl::Milliseconds(30)});
  mesh.Add(0, 1);
  mesh.View();
  mesh.network.SetFault([](const InprocMessage& m) {
    return InprocFault{.drop = m.type == MessageType::kExpertCombine};
  });
  FakeBatch b(10, 1, 3, kTopK, mesh.fake.set());
  EXPECT_EQ(mesh.Run(b).code(), absl::StatusCode::kUnavailable);
  mesh.network.SetFault(nullptr);
  EXPECT_TRUE(mesh.Run(b).ok());
  mesh.ExpectExact(b);
}

TEST(RemoteExperts, DoubledAndForgedAnswersAreIgnored) {
  Mesh mesh({.delivery = InprocDelivery::kQueued});
  mesh.Add(0, 1);
  mesh.View();
  mesh.network.SetFault([](const InprocMessage& m) {
    return InprocFault{.duplicate = m.type == MessageType::kExpertCombine};
  });
  const auto thief = *mesh.network.Open("thief");
  const PeerId victim = *thief->Connect("caller");
  FakeBatch b(11, 1, 3, kTopK, mesh.fake.set());
  const auto ticket = mesh.remote->Start(b.batch);
  ASSERT_TRUE(ticket.ok());
  // The right call, the right shape, the wrong peer.
  mesh::ExpertCombine c;
  c.set_call_id(1);
  c.set_rows(3 * kTopK);
  c.set_width(kWidth);
  c.set_shard_epoch(5);
  const std::vector<std::byte> zeros(3 * kTopK * kWidth * sizeof(float));
  thief->Send(victim, MessageType::kExpertCombine, c.SerializeAsString(), zeros,
              [](absl::Status) {});
  thief->Send(victim, MessageType::kExpertCombine, "not a message", {}, [](absl::Status) {});
  ASSERT_TRUE(mesh.remote->Finish(*ticket).ok());
  mesh.network.DeliverAll();
  mesh.ExpectExact(b);
  EXPECT_EQ(mesh.remote->stats().answers, 1u);
  EXPECT_EQ(mesh.remote->stats().ignored,
            5u);  // both forgeries are doubled too; the double of the answer
}

TEST(RemoteExperts, DamagedPayloadsAreRefused) {
  for (const auto type : {MessageType::kExpertDispatch, MessageType::kExpertCombine}) {
    Mesh mesh;
    mesh.Add(0, 1);
    mesh.View();
    mesh.network.SetFault([&](const InprocMessage& m) {
      return InprocFault{.flip_payload_byte = m.type == type ? 1001 : -1, .flip_mask = 0x10};
    });
    FakeBatch b(12, 1, 30, kTopK, mesh.fake.set());
    const absl::Status s = mesh.Run(b);
    EXPECT_THAT(std::string(s.message()), HasSubstr("checksum"));
    EXPECT_EQ(s.code(), absl::StatusCode::kUnavailable);
    if (type == MessageType::kExpertDispatch) {
      EXPECT_EQ(mesh.shards[0]->server->stats().corrupt, 1u);
    } else {
      EXPECT_EQ(mesh.remote->stats().corrupt, 1u);
    }
    mesh.ExpectIdle();
    mesh.network.SetFault(
        [&](const InprocMessage& m) { return InprocFault{.fail_payload = m.type == type}; });
    const absl::Status failed =
        type == MessageType::kExpertCombine ? mesh.Run(b) : absl::OkStatus();
    if (type == MessageType::kExpertCombine) {
      EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    }
    mesh.ExpectIdle();
  }
}

// Whatever a flipped bit in a header does, it never makes a wrong row.
TEST(RemoteExperts, FlippedHeaderBitsNeverGiveWrongRows) {
  for (const auto type : {MessageType::kExpertDispatch, MessageType::kExpertCombine}) {
    Mesh mesh({.delivery = InprocDelivery::kQueued});
    mesh.Add(0, 1);
    mesh.View();
    int failures = 0;
    for (int64_t bit = 0; bit < 100 * 8; ++bit) {
      mesh.network.SetFault([&](const InprocMessage& m) {
        return InprocFault{.flip_header_byte = m.type == type ? bit / 8 : -1,
                           .flip_mask = static_cast<uint8_t>(1 << (bit % 8))};
      });
      FakeBatch b(13, 1, 4, kTopK, mesh.fake.set());
      const absl::Status s = mesh.Run(b);
      if (s.ok()) mesh.ExpectExact(b);
      failures += !s.ok();
      mesh.network.DeliverAll();
    }
    EXPECT_GT(failures, 200);
    mesh.ExpectIdle();
  }
}

TEST(RemoteExperts, AnotherEpochOrModelIsRefusedWithBothValues) {
  Mesh mesh;
  mesh.Add(0, 1);
  mesh.shards[0]->info.epoch = 4;
  mesh.View();
  FakeBatch b(14, 1, 3, kTopK, mesh.fake.set());
  const absl::Status s = mesh.Run(b);
  EXPECT_EQ(s.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(s.message()), HasSubstr("epoch: 4, but this shard is at 5"));

  Mesh other;
  other.Add(0, 1, {.model_digest = "d2", .compute_inline = true});
  other.View();
  const absl::Status d = other.Run(b);
  EXPECT_THAT(std::string(d.message()), HasSubstr("model_digest: d1, but this shard serves d2"));
  EXPECT_EQ(other.shards[0]->server->stats().stale, 1u);
}

TEST(RemoteExperts, AFullShardSaysSo) {
  Mesh mesh;
  mesh.Add(0, 1, {.landing_bytes_max = 1000, .compute_inline = true});
  mesh.View();
  FakeBatch b(15, 1, 3, kTopK, mesh.fake.set());
  const absl::Status s = mesh.Run(b);
  EXPECT_EQ(s.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(s.message()), HasSubstr("of 1000 bytes"));
  EXPECT_EQ(mesh.shards[0]->server->stats().full, 1u);
  mesh.ExpectIdle();
}

TEST(RemoteExperts, OldViewsAreIgnoredAndRetiredShardsDisconnected) {
  Mesh mesh;
  mesh.Add(0, 1);
  mesh.View(7);
  mesh.remote->SetView({.epoch = 6, .shards = {}});
  EXPECT_TRUE(mesh.remote->complete());
  EXPECT_EQ(mesh.transport->stats().peers, 1u);
  mesh.remote->SetView({.epoch = 8, .shards = {}});
  EXPECT_FALSE(mesh.remote->complete());
  EXPECT_EQ(mesh.transport->stats().peers, 0u);
}

// A send may fail while the connection stands; it is left for a new one and must not stay open.
TEST(RemoteExperts, AFailedSendLeavesNoConnectionBehind) {
  Mesh mesh;
  mesh.Add(0, 1);
  mesh.View();
  for (uint64_t i = 0; i < 50; ++i) {
    FakeBatch b(20 + i, 1, 3, kTopK, mesh.fake.set());
    mesh.tampered->on_send = [] { return absl::ResourceExhaustedError("sends: all are in use"); };
    EXPECT_EQ(mesh.Run(b).code(), absl::StatusCode::kUnavailable);
    mesh.tampered->on_send = nullptr;
    ASSERT_TRUE(mesh.Run(b).ok());
    mesh.ExpectExact(b);
    EXPECT_EQ(mesh.transport->stats().peers, 1u);
  }
  mesh.remote->SetView({.epoch = 2, .shards = {}});
  EXPECT_EQ(mesh.transport->stats().peers, 0u);
}

// A known shard dies, and is back, while a new view connects another one: the first call must not go to the
// dead connection.
TEST(RemoteExperts, ALossWhileAViewConnectsIsSeen) {
  Mesh mesh;
  mesh.Add(0, 2);
  mesh.View(1);
  Mesh::Shard& second = mesh.Add(1, 2);
  ExpertSet set = mesh.fake.Shard(0, 2);
  std::unique_ptr<Transport> back_transport;
  std::unique_ptr<ExpertServer> back;
  mesh.tampered->on_connect = [&](std::string_view address) {
    if (address != second.info.address) return;
    mesh.network.Kill("shard-0");
    back_transport = *mesh.network.Open("shard-0");
    back = std::make_unique<ExpertServer>(
        back_transport.get(), &set, &mesh.local_pool,
        ExpertServerOptions{
            .name = "shard-0", .epoch = 5, .model_digest = "d1", .compute_inline = true});
  };
  mesh.View(2);
  ASSERT_NE(back, nullptr);
  FakeBatch b(21, 1, 9, kTopK, mesh.fake.set());
  const absl::Status status = mesh.Run(b);
  EXPECT_TRUE(status.ok()) << status;
  if (status.ok()) mesh.ExpectExact(b);
  mesh.tampered->on_connect = nullptr;
  EXPECT_EQ(mesh.transport->stats().peers, 2u);
  back_transport.reset();
}

// The loss of a new connection may be told before Connect has returned.
TEST(RemoteExperts, ALossToldBeforeConnectReturnsIsSeen) {
  Mesh mesh;
  Mesh::Shard& shard = mesh.Add(0, 1);
  mesh.tampered->on_connected = [&](PeerId) {
    mesh.tampered->on_connected = nullptr;
    mesh.network.Kill("shard-0");
    shard.server->Stop();
    shard.transport = *mesh.network.Open("shard-0");
    shard.server = std::make_unique<ExpertServer>(
        shard.transport.get(), &shard.set, shard.pool.get(),
        ExpertServerOptions{
            .name = "shard-0", .epoch = 5, .model_digest = "d1", .compute_inline = true});
  };
  mesh.View();
  FakeBatch b(22, 1, 9, kTopK, mesh.fake.set());
  const absl::Status status = mesh.Run(b);
  EXPECT_TRUE(status.ok()) << status;
  if (status.ok()) mesh.ExpectExact(b);
}

// A dispatch as a stranger could send it. The server must refuse each before it takes the payload.
TEST(ExpertServer, RefusesWhatCannotBe) {
  Mesh mesh;
  Mesh::Shard& shard = mesh.Add(0, 2);
  const auto stranger = *mesh.network.Open("stranger");
  const PeerId peer = *stranger->Connect("shard-0");
  uint64_t sent = 0;
  const auto send = [&](auto change, int64_t payload_rows = 2) {
    mesh::ExpertDispatch d;
    d.set_shard_epoch(5);
    d.set_model_digest("d1");
    d.set_layer(1);
    d.set_rows(2);
    d.set_width(kWidth);
    d.add_experts_per_row(1);
    d.add_experts_per_row(2);
    for (const uint32_t e : {0, 2, 4}) d.add_experts(e);
    change(d);
    const std::vector<std::byte> rows(static_cast<size_t>(payload_rows * kWidth) * sizeof(float));
    stranger->Send(peer, MessageType::kExpertDispatch, d.SerializeAsString(), rows,
                   [](absl::Status) {});
    ++sent;
  };
  using D = mesh::ExpertDispatch;
  send([](D& d) { d.set_layer(0); });
  send([](D& d) { d.set_layer(99); });
  send([](D& d) { d.set_width(kWidth - 1); });
  send([](D& d) { d.set_rows(3); });
  send(
      [](D& d) {
        d.set_rows(0);
        d.clear_experts_per_row();
        d.clear_experts();
      },
      0);
  send([](D& d) { d.add_experts_per_row(1); });
  send([](D& d) { d.set_experts_per_row(0, 0); });
  send([](D& d) { d.set_experts_per_row(0, 4000000000u); });
  send([](D& d) { d.add_experts(0); });
  send([](D& d) { d.set_experts(0, 1); });  // hosted elsewhere
  send([](D& d) { d.set_experts(0, kExperts); });
  send([](D&) {}, 3);
  EXPECT_EQ(shard.server->stats().malformed, sent);
  EXPECT_EQ(shard.server->stats().calls, 0u);
  send([](D&) {});  // well-formed, but the checksum is of something else
  EXPECT_EQ(shard.server->stats().corrupt, 1u);
  EXPECT_EQ(shard.transport->stats().bytes_received, 2 * kWidth * sizeof(float));
  mesh.ExpectIdle();
}

}  // namespace
}  // namespace deltamesh
