#include "runtime/base/status.h"

#include <gtest/gtest.h>

#include "absl/strings/cord.h"

namespace deltamesh {
namespace {

absl::Status Inner(bool fail) {
  if (fail) return InvalidArgument("top_k: %d is negative; use 0 for no limit", -3);
  return absl::OkStatus();
}
absl::StatusOr<int> Value(bool fail) {
  RETURN_IF_ERROR(Inner(fail));
  return 7;
}
absl::StatusOr<std::string> Twice(bool fail) {
  ASSIGN_OR_RETURN(const int a, Value(fail));
  ASSIGN_OR_RETURN(const int b, Value(false));
  return std::to_string(a + b);
}

TEST(Status, MacrosPassErrorsOnAndValuesThrough) {
  EXPECT_EQ(*Twice(false), "14");
  const absl::Status s = Twice(true).status();
  EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MessageOf(s), "top_k: -3 is negative; use 0 for no limit");
}

TEST(Status, AnnotateKeepsTheCode) {
  const absl::Status s = Annotate(DataLoss("crc %08x", 5u), "layer 3");
  EXPECT_EQ(s.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(MessageOf(s), "layer 3: crc 00000005");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok());
  absl::Status hinted = DataLoss("x");
  hinted.SetPayload("type", absl::Cord("what it carries"));
  EXPECT_EQ(Annotate(hinted, "y").GetPayload("type"), absl::Cord("what it carries"));
}

TEST(StatusDeathTest, CheckSaysWhatAndWhere) {
  EXPECT_DEATH(CHECK(1 == 2, "one is %d", 1), "status_test.cc.*1 == 2 one is 1");
}

}  // namespace
}  // namespace deltamesh
