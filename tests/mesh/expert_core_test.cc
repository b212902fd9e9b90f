// When a draining expert shard may leave.
#include "services/expert/expert_core.h"

#include <gtest/gtest.h>

namespace deltamesh {
namespace {

class ExpertDrain : public ::testing::Test {
 protected:
  // Ticks as the host does.
  void Pass(absl::Duration time) {
    for (const absl::Time until = now_ + time; now_ < until;) {
      now_ += absl::Milliseconds(20);
      core_.Tick(now_);
    }
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  ExpertUse use_;
  ExpertCore core_{{.quiet = absl::Milliseconds(500)}, {}, [this] { return use_; }};
};

TEST_F(ExpertDrain, LeavesAfterAQuietTime) {
  use_.arrived = 7;
  Pass(absl::Seconds(2));
  EXPECT_TRUE(core_.Idle());
  core_.Drain(now_);
  EXPECT_FALSE(core_.Idle());
  Pass(absl::Milliseconds(480));
  EXPECT_FALSE(core_.Idle());
  Pass(absl::Milliseconds(40));
  EXPECT_TRUE(core_.Idle());
}

TEST_F(ExpertDrain, StaysWhileStepsUseIt) {
  core_.Drain(now_);
  for (int call = 0; call < 20; ++call) {
    ++use_.arrived;
    Pass(absl::Milliseconds(300));
    EXPECT_FALSE(core_.Idle()) << call;
  }
  Pass(absl::Milliseconds(300));
  EXPECT_TRUE(core_.Idle());
  ++use_.arrived;  // a late one takes the word back
  Pass(absl::Milliseconds(20));
  EXPECT_FALSE(core_.Idle());
}

TEST_F(ExpertDrain, StaysWhileACallIsComputed) {
  use_ = {.arrived = 1, .open = 1};
  core_.Drain(now_);
  Pass(absl::Seconds(3));
  EXPECT_FALSE(core_.Idle());
  use_.open = 0;
  Pass(absl::Milliseconds(520));
  EXPECT_TRUE(core_.Idle());
}

TEST_F(ExpertDrain, TellsRouters) {
  core_.OnLinkOpened(1, now_);
  mesh::RouterMessage message;
  message.mutable_registered()->set_heartbeat_ms(5000);
  core_.OnRouterMessage(1, message, now_);
  Pass(absl::Milliseconds(20));
  core_.TakeActions();
  core_.Drain(now_);
  Pass(absl::Milliseconds(20));
  const auto actions = core_.TakeActions();
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_TRUE(actions[0].message.heartbeat().draining());
}

}  // namespace
}  // namespace deltamesh
