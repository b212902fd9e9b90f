// What requests share at a worker is charged once.
#include "tests/unit/services/session_harness.h"

namespace deltamesh {
namespace {

class SharedRoomTest : public SessionCallsTest {
 protected:
  // Those that are placed. The worker has 64 blocks; each needs 26, of the same prompt.
  std::string Place(const std::vector<std::string>& ids) {
    std::string placed;
    for (const std::string& id : ids) {
      EXPECT_TRUE(Submit(id, 1600).ok());
      if (Drain().find("StartDecode " + id + " ") != std::string::npos) placed += id;
    }
    return placed;
  }
  void End(const std::string& id) { Tokens(kDecode, id, {1}, 0, mesh::SequenceOutput::STOP_TOKEN); }
};

TEST_F(SharedRoomTest, WhatIsRestoredTwiceIsHeldOnce) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  Hold(kDecode, 16);
  EXPECT_EQ(Place({"a", "b", "c", "d"}), "abcd");  // 26 + 3 * 10
  Beat(kDecode, 4, 64);                            // left before they arrived
  Drain();
  // Who comes first may go first: the others hold what it shared.
  End("a");
  Beat(kDecode, 4, 64);
  EXPECT_EQ(Drain().find("StartDecode"), std::string::npos);
  EXPECT_TRUE(Submit("large", 1900).ok());  // 30 blocks, 14 of them new; 46 are held
  EXPECT_NE(Drain().find("StartDecode large"), std::string::npos);
  for (const char* id : {"b", "c", "d", "large"}) End(id);
  Drain();
  // All is given back, and no more than that.
  for (const char* id : {"x", "y", "z"}) {
    ClientRequest request = Make(id, 2000);
    for (TokenId& token : request.prompt) token += id[0];
    EXPECT_TRUE(core->Submit(request, now).ok());
    EXPECT_EQ(Drain().find("StartDecode") != std::string::npos, std::string(id) != "z");
  }
}

// Those that compute the same at the same time hold it each for itself.
TEST_F(SharedRoomTest, WhatIsComputedTwiceIsHeldTwice) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  Hold(kDecode, 1);
  EXPECT_EQ(Place({"a", "b", "c", "d"}), "ab");  // 26 + 25
}

// What is read from a disk comes into blocks of its own.
TEST_F(SharedRoomTest, WhatIsColdIsNotHeldYet) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  Hold(kDecode, 16, /*cold=*/true);
  EXPECT_EQ(Place({"a", "b", "c"}), "ab");
}

// What lies in memory below it is.
TEST_F(SharedRoomTest, WhatIsWarmBelowWhatIsColdIsHeld) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  Hold(kDecode, 16, /*cold=*/true, /*warm=*/13);
  EXPECT_EQ(Place({"a", "b", "c", "d"}), "abc");  // 26 + 13 + 13
}

}  // namespace
}  // namespace deltamesh
