// gRPC's words on the wire, by the examples of its specification and by hand.
#include "services/common/grpc_wire.h"

#include <gtest/gtest.h>

#include "health/v1/health.pb.h"

namespace deltamesh {
namespace {

using std::chrono::nanoseconds;

TEST(GrpcWireTest, AMessageHasItsLengthBeforeIt) {
  grpc::health::v1::HealthCheckRequest message;
  EXPECT_EQ(GrpcMessage(message), std::string(5, '\0'));
  message.set_service(std::string(300, 'x'));
  const std::string wire = GrpcMessage(message);
  // A tag, two bytes of length, 300 of text: 0x12f.
  ASSERT_EQ(wire.substr(0, 8), std::string("\0\0\0\x01\x2f\x0a\xac\x02", 8));
  EXPECT_EQ(wire.substr(8), message.service());
  const GrpcPrefix prefix = ReadGrpcPrefix(wire.data());
  EXPECT_FALSE(prefix.compressed);
  EXPECT_EQ(prefix.bytes, 0x12fu);
  EXPECT_TRUE(ReadGrpcPrefix("\x01\xff\xfe\xfd\xfc").compressed);
  EXPECT_EQ(ReadGrpcPrefix("\x01\xff\xfe\xfd\xfc").bytes, 0xfffefdfcu);
}

TEST(GrpcWireTest, TimeoutsHaveADigitOrEightAndAUnit) {
  EXPECT_EQ(ReadGrpcTimeout("1n"), nanoseconds(1));
  EXPECT_EQ(ReadGrpcTimeout("20u"), nanoseconds(20'000));
  EXPECT_EQ(ReadGrpcTimeout("99999999m"), std::chrono::milliseconds(99'999'999));
  EXPECT_EQ(ReadGrpcTimeout("1S"), std::chrono::seconds(1));
  EXPECT_EQ(ReadGrpcTimeout("5M"), std::chrono::minutes(5));
  EXPECT_EQ(ReadGrpcTimeout("2H"), std::chrono::hours(2));
  EXPECT_GT(ReadGrpcTimeout("99999999H"), std::chrono::hours(24 * 365));
  for (const char* bad : {"", "1", "S", "-1S", "1.5S", "123456789S", "1s", "1 S", "0x1S"}) {
    EXPECT_FALSE(ReadGrpcTimeout(bad)) << bad;
  }
}

TEST(GrpcWireTest, WhatIsNotPrintableIsPercentEncoded) {
  EXPECT_EQ(WriteGrpcMessage("plain, text!~ "), "plain, text!~ ");
  EXPECT_EQ(WriteGrpcMessage("100%\n\xc3\xa9\x7f"), "100%25%0A%C3%A9%7F");
}

}  // namespace
}  // namespace deltamesh
