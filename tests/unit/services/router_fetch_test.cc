// Placement with states that can be fetched, beside a twin that tries every way there is; and what the router
// makes of what workers say of their fetches.
#include <algorithm>
#include <limits>

#include "runtime/base/random.h"
#include "runtime/prefix/prefix_hash.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

constexpr double kSlab = 2e8, kBlock = 4e6;         // bytes
constexpr double kBandwidth = 2e9, kSlowest = 2e7;  // bytes a second
constexpr int64_t kStep = 256;
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Fake {
  std::string name;
  LinkId link = 0;
  bool prefill = false, fetches = true, draining = false;
  int64_t slabs = 4, waiting = 0, latents = 0, snapshot = 0;  // the last two in blocks
  // Its deepest snapshot in memory, where the other one lies on disk; below 0: as that.
  int64_t warm = -1;
  int64_t running = 0;
  double rate = 100;
  double disk = 0;     // bytes a second; 0: not measured
  int64_t object = 0;  // blocks of its deepest state in the object store
  double objects = 0;  // bytes a second

  int64_t in_memory() const { return warm < 0 ? snapshot : warm; }
  bool cold() const { return in_memory() < snapshot; }
  bool store() const { return warm >= 0; }
  int64_t latents_in_memory() const { return store() ? warm : latents; }
  bool room() const { return !draining && slabs > 0; }
  double queue() const { return static_cast<double>(waiting + running) / rate; }
  // With what those who run wait meanwhile.
  double compute(int64_t tokens) const {
    return static_cast<double>(tokens) / rate * (running > 0 && !prefill ? 2 : 1);
  }
  double read_bytes(int64_t blocks) const {
    return kSlab + kBlock * static_cast<double>(blocks - in_memory());
  }
  // From its disk, for itself or others.
  double read() const { return 0.002 + read_bytes(snapshot) / (disk > 0 ? disk : 5e8); }

  struct Read {
    ReadFrom from = ReadFrom::kNothing;
    int64_t blocks = 0;
    double seconds = 0;
  };
  // What it reads for itself: the deeper of two, the other where it would compute that before it were read.
  Read reads() const {
    const auto quick = [this](double seconds, double speed, int64_t blocks) {
      return blocks > in_memory() &&
             (speed == 0 || seconds <= static_cast<double>((blocks - in_memory()) * 64) / rate);
    };
    const double there = 0.002 + read_bytes(object) / (objects > 0 ? objects : 5e8);
    const Read near =
        quick(read(), disk, snapshot) ? Read{ReadFrom::kDisk, snapshot, read()} : Read();
    const Read far =
        quick(there, objects, object) ? Read{ReadFrom::kObjects, object, there} : Read();
    return far.blocks > near.blocks ? far : near;
  }
};

