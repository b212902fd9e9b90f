#include "services/router/prefix_feed.h"

#include <gtest/gtest.h>

namespace deltamesh {
namespace {

mesh::PrefixChanges Message(uint64_t sequence, std::vector<uint64_t> keys,
                            std::vector<mesh::PrefixChanges::What> changes, bool complete = true) {
  mesh::PrefixChanges out;
  out.set_sequence(sequence);
  for (const uint64_t key : keys) out.add_keys(key);
  for (const auto what : changes) out.mutable_changes()->push_back(static_cast<char>(what));
  out.set_complete(complete);
  return out;
}

constexpr auto kAdded = mesh::PrefixChanges::LATENTS_ADDED;
constexpr auto kSnapshot = mesh::PrefixChanges::SNAPSHOT_ADDED;
using Heard = PrefixFeed::Heard;

TEST(PrefixFeed, NothingIsCreditedBeforeEverythingWasTold) {
  PrefixFeed feed;
  const std::vector<uint64_t> keys = {1, 2, 3};
  EXPECT_EQ(feed.OnChanges(5, Message(0, {1, 2}, {kAdded, kAdded}, false)), Heard::kTaken);
  EXPECT_TRUE(feed.Find(keys).empty());
  EXPECT_EQ(feed.unknown(), 1);
  EXPECT_EQ(feed.OnChanges(5, Message(1, {3, 3}, {kAdded, kSnapshot})), Heard::kTaken);
  EXPECT_EQ(feed.unknown(), 0);
  const auto found = feed.Find(keys);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found.at(5).latents.value(), 3);
  EXPECT_EQ(found.at(5).snapshot.value(), 3);
}

TEST(PrefixFeed, AGapMakesThatWorkerUnknownUntilItBeginsAnew) {
  PrefixFeed feed;
  const std::vector<uint64_t> keys = {1, 2};
  for (const LinkId link : {5, 6}) feed.OnChanges(link, Message(0, {1, 2}, {kAdded, kAdded}));
  EXPECT_EQ(feed.OnChanges(5, Message(2, {9}, {kAdded})), Heard::kResync);
  EXPECT_EQ(feed.Find(keys).count(5), 0u);
  EXPECT_EQ(feed.Find(keys).count(6), 1u);
  EXPECT_EQ(feed.OnChanges(5, Message(3, {9}, {kAdded})), Heard::kIgnored);
  EXPECT_EQ(feed.OnChanges(5, Message(0, {1}, {kAdded})), Heard::kTaken);
  EXPECT_EQ(feed.Find(keys).at(5).latents.value(), 1) << "what it told before is forgotten";
  EXPECT_EQ(feed.OnChanges(7, Message(4, {1}, {kAdded})), Heard::kIgnored) << "never began";
}

TEST(PrefixFeed, ABadMessageIsRefusedWhole) {
  PrefixFeed feed;
  feed.OnChanges(5, Message(0, {}, {}));
  EXPECT_EQ(feed.OnChanges(5, Message(1, {1, 2}, {kAdded})), Heard::kMalformed);
  mesh::PrefixChanges odd = Message(1, {1}, {kAdded});
  odd.set_changes(std::string(1, '\x7f'));
  EXPECT_EQ(feed.OnChanges(5, odd), Heard::kMalformed);
  EXPECT_TRUE(feed.Find(std::vector<uint64_t>{1}).empty());
  EXPECT_EQ(feed.OnChanges(5, Message(0, {1}, {kAdded})), Heard::kTaken) << "it may begin anew";
  EXPECT_EQ(feed.Find(std::vector<uint64_t>{1}).at(5).latents.value(), 1);
}

TEST(PrefixFeed, ManyWorkersComeAndGo) {
  PrefixFeed feed;
  const std::vector<uint64_t> keys = {1, 2, 3};
  for (LinkId link = 1; link <= 300; ++link) {
    feed.OnChanges(link, Message(0, {1, 2, 3, 3}, {kAdded, kAdded, kAdded, kSnapshot}));
    if (link > 100) feed.Forget(link - 100);
    feed.Sweep();
    ASSERT_EQ(feed.Find(keys).size(), std::min<size_t>(link, 100));
  }
  for (const auto& [link, match] : feed.Find(keys)) {
    EXPECT_GT(link, 200u);
    EXPECT_EQ(match.snapshot.value(), 3);
  }
}

}  // namespace
}  // namespace deltamesh
