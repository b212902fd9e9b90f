// W3C Trace Context: https://www.w3.org/TR/trace-context/#traceparent-header, where the ids come from.
#include "services/common/trace_context.h"

#include <gtest/gtest.h>

#include <string>

namespace deltamesh {
namespace {

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kParent[] = "00f067aa0ba902b7";

TEST(TraceContextTest, WellFormedOnesAreRead) {
  const std::string common = std::string("-") + kTrace + "-" + kParent;
  for (const auto& [header, flags] :
       {std::pair("00" + common + "-01", 1), std::pair("00" + common + "-00", 0),
        std::pair("00" + common + "-ff", 255), std::pair("cc" + common + "-01", 1),
        std::pair("cc" + common + "-01-what-the-future-brings", 1)}) {
    const TraceContext trace = ParseTraceParent(header);
    EXPECT_EQ(trace.trace_id, kTrace) << header;
    EXPECT_EQ(trace.parent_id, kParent) << header;
    EXPECT_EQ(trace.flags, flags) << header;
    EXPECT_EQ(trace.span_id, "") << "who answers draws one";
  }
}

TEST(TraceContextTest, IllFormedOnesAreNone) {
  const std::string good = std::string("00-") + kTrace + "-" + kParent + "-01";
  ASSERT_FALSE(ParseTraceParent(good).empty());
  // Whatever is left out.
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    EXPECT_TRUE(ParseTraceParent(good.substr(0, bytes)).empty()) << bytes;
  }
  // Whatever stands where it must not: each byte by some that are no small hex digit and no dash, and each
  // dash by a digit.
  for (size_t at = 0; at < good.size(); ++at) {
    for (const char c : {'g', 'A', 'F', ' ', '_', '\0', '\xff'}) {
      std::string bad = good;
      bad[at] = c;
      EXPECT_TRUE(ParseTraceParent(bad).empty()) << bad;
    }
    std::string swapped = good;
    swapped[at] = good[at] == '-' ? '0' : '-';
    EXPECT_TRUE(ParseTraceParent(swapped).empty()) << swapped;
  }
  const std::string zeros(32, '0');
  for (const std::string& bad :
       {"ff" + good.substr(2), good + "-", good + "0", good + "-more", "01" + good.substr(2) + "0",
        "00-" + zeros + "-" + kParent + "-01",
        std::string("00-") + kTrace + "-" + zeros.substr(16) + "-01", " " + good, good + " "}) {
    EXPECT_TRUE(ParseTraceParent(bad).empty()) << bad;
  }
}

TEST(TraceContextTest, AnswersNameTheRequestsOwnSpan) {
  EXPECT_EQ(TraceResponse({}), "");
  EXPECT_EQ(SpanId(0), "0000000000000001") << "all zeros would be none";
  const TraceContext trace = {
      .trace_id = kTrace, .parent_id = kParent, .span_id = SpanId(0xABC), .flags = 1};
  const std::string response = TraceResponse(trace);
  EXPECT_EQ(response, std::string("00-") + kTrace + "-0000000000000abc-01");
  EXPECT_EQ(ParseTraceParent(response).parent_id, trace.span_id);
}

}  // namespace
}  // namespace deltamesh
