// The probe over the in-process transport, where only its counting can go wrong.

#include "runtime/transfer/bandwidth_probe.h"

#include <gtest/gtest.h>

#include "runtime/transfer/inproc_transport.h"

namespace deltamesh {
namespace {

struct ProbeEnds {
  InprocNetwork network;
  std::unique_ptr<Transport> a = *network.Open("a"), b = *network.Open("b");
  BandwidthProbe here{a.get()}, there{b.get(), 1 << 20};
  ~ProbeEnds() {
    a.reset();
    b.reset();
  }
};

TEST(BandwidthProbeTest, CountsEveryPayloadOnce) {
  ProbeEnds ends;
  const PeerId peer = *ends.a->Connect("b");
  const auto result =
      ends.here.Measure(peer, {.payload_bytes = 100'000, .payloads = 7, .in_flight = 3});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->bytes_per_second, 0);
  EXPECT_GT(result->round_trip_seconds, 0);
  EXPECT_EQ(ends.b->stats().bytes_received, 700'000u);
  EXPECT_EQ(ends.b->stats().messages_received, 7u + 6u);
}

TEST(BandwidthProbeTest, AMissingAnswerIsADeadline) {
  ProbeEnds ends;
  const PeerId peer = *ends.a->Connect("b");
  ends.network.SetFault([](const InprocMessage& m) {
    return InprocFault{.drop = m.payload_bytes > 0 && m.number == 14};
  });
  const auto result = ends.here.Measure(
      peer,
      {.payload_bytes = 1000, .payloads = 16, .in_flight = 4, .timeout = absl::Milliseconds(50)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
}

// One of before probes, say, is no slow one.
TEST(BandwidthProbeTest, APeerThatAnswersNothingIsTold) {
  InprocNetwork network;
  std::unique_ptr<Transport> a = *network.Open("a"), b = *network.Open("b");
  BandwidthProbe here(a.get());
  const auto result = here.Measure(*a->Connect("b"), {.timeout = absl::Milliseconds(50)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  a.reset();
  b.reset();
}

// Payloads that were announced and do not come hold no more than a bound.
TEST(BandwidthProbeTest, PayloadsThatNeverComeAreBounded) {
  InprocNetwork network;
  std::unique_ptr<Transport> b = *network.Open("b");
  BandwidthProbe there(b.get());
  const Arrival arrival{
      .peer = 1, .type = MessageType::kProbe, .header = "probe", .payload_bytes = 1000};
  std::vector<PayloadTarget> targets;
  for (int i = 0; i < 64; ++i) targets.push_back(*there.OnMessage(arrival));
  EXPECT_EQ(there.OnMessage(arrival).status().code(), absl::StatusCode::kResourceExhausted);
  targets.back().done(absl::UnavailableError("lost"));
  EXPECT_TRUE(there.OnMessage(arrival).ok());
  Arrival answer = arrival;
  answer.header = "probed";
  EXPECT_EQ(there.OnMessage(answer).status().code(), absl::StatusCode::kInvalidArgument);
  b.reset();
}

TEST(BandwidthProbeTest, ALostPeerEndsIt) {
  ProbeEnds ends;
  const PeerId peer = *ends.a->Connect("b");
  ends.network.SetFault([&](const InprocMessage& m) {
    if (m.payload_bytes > 0) ends.network.Kill("b");
    return InprocFault{};
  });
  EXPECT_EQ(ends.here.Measure(peer).status().code(), absl::StatusCode::kUnavailable);
}

TEST(BandwidthProbeTest, APeerThatWasLostBeforeEndsItAtOnce) {
  ProbeEnds ends;
  const PeerId peer = *ends.a->Connect("b");
  ends.network.Kill("b");
  EXPECT_EQ(ends.here.Measure(peer, {.timeout = absl::Seconds(60)}).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(BandwidthProbeTest, StopEndsAMeasurementAndLaterOnes) {
  ProbeEnds ends;
  const PeerId peer = *ends.a->Connect("b");
  ends.network.SetFault([&](const InprocMessage& m) {
    if (m.payload_bytes == 0) return InprocFault{};
    ends.here.Stop();
    return InprocFault{.drop = true};
  });
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ends.here.Measure(peer, {.timeout = absl::Seconds(60)}).status().code(),
              absl::StatusCode::kCancelled);
  }
}

TEST(BandwidthProbeTest, OversizedPayloadsAreRefused) {
  ProbeEnds ends;
  const PeerId peer = *ends.a->Connect("b");
  const auto result = ends.here.Measure(peer, {.payload_bytes = (1 << 20) + 1,
                                               .payloads = 16,
                                               .in_flight = 4,
                                               .timeout = absl::Milliseconds(50)});
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(ends.b->stats().dropped, 4u);
}

}  // namespace
}  // namespace deltamesh
