// Spans of requests: what they say, and that a collector, whatever it does, keeps nobody waiting.
#include "services/router/span_exporter.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <map>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "runtime/base/log.h"

namespace deltamesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Decision Recorded(const std::string& id = "chat/1") {
  Decision d;
  d.request_id = id;
  d.trace = {.trace_id = "4bf92f3577b34da6a3ce929d0e0e4736",
             .parent_id = "00f067aa0ba902b7",
             .span_id = "0102030405060708",
             .flags = 1};
  d.submitted = absl::FromUnixSeconds(1000);
  return d;
}

std::string Text(const otlp::AnyValue& value) {
  switch (value.value_case()) {
    case otlp::AnyValue::kStringValue:
      return value.string_value();
    case otlp::AnyValue::kIntValue:
      return std::to_string(value.int_value());
    case otlp::AnyValue::kDoubleValue:
      return absl::StrFormat("%g", value.double_value());
    case otlp::AnyValue::kBoolValue:
      return value.bool_value() ? "true" : "false";
    case otlp::AnyValue::kArrayValue: {
      std::string out;
      for (const otlp::AnyValue& each : value.array_value().values()) out += Text(each) + "; ";
      return out;
    }
    case otlp::AnyValue::VALUE_NOT_SET:
      return "nothing";
  }
  return "";
}

std::map<std::string, std::string> AttributesOf(const otlp::Span& span) {
  std::map<std::string, std::string> out;
  for (const otlp::KeyValue& a : span.attributes()) {
    EXPECT_TRUE(out.emplace(a.key(), Text(a.value())).second) << a.key() << " twice";
  }
  return out;
}