class RouterFetchTest : public RouterCoreTest {
 protected:
  void Add(Fake& w, const std::vector<PrefixKey>& keys) {
    mesh::WorkerMessage m =
        TestRegister(w.name, w.prefill ? mesh::ROLE_PREFILL : mesh::ROLE_DECODE);
    m.mutable_register_()->set_state_fetch(w.fetches);
    m.mutable_register_()->set_session_store(w.store());
    m.mutable_register_()->mutable_capacity()->set_slab_bytes(static_cast<uint64_t>(kSlab));
    m.mutable_register_()->mutable_capacity()->set_block_bytes(static_cast<uint64_t>(kBlock));
    m.mutable_register_()->mutable_capacity()->set_step_tokens(kStep);
    Open(w.link, m);
    mesh::WorkerMessage told;
    told.mutable_prefixes()->set_complete(true);
    for (int64_t i = 0; i < w.latents; ++i) {
      told.mutable_prefixes()->add_keys(keys[static_cast<size_t>(i)].index());
      told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::LATENTS_ADDED);
    }
    const auto tell = [&](int64_t blocks, mesh::PrefixChanges::What what) {
      told.mutable_prefixes()->add_keys(keys[static_cast<size_t>(blocks - 1)].index());
      told.mutable_prefixes()->mutable_changes()->push_back(static_cast<char>(what));
    };
    if (w.cold()) tell(w.snapshot, mesh::PrefixChanges::SNAPSHOT_COLD);
    if (w.in_memory() > 0) tell(w.in_memory(), mesh::PrefixChanges::SNAPSHOT_ADDED);
    if (w.object > 0) tell(w.object, mesh::PrefixChanges::OBJECT_ADDED);
    Send(w.link, told);
    mesh::WorkerMessage beat;
    beat.mutable_heartbeat()->set_slabs_free(static_cast<uint64_t>(w.slabs));
    beat.mutable_heartbeat()->set_latent_blocks_free(64);
    beat.mutable_heartbeat()->set_waiting_tokens(static_cast<uint64_t>(w.waiting));
    beat.mutable_heartbeat()->set_running(static_cast<uint64_t>(w.running));
    beat.mutable_heartbeat()->set_draining(w.draining);
    beat.mutable_heartbeat()->set_prompt_tokens_per_second(w.rate);
    beat.mutable_heartbeat()->set_store_bytes_per_second(w.disk);
    beat.mutable_heartbeat()->set_object_bytes_per_second(w.objects);
    Send(w.link, beat);
  }
  void Fetched(LinkId link, const std::string& id, uint32_t attempt, const std::string& reason,
               uint64_t tokens, uint64_t bytes, double seconds) {
    mesh::WorkerMessage m;
    mesh::FetchResult* r = m.mutable_fetch_result();
    r->set_request_id(id);
    r->set_attempt(attempt);
    r->set_code(reason == "OK" ? 0 : static_cast<int>(absl::StatusCode::kDataLoss));
    r->set_reason(reason);
    r->set_source("d1");
    r->set_tokens(tokens);
    r->set_bytes(bytes);
    r->set_seconds(seconds + 1);
    r->set_transfer_seconds(seconds);
    Send(link, m);
  }
  void Measured(LinkId from, const std::string& to, double rate) {
    mesh::WorkerMessage m;
    m.mutable_connection()->set_to(to);
    m.mutable_connection()->set_to_epoch(1);
    m.mutable_connection()->set_bytes_per_second(rate);
    Send(from, m);
  }
  std::vector<PrefixKey> Keys(int64_t prompt) {
    PrefixChain chain(PrefixModel("d1", 1), "");
    const ClientRequest request = Make("", prompt);
    chain.Append(std::span(request.prompt).first(static_cast<size_t>(prompt - 1)));
    return chain.keys();
  }
  const Decision& Last() { return *core->decisions().Last(1).at(0); }
};

// Bytes a second between two workers: the mesh's, or less where that was measured.
struct Links {
  double mesh = 0;
  std::map<std::pair<LinkId, std::string>, double> measured;

  double operator()(const Fake& from, const Fake& to) const {
    const auto found = measured.find({from.link, to.name});
    return found == measured.end() ? mesh : std::min(mesh, found->second);
  }
};

// The least of computing all that `w` lacks and of every fetch.
double Compute(const Fake& w, const std::vector<Fake>& all, int64_t tokens, const Links& links,
               int64_t* to_compute) {
  double best = kNever;
  const auto consider = [&](double seconds, int64_t cached) {
    const double total = w.queue() + seconds + w.compute(tokens - cached);
    if (total >= best) return;
    best = total;
    *to_compute = tokens - cached;
  };
  // What is below memory is computed after all when that is quicker than reading it, as far as is known.
  const Fake::Read read = w.reads();
  consider(read.seconds, std::max(read.blocks, w.in_memory()) * 64);
  for (const Fake& from : all) {
    if (from.link == w.link || !from.fetches || !w.fetches) continue;
    for (const int64_t blocks : {from.snapshot, from.in_memory()}) {
      if (blocks <= w.in_memory()) continue;
      const double bytes = kSlab + kBlock * static_cast<double>(std::max<int64_t>(
                                                0, blocks - w.latents_in_memory()));
      const double step = static_cast<double>(std::min(from.waiting, kStep)) / from.rate;
      const double read = blocks > from.in_memory() ? from.read() : 0;
      consider(0.002 + step + read + bytes / links(from, w), blocks * 64);
    }
  }
  return best;
}

