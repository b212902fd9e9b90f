// What a router would believe after hearing every message, against what the cache holds.
#include "services/worker/prefix_teller.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>

#include "runtime/base/random.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/prefix/prefix_hash.h"

namespace deltamesh {
namespace {

constexpr LinkId kA = 1, kB = 2;

// A listener as the protocol has it: messages count up from 0, changes are in order.
struct Heard {
  std::set<uint64_t> latents, snapshots;
  std::optional<uint64_t> last;
  bool complete = false;
  int messages = 0;

  void Take(const mesh::PrefixChanges& m) {
    ++messages;
    ASSERT_EQ(static_cast<size_t>(m.keys_size()), m.changes().size());
    ASSERT_LE(m.keys_size(), 4096);
    if (m.sequence() == 0) {
      *this = {.latents = {}, .snapshots = {}, .last = {}, .complete = false, .messages = messages};
    } else {
      ASSERT_TRUE(last && m.sequence() == *last + 1) << m.sequence();
    }
    last = m.sequence();
    for (int i = 0; i < m.keys_size(); ++i) {
      const uint64_t key = m.keys(i);
      switch (m.changes()[static_cast<size_t>(i)]) {
        case mesh::PrefixChanges::LATENTS_ADDED:
          ASSERT_TRUE(latents.insert(key).second);
          break;
        case mesh::PrefixChanges::LATENTS_DROPPED:
          ASSERT_EQ(latents.erase(key), 1u);
          break;
        case mesh::PrefixChanges::SNAPSHOT_ADDED:
          ASSERT_TRUE(latents.contains(key)) << "a snapshot without its latents";
          snapshots.insert(key);
          break;
        case mesh::PrefixChanges::SNAPSHOT_DROPPED:
          snapshots.erase(key);
          break;
        default:
          FAIL() << "an unknown change";
      }
    }
    EXPECT_TRUE(!complete || m.complete());
    complete = m.complete();
  }
};

class PrefixTellerTest : public ::testing::Test {
 protected:
  explicit PrefixTellerTest(const PrefixTellerLimits& limits = {})
      : pools_(*StatePools::Create({.kda_layers = 1,
                                    .heads = 1,
                                    .dim = 16,
                                    .conv_taps = 4,
                                    .mla_layers = 1,
                                    .rank = 8,
                                    .rope = 0},
                                   4, 20000)),
        cache_(*PrefixCache::Create({.bytes_max = int64_t{64} << 20, .plan = {}}, pools_)),
        teller_(cache_.get(), nullptr, limits),
        links_(mesh::Register()) {}

  // Keeps a prompt of so many blocks whose tokens follow from `seed`.
  void Keep(uint64_t seed, int64_t blocks) {
    std::vector<TokenId> tokens;
    for (int64_t i = 0; i < blocks * kBlockTokens; ++i) {
      tokens.push_back(static_cast<TokenId>(seed * 1000 + static_cast<uint64_t>(i)));
    }
    PrefixChain chain("model", "");
    chain.Append(tokens);
    auto state = *SequenceState::Create(pools_);
    std::vector<SlotRef> latents = cache_->Latents(chain.keys());
    while (static_cast<int64_t>(latents.size()) < blocks) {
      absl::StatusOr<SlotRef> slot = pools_.blocks->Take();
      while (!slot.ok() && cache_->GiveBack()) slot = pools_.blocks->Take();
      latents.push_back(*std::move(slot));
    }
    state->Restore(blocks * kBlockTokens, std::move(latents));
    now_ += absl::Seconds(1);
    cache_->Keep(chain.keys(), *state, {.kind = SnapshotKind::kPromptTail}, now_);
  }
  // Messages of one call, to those who hear.
  int Tell(std::map<LinkId, Heard>& heard, const std::set<LinkId>& deaf = {}) {
    teller_.Tell(links_);
    int messages = 0;
    for (const SendToRouter& action : links_.Take()) {
      if (!action.message.has_prefixes()) continue;
      ++messages;
      if (!deaf.contains(action.link)) heard[action.link].Take(action.message.prefixes());
    }
    return messages;
  }
  void ExpectKnown(const Heard& heard) const {
    std::set<uint64_t> latents, snapshots;
    cache_->tree().ForEach([&](const PrefixKey& key, int64_t, bool snapshot) {
      latents.insert(key.index());
      if (snapshot) snapshots.insert(key.index());
    });
    EXPECT_TRUE(heard.complete);
    EXPECT_EQ(heard.latents, latents);
    EXPECT_EQ(heard.snapshots, snapshots);
  }

