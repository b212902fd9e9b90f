// `deltamesh explain` and the operators' call behind it, of requests that came over HTTP: traces, refusals,
// and estimates that nobody has measured.
#include "services/cli/explain.h"

#include <google/protobuf/util/json_util.h>

#include <functional>
#include <sstream>

#include "services/common/grpc_server.h"
#include "services/router/operations_service.h"
#include "tests/unit/services/openai_fixture.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kParent[] = "00f067aa0ba902b7";
const std::string kTraceparent = std::string("00-") + kTrace + "-" + kParent + "-01";

class ExplainCliTest : public OpenAiHttpTest {
 protected:
  void Serve(const std::function<void()>& before_join = {}) {
    Start("kimi_linear_tiny", false);
    if (before_join) before_join();
    mesh->Join();
    operations_ = std::make_unique<OperationsService>(mesh->router.get());
    grpc_ = GrpcServer::Start({}, {operations_.get()}).value();
  }
  void TearDown() override {
    grpc_.reset();
    OpenAiHttpTest::TearDown();
  }

  RawHttp::Response Ask(const std::string& headers, const std::string& more = "") {
    RawHttp client(server->port());
    std::string request = RawHttp::Post(
        "/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}])" + more + "}");
    request.insert(request.find("\r\n") + 2, headers);
    client.Send(request);
    return client.ReadResponse();
  }
  static std::string HeaderOf(const RawHttp::Response& response, const std::string& name) {
    const size_t at = response.head.find(name + ": ");
    if (at == response.head.npos) return "";
    const size_t begin = at + name.size() + 2;
    return response.head.substr(begin, response.head.find("\r\n", begin) - begin);
  }

  absl::StatusOr<std::string> Explain(const std::string& request, const std::string& trace = "",
                                      bool json = false) {
    std::ostringstream out;
    const ExplainOptions options = {
        .router = grpc_->address(), .request_id = request, .trace_id = trace, .json = json};
    RETURN_IF_ERROR(RunExplain(options, out));
    return out.str();
  }
  v1::RequestExplanation Explained(const std::string& request) {
    v1::RequestExplanation r;
    const auto json = Explain(request, "", true);
    CHECK(json.ok() && google::protobuf::util::JsonStringToMessage(*json, &r).ok(), "%s: %s",
          request, json.status().ToString());
    return r;
  }

 private:
  std::unique_ptr<OperationsService> operations_;
  std::unique_ptr<GrpcServer> grpc_;
};