// The decode worker is given; who was to prefill is gone, and the others differ by their links to it.
TEST_F(RouterFetchTest, WhoPrefillsForALandingIsChosenByItsLinkToo) {
  for (int i = 0; i < 8; ++i) {
    Restart(DefaultOptions());
    const std::vector<PrefixKey> keys = Keys(300);
    std::vector<Fake> all = {{.name = "d0", .link = 1, .rate = 50}};
    for (LinkId link = 2; link <= 4; ++link) {
      all.push_back(
          {.name = absl::StrFormat("p%d", link), .link = link, .prefill = true, .rate = 1000});
    }
    for (Fake& w : all) Add(w, keys);
    Fetched(1, "?", 1, "OK", 64, static_cast<uint64_t>(kBandwidth), 1);
    for (LinkId link = 2; link <= 4; ++link) {
      Measured(link, "d0", link == 2 ? kSlowest : kBandwidth);
    }
    Drain();
    const std::string id = absl::StrFormat("r%d", i);
    ASSERT_TRUE(Submit(id, 300).ok());
    const std::string first = Last().candidates[Last().chosen].prefill;
    ASSERT_TRUE(first == "p3" || first == "p4") << first;
    Drain();
    core->OnLinkClosed(first == "p3" ? 3 : 4, Unavailable("gone"), now);
    Drain();
    Grant(1, id, 256, attempts[id]);
    LinkId told = 0;
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent != nullptr && sent->message.has_start_prefill()) told = sent->link;
    }
    EXPECT_EQ(told, first == "p3" ? 4 : 3) << i;
  }
}