TEST(RequestSpanTest, SaysWhatExplainSays) {
  Decision d = Recorded();
  d.prompt_tokens = 700;
  d.completion_tokens = 12;
  d.latent_tokens = 640;
  d.snapshot_tokens = 512;
  d.snapshot_at = d.latents_at = "d1";
  d.placements = 1;
  d.waited_seconds = 0.25;
  d.reason = DecisionReason::kCheapest;
  d.measured = true;
  d.restored_tokens = 512;
  d.ttft_seconds = 0.5;
  d.seconds = 2;
  for (const double seconds : {0.1, 0.3}) {
    DecisionCandidate& c = d.candidates[d.candidate_count++];
    c.prefill = seconds > 0.2 ? "p1" : "";
    c.decode = "d1";
    c.cost.queue = seconds;
  }
  d.candidates_left_out = 3;
  const otlp::Span span = SpanOf(d);
  EXPECT_EQ(absl::BytesToHexString(span.trace_id()), d.trace.trace_id);
  EXPECT_EQ(absl::BytesToHexString(span.span_id()), d.trace.span_id);
  EXPECT_EQ(absl::BytesToHexString(span.parent_span_id()), d.trace.parent_id);
  EXPECT_EQ(span.start_time_unix_nano(), 1000'000'000'000u);
  EXPECT_EQ(span.end_time_unix_nano(), 1002'000'000'000u);
  ASSERT_EQ(span.events_size(), 2);
  EXPECT_EQ(span.events(0).name(), "placed");
  EXPECT_EQ(span.events(0).time_unix_nano(), 1000'250'000'000u);
  EXPECT_EQ(span.events(1).name(), "first_token");
  EXPECT_EQ(span.events(1).time_unix_nano(), 1000'500'000'000u);
  EXPECT_EQ(span.status().code(), otlp::Status::STATUS_CODE_UNSET);
  auto said = AttributesOf(span);
  EXPECT_EQ(said["deltamesh.request"], "chat/1");
  EXPECT_EQ(said["gen_ai.usage.input_tokens"], "700");
  EXPECT_EQ(said["gen_ai.usage.output_tokens"], "12");
  EXPECT_EQ(said["deltamesh.latent_tokens"], "640");
  EXPECT_EQ(said["deltamesh.snapshot_tokens"], "512");
  EXPECT_EQ(said["deltamesh.candidates"], "d1 0.1; p1>d1 0.3; ");
  EXPECT_EQ(said["deltamesh.candidates_left_out"], "3");
  EXPECT_EQ(said["deltamesh.decode"], "d1");
  EXPECT_EQ(said.count("deltamesh.prefill"), 0u) << "nobody prefilled";
  EXPECT_EQ(said["deltamesh.estimated_seconds"], "0.1");
  EXPECT_EQ(said["deltamesh.waited_seconds"], "0.25");
  EXPECT_EQ(said["deltamesh.ttft_seconds"], "0.5");
  EXPECT_EQ(said["deltamesh.restored_tokens"], "512");
}

TEST(RequestSpanTest, ARefusedRequestHasAnErrorAndNoChoice) {
  Decision d = Recorded();
  d.code = absl::StatusCode::kResourceExhausted;
  d.message = "retry later";
  d.seconds = 0.1;
  const otlp::Span span = SpanOf(d);
  EXPECT_EQ(span.status().code(), otlp::Status::STATUS_CODE_ERROR);
  EXPECT_EQ(span.status().message(), "retry later");
  EXPECT_EQ(span.events_size(), 0);
  auto said = AttributesOf(span);
  EXPECT_EQ(said["error.type"], "RESOURCE_EXHAUSTED");
  EXPECT_EQ(said.count("deltamesh.candidates"), 0u);
  d.measured = false;
  d.placements = 1;
  d.candidate_count = 1;
  d.candidates[0].decode = "d1";
  d.candidates[0].cost = {.queue = 700, .measured = false};
  said = AttributesOf(SpanOf(d));
  EXPECT_EQ(said["deltamesh.candidates"], "d1; ") << "tokens are no seconds";
  EXPECT_EQ(said.count("deltamesh.estimated_seconds"), 0u);
}

TEST(RequestSpanTest, OnlyWhatTheClientRecordsIsSent) {
  Decision d = Recorded();
  EXPECT_TRUE(IsRecorded(d));
  d.trace.flags = 2;
  EXPECT_FALSE(IsRecorded(d));
  d.trace = {};
  EXPECT_FALSE(IsRecorded(d));
}

// A collector of the test's own: gRPC's server, and what it was sent.
class Collector final : public otlp::TraceService::Service {
 public:
  using Answer = std::function<grpc::Status(otlp::ExportTraceServiceResponse*)>;

  explicit Collector(int port = 0) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port), grpc::InsecureServerCredentials(),
                             &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Collector() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Export(grpc::ServerContext*, const otlp::ExportTraceServiceRequest* request,
                      otlp::ExportTraceServiceResponse* response) override {
    absl::MutexLock lock(&mu_);
    ++calls_;
    const grpc::Status status = answer_ ? answer_(response) : grpc::Status::OK;
    if (!status.ok()) return status;
    for (const auto& of : request->resource_spans()) {
      for (const otlp::KeyValue& a : of.resource().attributes()) {
        resource_[a.key()] = a.value().string_value();
      }
      for (const auto& scope : of.scope_spans()) {
        for (const otlp::Span& span : scope.spans())
          ids_.push_back(AttributesOf(span)["deltamesh.request"]);
      }
    }
    return status;
  }
  void SetAnswer(Answer answer) {
    absl::MutexLock lock(&mu_);
    answer_ = std::move(answer);
  }
  std::vector<std::string> ids() {
    absl::MutexLock lock(&mu_);
    return ids_;
  }
  std::map<std::string, std::string> resource() {
    absl::MutexLock lock(&mu_);
    return resource_;
  }
  int calls() {
    absl::MutexLock lock(&mu_);
    return calls_;
  }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int port_ = 0;
  absl::Mutex mu_;
  Answer answer_;
  std::vector<std::string> ids_;
  std::map<std::string, std::string> resource_;
  int calls_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class SpanExporterTest : public ::testing::Test {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  static SpanExporterOptions Options(const std::string& endpoint) {
    SpanExporterOptions options;
    options.endpoint = endpoint;
    options.router = "r1";
    options.fill = absl::Milliseconds(5);
    options.retry_after = absl::Milliseconds(5);
    return options;
  }
  bool Await(const std::function<bool()>& done) {
    const absl::Time until = absl::Now() + absl::Seconds(20);
    while (!done() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(2));
    return done();
  }
  std::string Counted(const std::string& result) {
    const std::string text = metrics_.Expose();
    const size_t at = text.find("result=\"" + result + "\"");
    const size_t value = text.find(' ', at) + 1;
    return text.substr(value, text.find('\n', value) - value);
  }

  Metrics metrics_{{}};
};

TEST_F(SpanExporterTest, SpansReachTheCollectorInTheirOrder) {
  Collector collector;
  {
    SpanExporter exporter(Options(collector.endpoint()), &metrics_);
    for (const char* id : {"a", "b"}) exporter.Add(Recorded(id));
    Decision unrecorded = Recorded("c");
    unrecorded.trace.flags = 0;
    exporter.Add(unrecorded);
    EXPECT_TRUE(Await([&] { return collector.ids().size() == 2; }));
    exporter.Add(Recorded("last"));  // sent when it ends
  }
  EXPECT_THAT(collector.ids(), ElementsAre("a", "b", "last"));
  EXPECT_EQ(collector.resource()["service.name"], "deltamesh-router");
  EXPECT_EQ(collector.resource()["service.instance.id"], "r1");
  EXPECT_EQ(Counted("exported"), "3");
}

TEST_F(SpanExporterTest, WhatIsNotTakenIsTriedAgainAndThenCounted) {
  Collector collector;
  int tries = 0;
  collector.SetAnswer([&](auto*) {
    return ++tries < 3 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "later") : grpc::Status::OK;
  });
  SpanExporter exporter(Options(collector.endpoint()), &metrics_);
  exporter.Add(Recorded("a"));
  EXPECT_TRUE(Await([&] { return Counted("exported") == "1"; }));
  // For good: not tried again.
  collector.SetAnswer([](auto*) { return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no"); });
  exporter.Add(Recorded("b"));
  EXPECT_TRUE(Await([&] { return Counted("failed") == "1"; }));
  EXPECT_EQ(collector.calls(), 4);
  // Taken in part.
  collector.SetAnswer([](otlp::ExportTraceServiceResponse* response) {
    response->mutable_partial_success()->set_rejected_spans(1);
    return grpc::Status::OK;
  });
  exporter.Add(Recorded("c"));
  EXPECT_TRUE(Await([&] { return Counted("failed") == "2"; }));
  EXPECT_EQ(Counted("exported"), "1");
}

TEST_F(SpanExporterTest, ACollectorThatHangsBoundsWhatWaitsAndTheEnd) {
  std::atomic<bool> hang = true;
  Collector collector;
  collector.SetAnswer([&](auto*) {
    while (hang) absl::SleepFor(absl::Milliseconds(1));
    return grpc::Status::OK;
  });
  SpanExporterOptions options = Options(collector.endpoint());
  options.queue_max = 5;
  options.call_max = absl::Milliseconds(300);
  const absl::Time begin = absl::Now();
  {
    SpanExporter exporter(options, &metrics_);
    // Five may be on their way, and five wait.
    for (int i = 0; i < 50; ++i) exporter.Add(Recorded());
    EXPECT_GE(std::stoi(Counted("dropped")), 40);
  }
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  hang = false;
}

TEST_F(SpanExporterTest, WithoutAnEndpointNothingIsSentAndTheSeriesAreThere) {
  SpanExporter exporter(SpanExporterOptions(), &metrics_);
  exporter.Add(Recorded());
  EXPECT_EQ(Counted("exported"), "0");
  EXPECT_THAT(metrics_.Expose(), HasSubstr("deltamesh_spans_total"));
}

}  // namespace
}  // namespace deltamesh