// What a client or a worker is called moves no cursor and passes for no line.
TEST(DescribeRequestTest, NothingThatOthersSentActsOnATerminal) {
  v1::RequestExplanation r;
  r.set_refused(true);
  r.set_message("model: \"x\x1b[2J\n* decode-0\u202e\u009bé\" is not served here");
  EXPECT_THAT(DescribeRequest(r),
              HasSubstr(R"(model: "x\x1b[2J\x0a* decode-0\u202e\x9bé" is not served here)"));
  r.set_refused(false);
  r.set_placements(1);
  r.add_candidates()->set_decode("a\n* b");
  const std::string text = DescribeRequest(r);
  EXPECT_THAT(text, HasSubstr(R"(a\x0a* b alone)"));
  EXPECT_EQ(text.find('\x1b'), text.npos);
}

TEST(DescribeRequestTest, WhatLiesBelowMemoryIsSaid) {
  v1::RequestExplanation r;
  r.set_looked_up(true);
  r.set_latent_tokens(640);
  r.set_latents_at("d1");
  r.set_snapshot_tokens(576);
  r.set_snapshot_at("d1");
  EXPECT_THAT(DescribeRequest(r), HasSubstr("latents to 640 (d1), snapshot at 576 (d1)\n"));
  r.set_snapshot_cold(true);
  EXPECT_THAT(DescribeRequest(r), HasSubstr("snapshot at 576 (d1's disk), none in memory\n"));
  r.set_warm_tokens(128);
  EXPECT_THAT(DescribeRequest(r), HasSubstr("snapshot at 576 (d1's disk), in memory at 128\n"));
  r.set_placements(1);
  v1::PlacementCandidate* c = r.add_candidates();
  c->set_decode("d1");
  c->set_room(true);
  c->set_cached_tokens(576);
  c->set_queue_seconds(0);
  EXPECT_THAT(DescribeRequest(r), HasSubstr("576 cached)\n"));
  c->set_read_bytes(3 << 20);
  c->set_read_seconds(1.5);
  c->set_read_from("disk");
  EXPECT_THAT(DescribeRequest(r),
              HasSubstr("576 cached, 3.0 MiB of it read from its disk in 1.50 s)\n"));
  r.set_object_store_tokens(1280);
  c->set_read_from("object store");
  EXPECT_THAT(DescribeRequest(r), HasSubstr(", in memory at 128, in the object store at 1280\n"));
  EXPECT_THAT(DescribeRequest(r), HasSubstr("3.0 MiB of it read from the object store in 1.50 s)"));
}

TEST_F(ExplainCliTest, ARequestIsFoundByItsTraceAndAnswersWithItsSpan) {
  Serve();
  const RawHttp::Response traced = Ask("Traceparent: " + kTraceparent + "\r\n");
  ASSERT_EQ(traced.status, 200) << traced.body;
  const std::string id = HeaderOf(traced, "X-Request-Id");
  const v1::RequestExplanation r = Explained(id);
  EXPECT_EQ(r.trace_id(), kTrace);
  EXPECT_EQ(r.parent_span_id(), kParent);
  EXPECT_EQ(r.span_id().size(), 16u);
  EXPECT_NE(r.span_id(), kParent);
  EXPECT_EQ(HeaderOf(traced, "traceresponse"),
            std::string("00-") + kTrace + "-" + r.span_id() + "-01");
  // Another of the same trace, streamed: its own span. By the trace both are found.
  const RawHttp::Response other =
      Ask("traceparent: " + kTraceparent + "\r\n", R"(, "stream": true)");
  EXPECT_THAT(HeaderOf(other, "traceresponse"), HasSubstr(kTrace));
  EXPECT_NE(HeaderOf(other, "traceresponse"), HeaderOf(traced, "traceresponse"));
  const auto found = Explain("", kTrace);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(*found, HasSubstr(id));
  EXPECT_THAT(*found, HasSubstr(HeaderOf(other, "X-Request-Id")));
  EXPECT_THAT(*found, HasSubstr(absl::StrFormat("trace %s, span %s of %s\n", kTrace, r.span_id(),
                                                kParent)));
  const auto none = Explain("", std::string(32, 'e'));
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("trace_id: \"eeee"));
}

TEST_F(ExplainCliTest, AnIllFormedTraceparentCostsNobodyHisAnswer) {
  Serve();
  for (const std::string& headers :
       {std::string(), std::string("traceparent: nonsense\r\n"),
        "traceparent: 00-" + std::string(32, '0') + "-" + kParent + "-01\r\n",
        "traceparent: " + kTraceparent + "\r\ntraceparent: " + kTraceparent + "\r\n"}) {
    const RawHttp::Response response = Ask(headers);
    EXPECT_EQ(response.status, 200) << headers;
    EXPECT_EQ(HeaderOf(response, "traceresponse"), "") << headers;
    EXPECT_EQ(Explained(HeaderOf(response, "X-Request-Id")).trace_id(), "") << headers;
  }
}