TEST_F(RouterFetchTest, EveryWayIsWeighed) {
  SeededEntropy entropy(7);
  const auto draw = [&](uint64_t n) { return static_cast<int64_t>(entropy.Next() % n); };
  int fetched = 0, handed = 0, alone = 0, waited = 0, cold = 0, read = 0, passed_by = 0,
      from_bucket = 0;
  for (int round = 0; round < 1000; ++round) {
    Restart(DefaultOptions());
    const int64_t prompt = 66 + draw(900), position = (prompt - 1) / 64 * 64;
    const std::vector<PrefixKey> keys = Keys(prompt);
    std::vector<Fake> all(static_cast<size_t>(2 + draw(8)));
    int64_t states = 0;  // of which so many are offered that none is left out
    for (size_t i = 0; i < all.size(); ++i) {
      Fake& w = all[i];
      w.link = static_cast<LinkId>(i + 1);
      w.prefill = i > 0 && draw(2) == 0;
      w.name = (w.prefill ? "p" : "d") + std::to_string(i);
      w.fetches = draw(6) != 0;
      w.draining = i > 0 && draw(6) == 0;
      w.slabs = draw(6) == 0 ? 0 : 4;
      w.waiting = draw(3) == 0 ? draw(2000) : 0;
      w.running = draw(3) == 0 ? draw(4) : 0;
      w.rate = static_cast<double>(50 + draw(3) * 400);
      if (draw(2) == 0 && states < 3) {
        w.latents = 1 + draw(static_cast<uint64_t>(position / 64));
        w.snapshot = draw(3) == 0 ? 0 : 1 + draw(static_cast<uint64_t>(w.latents));
        if (draw(3) != 0) {
          w.warm = draw(2) == 0 ? 0 : draw(static_cast<uint64_t>(w.snapshot + 1));
          w.disk = draw(3) == 0 ? 0 : 2e7 * static_cast<double>(1 + draw(100));
        }
        states += w.cold() + (w.in_memory() > 0);
      }
      if (draw(3) == 0) {
        w.object = 1 + draw(static_cast<uint64_t>(position / 64));
        w.objects = draw(3) == 0 ? 0 : 2e7 * static_cast<double>(1 + draw(100));
      }
      Add(w, keys);
    }
    // Teaches the link's speed; nobody knows the request.
    const double bandwidth = draw(2) == 0 ? kSlowest : kBandwidth;
    Fetched(1, "?", 1, "OK", 64, static_cast<uint64_t>(bandwidth), 1);
    Links links = {.mesh = bandwidth, .measured = {}};
    for (const Fake& from : all) {
      for (const Fake& to : all) {
        if (round % 2 == 0 || draw(3) == 0) continue;
        const double rate = bandwidth * static_cast<double>(1 + draw(40)) / 30;
        links.measured[{from.link, to.name}] = rate;
        Measured(from.link, to.name, rate);
      }
    }

    bool capable = false;
    double pair = kNever, own = kNever;
    int64_t own_compute = 0;
    struct Prefill {
      const Fake* worker;
      double seconds, computing;  // latents are on their way meanwhile
    };
    std::vector<Prefill> prefills;
    std::map<std::pair<std::string, std::string>, double> pairs;
    for (const Fake& w : all) capable |= w.prefill && !w.draining;
    for (const Fake& w : all) {
      if (!w.room() || !w.prefill) continue;
      int64_t compute = 0;
      const double seconds = Compute(w, all, position, links, &compute);
      prefills.push_back({&w, seconds, static_cast<double>(compute) / w.rate});
    }
    for (const Fake& w : all) {
      if (!w.room() || w.prefill) continue;
      const double latents =
          kBlock * static_cast<double>(std::max<int64_t>(0, position / 64 - w.latents_in_memory()));
      for (const Prefill& p : prefills) {
        const double rate = links(*p.worker, w);
        const double seconds = p.seconds + w.queue() + kSlab / rate +
                               std::max(0.0, latents / rate - p.computing) +
                               w.compute(prompt - position);
        pairs[{p.worker->name, w.name}] = seconds;
        pair = std::min(pair, seconds);
      }
      int64_t compute = 0;
      const double mine = Compute(w, all, prompt, links, &compute);
      if (mine < own) own_compute = compute;
      own = std::min(own, mine);
    }
    Drain();
    const absl::Status submitted = Submit("r", prompt);
    if (!submitted.ok()) continue;  // every decode worker drains
    const Decision& d = Last();
    if (std::min(own, pair) == kNever || (pair == kNever && capable && own_compute > kStep)) {
      EXPECT_EQ(d.placements, 0) << round;
      ++waited;
      continue;
    }
    ASSERT_EQ(d.placements, 1) << round;
    const DecisionCandidate& chosen = d.candidates[d.chosen];
    EXPECT_NEAR(chosen.cost.total(), std::min(own, pair), 1e-9) << round;
    ++(chosen.prefill.empty() ? alone : handed);
    // So is each of the others that are told.
    for (size_t i = 0; i < d.candidate_count; ++i) {
      const DecisionCandidate& c = d.candidates[i];
      if (c.prefill.empty() || !c.room) continue;
      EXPECT_NEAR(c.cost.total(), pairs.at({c.prefill, c.decode}), 1e-9) << round;
    }
    fetched += !chosen.fetch_from.empty();
    cold += chosen.fetch_cold;
    if (!chosen.fetch_from.empty()) {
      const auto source = std::find_if(all.begin(), all.end(),
                                       [&](const Fake& w) { return w.name == chosen.fetch_from; });
      EXPECT_EQ(chosen.fetch_cold, chosen.fetch_tokens > source->in_memory() * 64) << round;
      EXPECT_EQ(chosen.read_bytes, 0) << round;
    } else {
      const auto computes = std::find_if(all.begin(), all.end(), [&](const Fake& w) {
        return w.name == (chosen.prefill.empty() ? chosen.decode : chosen.prefill);
      });
      const Fake::Read reads = computes->reads();
      EXPECT_EQ(chosen.read_from, reads.from) << round;
      read += reads.from == ReadFrom::kDisk;
      from_bucket += reads.from == ReadFrom::kObjects;
      passed_by += reads.blocks == 0 && computes->cold() && computes->in_memory() > 0;
      if (reads.blocks > 0) {
        EXPECT_EQ(static_cast<double>(chosen.read_bytes), computes->read_bytes(reads.blocks));
        EXPECT_DOUBLE_EQ(chosen.read_seconds, reads.seconds) << round;
        EXPECT_EQ(chosen.cached_tokens, reads.blocks * 64) << round;
      } else {
        EXPECT_EQ(chosen.read_bytes, 0) << round;
        EXPECT_EQ(chosen.cached_tokens, computes->in_memory() * 64) << round;
      }
    }
    // What was weighed is what the worker is told.
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent == nullptr || !sent->message.has_start_decode()) continue;
      const mesh::StartDecode& start = sent->message.start_decode();
      const bool here = chosen.prefill.empty() && !chosen.fetch_from.empty();
      ASSERT_EQ(start.has_fetch(), here) << round;
      if (!here) continue;
      EXPECT_EQ(start.fetch().worker(), chosen.fetch_from);
      EXPECT_EQ(start.fetch().transport_address(), chosen.fetch_from + "-address");
      EXPECT_EQ(static_cast<int64_t>(start.fetch().position()), chosen.fetch_tokens);
      EXPECT_EQ(start.fetch().epoch(), 1u);
    }
  }
  // The cases are all there.
  EXPECT_GT(fetched, 30);
  EXPECT_GT(handed, 30);
  EXPECT_GT(alone, 30);
  EXPECT_GT(waited, 10);
  EXPECT_GT(cold, 10);
  EXPECT_GT(read, 10);
  EXPECT_GT(from_bucket, 10);
  EXPECT_GT(passed_by, 5);
}