  StatePools pools_;
  std::unique_ptr<PrefixCache> cache_;
  PrefixTeller teller_;
  WorkerLinks links_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(PrefixTellerTest, RoutersKnowWhatIsHeldWheneverTheyCame) {
  std::map<LinkId, Heard> heard;
  links_.Open(kA);
  teller_.Begin(kA);
  Tell(heard);
  EXPECT_TRUE(heard[kA].complete) << "an empty cache is told too";
  for (uint64_t i = 0; i < 60; ++i) {
    Keep(i % 23, 1 + static_cast<int64_t>(i * 7 % 30));
    if (i == 30) {
      links_.Open(kB);
      teller_.Begin(kB);
    }
    if (i % 3 == 0) Tell(heard);
  }
  while (Tell(heard) > 0) {
  }
  ExpectKnown(heard[kA]);
  ExpectKnown(heard[kB]);
  EXPECT_EQ(Tell(heard), 0) << "nothing new";
  cache_->Clear();
  while (Tell(heard) > 0) {
  }
  ExpectKnown(heard[kA]);
  EXPECT_TRUE(heard[kB].latents.empty());
}

TEST_F(PrefixTellerTest, MuchIsToldInBoundedMessagesAndNotComplete) {
  for (uint64_t i = 0; i < 60; ++i) Keep(i, 300);
  std::map<LinkId, Heard> heard;
  links_.Open(kA);
  teller_.Begin(kA);
  EXPECT_EQ(Tell(heard), 4);
  EXPECT_FALSE(heard[kA].complete);
  Keep(99, 10);  // meanwhile
  while (Tell(heard) > 0) {
  }
  ExpectKnown(heard[kA]);
}

// What is held is several times what may wait for a link, and what one call tells.
class SmallPrefixTellerTest : public PrefixTellerTest {
 protected:
  SmallPrefixTellerTest()
      : PrefixTellerTest({.message_facts = 4, .messages_at_once = 2, .untold_max = 20}) {}
};

TEST_F(SmallPrefixTellerTest, HoweverMuchIsHeldIsToldToItsEnd) {
  for (uint64_t i = 0; i < 10; ++i) Keep(i, 6);
  std::map<LinkId, Heard> heard;
  links_.Open(kA);
  teller_.Begin(kA);
  for (int call = 0; call < 20; ++call) Tell(heard);
  ASSERT_EQ(heard[kA].latents.size(), 60u);
  ExpectKnown(heard[kA]);
}

TEST_F(SmallPrefixTellerTest, WhenMoreChangedThanIsHeldEverythingIsToldAnew) {
  std::map<LinkId, Heard> heard;
  links_.Open(kA);
  teller_.Begin(kA);
  Tell(heard);
  for (uint64_t i = 0; i < 10; ++i) {
    Keep(i, 6);
    cache_->Clear();
  }
  Keep(10, 1);
  EXPECT_EQ(Tell(heard), 1);
  EXPECT_EQ(heard[kA].last.value_or(99), 0u) << "the first of a new count";
  ExpectKnown(heard[kA]);
}

TEST_F(PrefixTellerTest, BeginningAnewMakesALostMessageGood) {
  std::map<LinkId, Heard> heard;
  for (const LinkId link : {kA, kB}) {
    links_.Open(link);
    teller_.Begin(link);
  }
  Keep(1, 10);
  Tell(heard);
  Keep(2, 10);
  Tell(heard, {kA});  // lost on its way
  teller_.Begin(kA);
  Keep(3, 10);
  const int before = heard[kB].messages;
  while (Tell(heard) > 0) {
  }
  ExpectKnown(heard[kA]);
  ExpectKnown(heard[kB]);
  EXPECT_EQ(heard[kB].messages, before + 1) << "the other hears what is new, once";
  teller_.End(kB);
  Keep(4, 5);
  EXPECT_GT(Tell(heard), 0);
  EXPECT_EQ(heard[kB].messages, before + 1);
}

}  // namespace
}  // namespace deltamesh