// Whatever is refused carries the id under which it can be explained.
TEST_F(ExplainCliTest, RefusedRequestsAreExplainedByTheirReason) {
  script = [](const mesh::StartDecode&) {
    Script s;
    s.end = false;  // stays
    return s;
  };
  options.live_requests_max = options.waiting_requests_max = 1;
  Serve();
  const auto refused = [&](const std::string& more, int status, const std::string& code,
                           const std::string& why) {
    const RawHttp::Response response = Ask("traceparent: " + kTraceparent + "\r\n", more);
    EXPECT_EQ(response.status, status) << response.body;
    EXPECT_THAT(HeaderOf(response, "traceresponse"), HasSubstr(kTrace));
    const std::string id = HeaderOf(response, "X-Request-Id");
    ASSERT_NE(id, "") << response.head;
    const v1::RequestExplanation r = Explained(id);
    EXPECT_TRUE(r.refused());
    EXPECT_EQ(r.status(), code);
    EXPECT_THAT(r.message(), HasSubstr(why));
    EXPECT_EQ(r.trace_id(), kTrace);
    const auto text = Explain(id);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_THAT(*text, HasSubstr("refused before the queue, " + code + ": "));
    EXPECT_THAT(*text, Not(HasSubstr("tokens restored"))) << "nothing of what never was";
  };
  refused(R"(, "session": "s", "append_to_session": true)", 404, "NOT_FOUND", "session: \"s\"");
  refused(R"(, "append_to_session": true)", 400, "INVALID_ARGUMENT", "without session");
  refused(R"(, "temperature": 9)", 400, "INVALID_ARGUMENT", "temperature: 9");
  refused(R"(, "model": "another")", 404, "NOT_FOUND", "model: \"another\"");
  refused(R"(, "max_tokens": )", 400, "INVALID_ARGUMENT", "body: ");
  RawHttp held(server->port());
  held.Send(RawHttp::Post("/v1/completions", R"({"prompt": [7]})"));
  ASSERT_TRUE(FakeMesh::Await([&] { return mesh->router->snapshot().gauges.live == 1; }));
  refused("", 429, "RESOURCE_EXHAUSTED", "1 requests are in the mesh");
  mesh->router->Drain();
  refused("", 503, "UNAVAILABLE", "draining");
}

// A request of 133 tokens takes no 133 seconds.
TEST_F(ExplainCliTest, TokensAreNotPrintedAsSeconds) {
  Serve();
  const std::string id = HeaderOf(Ask(""), "X-Request-Id");
  const v1::RequestExplanation r = Explained(id);
  EXPECT_FALSE(r.measured());
  ASSERT_EQ(r.candidates_size(), 1);
  const v1::PlacementCandidate& c = r.candidates(0);
  EXPECT_EQ(c.relative_cost(), static_cast<double>(r.prompt_tokens()));
  EXPECT_FALSE(c.has_queue_seconds() || c.has_move_seconds() || c.has_compute_seconds() ||
               c.has_stall_seconds() || c.has_fetch_seconds());
  EXPECT_THAT(*Explain(id),
              HasSubstr(absl::StrFormat("not measured yet: %d tokens of work, its own %d",
                                        r.prompt_tokens(), r.prompt_tokens())));
}

TEST_F(ExplainCliTest, WhatWasMeasuredIsInSeconds) {
  Serve([this] { mesh->prompt_rate = 1000; });
  ASSERT_EQ(Ask("").status, 200);
  ASSERT_TRUE(FakeMesh::Await([&] {  // a heartbeat came
    return Explained(HeaderOf(Ask(""), "X-Request-Id")).measured();
  }));
  const std::string id = HeaderOf(Ask(""), "X-Request-Id");
  const v1::RequestExplanation r = Explained(id);
  const v1::PlacementCandidate& c = r.candidates(0);
  EXPECT_FALSE(c.has_relative_cost());
  EXPECT_DOUBLE_EQ(c.compute_seconds(), static_cast<double>(r.prompt_tokens()) / 1000);
  EXPECT_THAT(*Explain(id), Not(HasSubstr("not measured")));
}

TEST(ExplainOptionsTest, WhatCannotBeAskedIsNamed) {
  std::ostringstream out;
  const auto error = [&](const ExplainOptions& options) {
    const absl::Status status = RunExplain(options, out);
    return std::string(status.message());
  };
  EXPECT_THAT(error({.request_id = "a\xff"}),
              HasSubstr("the request: \"a\xEF\xBF\xBD\" holds a blank, or a byte that is not"));
  EXPECT_THAT(error({.request_id = "a", .trace_id = kTrace}), HasSubstr("--trace: with a request"));
  const std::string nobody = error({.router = "127.0.0.1:1", .seconds = 5});
  EXPECT_THAT(nobody, HasSubstr("--router: no router answers at 127.0.0.1:1 ("));
  EXPECT_THAT(nobody, HasSubstr("start one with `deltamesh serve`"));
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace deltamesh