// While moving latents takes longer than computing, who computes for longer hides more of it: a prefill
// worker that holds the prompt and has others waiting is behind one that computes it at once.
TEST_F(RouterFetchTest, TheCheapestPairMayHaveADearerPrefillWorker) {
  const std::vector<PrefixKey> keys = Keys(960);
  Fake decode = {.name = "d1", .link = 1, .fetches = false, .rate = 50};
  Fake holds = {.name = "p1", .link = 2, .prefill = true, .waiting = 850, .rate = 850};
  holds.latents = holds.snapshot = 14;
  Fake computes = {.name = "p2", .link = 3, .prefill = true, .rate = 850};
  for (Fake* w : {&decode, &holds, &computes}) Add(*w, keys);
  constexpr double kSlow = 3e7;
  Fetched(1, "?", 1, "OK", 64, static_cast<uint64_t>(kSlow), 1);
  ASSERT_TRUE(Submit("r", 960).ok());
  const Decision& d = Last();
  const double compute = 896.0 / 850, latents = 14 * kBlock / kSlow;
  ASSERT_LT(850.0 / 850, compute) << "the other is the cheaper one by itself";
  ASSERT_LT(compute, latents);
  EXPECT_EQ(d.candidates[d.chosen].prefill, "p2");
  EXPECT_NEAR(d.candidates[d.chosen].cost.total(), kSlab / kSlow + latents + 64.0 / 50, 1e-9);
}

// Of workers that share a folder all can read the same, and each may hold more than the last, on slow disks:
// whoever has less, but in memory, is offered still.
TEST_F(RouterFetchTest, ManyOnDisksDoNotHideWhoHasLessInMemory) {
  constexpr int64_t kWarm = 8;
  const std::vector<PrefixKey> keys = Keys(1200);
  for (const int64_t deeper_each : {0, 1}) {
    Restart(DefaultOptions());
    for (LinkId link = 1; link <= 6; ++link) {
      const int64_t blocks = kWarm + 1 + deeper_each * static_cast<int64_t>(link);
      Fake w = {.name = "d" + std::to_string(link),
                .link = link,
                .draining = true,
                .latents = blocks,
                .snapshot = blocks,
                .warm = 0,
                .disk = 1e6};
      Add(w, keys);
    }
    Fake warm = {.name = "d8", .link = 8, .draining = true, .latents = kWarm, .snapshot = kWarm};
    Fake free = {.name = "d9", .link = 9, .rate = 100};
    Add(warm, keys);
    Add(free, keys);
    ASSERT_TRUE(Submit("r", 1200).ok());
    const DecisionCandidate& chosen = Last().candidates[Last().chosen];
    EXPECT_EQ(chosen.fetch_from, "d8") << deeper_each;
    EXPECT_FALSE(chosen.fetch_cold);
  }
}

// A deep state on a slow disk hides no shallower one in memory: not from the worker itself, and not from
// others.
TEST_F(RouterFetchTest, AStateInMemoryIsFoundBelowADeeperOneOnDisk) {
  const std::vector<PrefixKey> keys = Keys(700);
  Fake holder = {.name = "d1", .link = 1, .latents = 9, .snapshot = 9, .warm = 8, .disk = 1e6};
  Add(holder, keys);
  ASSERT_TRUE(Submit("own", 700).ok());
  Drain();
  EXPECT_EQ(Last().snapshot_tokens, 9 * 64);
  EXPECT_TRUE(Last().snapshot_cold);
  EXPECT_EQ(Last().warm_tokens, 8 * 64);
  EXPECT_EQ(Last().candidates[0].cached_tokens, 8 * 64);
  EXPECT_EQ(Last().candidates[0].read_bytes, 0);
  ASSERT_TRUE(core->CancelClient("own", now));
  // 204 MB in 0.2 s are less than 64 tokens take: it reads the slab and the one block that memory lacks.
  holder.disk = 1e9;
  mesh::WorkerMessage beat;
  beat.mutable_heartbeat()->set_slabs_free(4);
  beat.mutable_heartbeat()->set_latent_blocks_free(64);
  beat.mutable_heartbeat()->set_prompt_tokens_per_second(100);
  beat.mutable_heartbeat()->set_store_bytes_per_second(1e9);
  Send(1, beat);
  ASSERT_TRUE(Submit("reads", 700).ok());
  Drain();
  EXPECT_EQ(Last().candidates[0].cached_tokens, 9 * 64);
  EXPECT_EQ(Last().candidates[0].read_bytes, static_cast<int64_t>(kSlab + kBlock));
  EXPECT_DOUBLE_EQ(Last().candidates[0].read_seconds, 0.002 + (kSlab + kBlock) / 1e9);
  ASSERT_TRUE(core->CancelClient("reads", now));
  // Another one is sent what is in memory, as the disk is slow again and the holder goes.
  beat.mutable_heartbeat()->set_store_bytes_per_second(1e6);
  beat.mutable_heartbeat()->set_draining(true);
  Send(1, beat);
  Fake other = {.name = "d2", .link = 2};
  Add(other, keys);
  ASSERT_TRUE(Submit("fetches", 700).ok());
  Drain();
  EXPECT_EQ(Last().candidates[Last().chosen].fetch_from, "d1");
  EXPECT_EQ(Last().candidates[Last().chosen].fetch_tokens, 8 * 64);
  EXPECT_FALSE(Last().candidates[Last().chosen].fetch_cold);
}

// The worker that was chosen for what it was to fetch gives the prompt back, and it goes where it is cheapest
// now: to the next one that holds something, and after two of them to who computes it.
TEST_F(RouterFetchTest, WhatWasNotFetchedIsPlacedAnew) {
  const std::vector<PrefixKey> keys = Keys(700);
  std::vector<Fake> all;
  for (const int64_t held : {9, 8, 7}) {
    const auto link = static_cast<LinkId>(held);
    all.push_back({.name = "d" + std::to_string(held),
                   .link = link,
                   .draining = true,
                   .latents = held,
                   .snapshot = held});
  }
  all.push_back({.name = "d1", .link = 1, .rate = 100});
  all.push_back({.name = "p", .link = 2, .prefill = true, .fetches = false, .rate = 200});
  for (Fake& w : all) Add(w, keys);
  ASSERT_TRUE(Submit("r", 700).ok());
  for (const std::string from : {"d9", "d8"}) {
    Drain();
    ASSERT_EQ(Last().candidates[Last().chosen].fetch_from, from);
    Fetched(1, "r", attempts["r"], "NOT_HELD: gone", 0, 0, 0);
    Failed(1, "r", attempts["r"], absl::AbortedError("not fetched"));
    EXPECT_EQ(Last().fetch_refusal, "NOT_HELD: gone");
  }
  EXPECT_THAT(Drain(), ::testing::HasSubstr("1 <- StartDecode r prompt=700 handoff=640"));
  EXPECT_EQ(Last().placements, 3);
  EXPECT_EQ(Last().candidates[Last().chosen].prefill, "p");
  // One that was to fetch nothing has no such reason.
  Failed(1, "r", attempts["r"], absl::AbortedError("whatever"));
  EXPECT_THAT(Drain(), ::testing::HasSubstr("client r failed ABORTED"));
}

class OneFetchTest : public RouterFetchTest {
 protected:
  // d1 holds most of the prompt and drains; p is quick and has nothing.
  OneFetchTest() {
    keys_ = Keys(700);
    d1_ = {.name = "d1", .link = 1, .draining = true, .latents = 9, .snapshot = 9};
    d2_ = {.name = "d2", .link = 2, .rate = 1};
    p_ = {.name = "p", .link = 3, .prefill = true, .rate = 10000};
    for (Fake* w : {&d1_, &d2_, &p_}) Add(*w, keys_);
    CHECK_OK(Submit("r", 700));
    Drain();
  }
  // The StartPrefill that follows the grant.
  mesh::StartPrefill Granted() {
    Grant(2, "r", 640, attempts["r"]);
    mesh::StartPrefill out;
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent != nullptr && sent->message.has_start_prefill()) out = sent->message.start_prefill();
    }
    return out;
  }
  // Slow enough for a fetch to be worth it.
  void SlowPrefill() {
    mesh::WorkerMessage slower;
    slower.mutable_heartbeat()->set_slabs_free(4);
    slower.mutable_heartbeat()->set_latent_blocks_free(64);
    slower.mutable_heartbeat()->set_prompt_tokens_per_second(1000);
    Send(3, slower);
  }
  std::vector<PrefixKey> keys_;
  Fake d1_, d2_, p_;
};

TEST_F(OneFetchTest, APrefillWorkerIsToldWhereAndTheOutcomeIsRemembered) {
  // 9 blocks and a slab in 0.24 s instead of 0.0576 s: not worth it at this rate.
  EXPECT_FALSE(Granted().has_fetch());
  SlowPrefill();
  ASSERT_TRUE(core->CancelClient("r", now));
  ASSERT_TRUE(Submit("r2", 700).ok());
  Drain();
  const DecisionCandidate chosen = Last().candidates[Last().chosen];
  EXPECT_EQ(chosen.prefill + "<" + chosen.fetch_from, "p<d1");
  EXPECT_EQ(chosen.cached_tokens, 576);
  EXPECT_EQ(chosen.fetch_bytes, static_cast<int64_t>(kSlab + 9 * kBlock));
  EXPECT_NEAR(chosen.fetch_seconds, 0.002 + (kSlab + 9 * kBlock) / 1e9, 1e-9);
  Grant(2, "r2", 640, attempts["r2"]);
  bool told = false;
  for (const RouterAction& action : core->TakeActions()) {
    const auto* sent = std::get_if<SendToWorker>(&action);
    told |= sent != nullptr && sent->message.has_start_prefill() &&
            sent->message.start_prefill().fetch().worker() == "d1" &&
            sent->message.start_prefill().fetch().position() == 576;
  }
  EXPECT_TRUE(told);
  Fetched(3, "r2", attempts["r2"] + 1, "OK", 1, 1, 1);  // of another attempt
  EXPECT_EQ(Last().fetched_tokens, 0);
  EXPECT_EQ(Last().fetches_open.size(), 1u);
  Fetched(3, "r2", attempts["r2"], "CHECKSUM: LATENTS layer 0", 0, 0, 0.5);
  EXPECT_EQ(Last().fetch_refusal, "CHECKSUM: LATENTS layer 0");
  EXPECT_TRUE(Last().fetches_open.empty());
  // What it was handed is refused, so another attempt fetches again.
  Verdict(2, "r2", attempts["r2"], absl::StatusCode::kDataLoss, "CHECKSUM");
  Grant(2, "r2", 640, attempts["r2"] + 1);
  Drain();
  EXPECT_EQ(Last().fetches_open.size(), 1u);
  Fetched(3, "r2", attempts["r2"], "OK", 576, 5000, 0.25);
  EXPECT_EQ(Last().fetch_refusal, "");
  EXPECT_EQ(Last().fetched_tokens, 576);
  EXPECT_EQ(Last().fetched_bytes, 5000);
  EXPECT_EQ(Last().fetched_from, "d1");
  EXPECT_DOUBLE_EQ(Last().fetch_seconds, 1.5 + 1.25);
  EXPECT_TRUE(Last().fetches_open.empty());
  const std::vector<FetchSeen> seen = core->TakeFetches();
  ASSERT_EQ(seen.size(), 3u) << "also of another attempt";
  EXPECT_EQ(seen[1].reason, "CHECKSUM");
  EXPECT_EQ(seen[1].bytes, 0u);
  EXPECT_DOUBLE_EQ(seen[1].seconds, 1.5);
  EXPECT_EQ(seen[2].reason, "OK");
  EXPECT_EQ(seen[2].bytes, 5000u);
  EXPECT_DOUBLE_EQ(seen[2].seconds, 1.25);
  EXPECT_TRUE(core->TakeFetches().empty());
  EXPECT_EQ(core->counters().fetched_tokens, 577u);
  EXPECT_THAT(core->counters().fetch_results,
              ::testing::ElementsAre(std::pair<std::string, uint64_t>("OK", 2),
                                     std::pair<std::string, uint64_t>("CHECKSUM", 1)));
}

// Workers speak over links of their own: what was fetched may be told after the request has ended, or never.
TEST_F(OneFetchTest, WhatIsToldAfterTheEndIsExplainedStill) {
  SlowPrefill();
  ASSERT_TRUE(core->CancelClient("r", now));
  for (const bool told : {true, false}) {
    const std::string id = told ? "late" : "never";
    ASSERT_TRUE(Submit(id, 700).ok());
    Drain();
    Grant(2, id, 640, attempts[id]);
    Drain();
    Verdict(2, id, attempts[id], absl::StatusCode::kOk);
    Tokens(2, id, {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
    Drain();
    const Decision& d = Last();
    EXPECT_GE(d.seconds, 0);
    EXPECT_EQ(d.fetched_from, "");
    EXPECT_EQ(d.fetches_open.size(), 1u) << "it is not known what came of it";
    if (!told) break;
    const uint64_t stale = core->counters().stale_messages;
    Fetched(2, id, attempts[id], "OK", 576, 5000, 0.25);  // by whom it was not asked
    EXPECT_EQ(core->counters().stale_messages, stale + 1);
    EXPECT_EQ(d.fetched_from, "");
    Fetched(3, id, attempts[id], "OK", 576, 5000, 0.25);
    EXPECT_EQ(core->counters().stale_messages, stale + 1);
    EXPECT_EQ(d.fetched_from, "d1");
    EXPECT_EQ(d.fetched_tokens, 576);
    EXPECT_EQ(d.fetched_bytes, 5000);
    EXPECT_TRUE(d.fetches_open.empty());
    Fetched(3, id, attempts[id], "OK", 576, 5000, 0.25);  // once
    EXPECT_EQ(core->counters().stale_messages, stale + 2);
    EXPECT_EQ(d.fetched_bytes, 5000);
  }
}

// Who holds as much itself asks nobody, and says so.
TEST_F(OneFetchTest, AFetchThatWasNotNeededIsNone) {
  SlowPrefill();
  ASSERT_TRUE(core->CancelClient("r", now));
  ASSERT_TRUE(Submit("r", 700).ok());
  Drain();
  ASSERT_TRUE(Granted().has_fetch());
  EXPECT_EQ(Last().fetches_open.size(), 1u);
  mesh::WorkerMessage m;
  m.mutable_fetch_result()->set_request_id("r");
  m.mutable_fetch_result()->set_attempt(attempts["r"]);
  m.mutable_fetch_result()->set_not_needed(true);
  Send(3, m);
  EXPECT_TRUE(Last().fetches_open.empty());
  EXPECT_EQ(Last().fetched_from, "");
  EXPECT_TRUE(core->counters().fetch_results.empty());
  EXPECT_TRUE(core->TakeFetches().empty());
}

// A worker that turns the request away before it asked anybody says nothing of a fetch.
TEST_F(OneFetchTest, WhoTurnsARequestAwayFetchedNothing) {
  SlowPrefill();
  ASSERT_TRUE(core->CancelClient("r", now));
  ASSERT_TRUE(Submit("r", 700).ok());
  Drain();
  ASSERT_TRUE(Granted().has_fetch());
  ASSERT_EQ(Last().fetches_open.size(), 1u);
  mesh::WorkerMessage m;
  m.mutable_failed()->set_request_id("r");
  m.mutable_failed()->set_attempt(attempts["r"]);
  m.mutable_failed()->set_code(static_cast<int32_t>(absl::StatusCode::kResourceExhausted));
  m.mutable_failed()->set_message("full");
  Send(3, m);
  // Whoever it went to instead may be asked.
  EXPECT_EQ(Last().placements, 2);
  for (const Decision::OpenFetch& open : Last().fetches_open) EXPECT_NE(open.by, 3u);
}

TEST_F(OneFetchTest, ASourceThatIsGoneIsNotNamed) {
  SlowPrefill();
  ASSERT_TRUE(core->CancelClient("r", now));
  ASSERT_TRUE(Submit("r", 700).ok());
  Drain();
  ASSERT_EQ(Last().candidates[Last().chosen].fetch_from, "d1");
  core->OnLinkClosed(1, Unavailable("gone"), now);
  const mesh::StartPrefill start = Granted();
  EXPECT_EQ(start.request_id(), "r");
  EXPECT_FALSE(start.has_fetch());
}

}  // namespace
}  // namespace deltamesh
