#include <grpcpp/grpcpp.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "runtime/base/status.h"
#include "runtime/text/text_digest.h"
#include "services/cli/bench_process.h"
#include "services/cli/bench_router.h"
#include "services/cli/bench_router_http.h"
#include "services/cli/bench_router_prompt.h"
#include "services/cli/bench_rows.h"
#include "services/cli/stand_in_workers.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kReadyMax = absl::Seconds(30), kRequestMax = absl::Seconds(60);

// A router process with stand-in workers, for as long as this object lives.
class BenchedRouter {
 public:
  static absl::StatusOr<std::unique_ptr<BenchedRouter>> Start(const RouterBenchOptions& o,
                                                              int64_t workers);
  // Of all its threads, ended ones included.
  absl::StatusOr<double> CpuSeconds() const;
  const std::string& address() const { return process_->grpc(); }
  const std::string& http() const { return process_->http(); }

 private:
  BenchedRouter() = default;

  std::unique_ptr<BenchProcess> process_;
  std::unique_ptr<StandInWorkers> workers_;  // gone before it
};

absl::StatusOr<std::unique_ptr<BenchedRouter>> BenchedRouter::Start(const RouterBenchOptions& o,
                                                                    int64_t workers) {
  std::unique_ptr<BenchedRouter> router(new BenchedRouter);
  ASSIGN_OR_RETURN(
      router->process_,
      BenchProcess::Start(
          "router", {"router", "--model=" + o.model, "--listen=127.0.0.1:0", "--http=127.0.0.1:0"},
          kReadyMax));
  ASSIGN_OR_RETURN(const std::string digest, TextDigest(o.model));
  router->workers_ = std::make_unique<StandInWorkers>(
      StandInWorkersOptions{.router = router->address(),
                            .text_digest = digest,
                            .workers = workers,
                            .token_gap = absl::Milliseconds(o.token_gap_ms)});
  const absl::Time until = absl::Now() + kReadyMax;
  while (router->workers_->registered() < workers) {
    if (absl::Now() > until) return DeadlineExceeded("the stand-in workers could not register");
    absl::SleepFor(absl::Milliseconds(10));
  }
  absl::SleepFor(absl::Milliseconds(300));  // all is published
  return router;
}

absl::StatusOr<double> BenchedRouter::CpuSeconds() const {
  clockid_t clock{};
  timespec t{};
  if (clock_getcpuclockid(process_->pid(), &clock) != 0 || clock_gettime(clock, &t) != 0) {
    return Unavailable("the router's CPU time cannot be read");
  }
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

using Ask = std::function<absl::Status(int64_t i)>;

// CPU of the router for one of the `count` requests of each ask, the median.
absl::StatusOr<double> MedianCost(const BenchedRouter& router, int64_t requests, int64_t count,
                                  const Ask& ask) {
  RETURN_IF_ERROR(ask(-1));  // pages, threads, connections
  std::vector<double> costs;
  for (int64_t i = 0; i < requests; ++i) {
    ASSIGN_OR_RETURN(const double before, router.CpuSeconds());
    RETURN_IF_ERROR(ask(i));
    absl::SleepFor(absl::Milliseconds(100));  // what is left to do once the answer has ended
    ASSIGN_OR_RETURN(const double after, router.CpuSeconds());
    costs.push_back((after - before) / static_cast<double>(count));
  }
  return Median(costs);
}

absl::Status Stream(v1::Inference::Stub* stub, const v1::GenerateRequest& request, int64_t tokens) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kRequestMax));
  const auto reader = stub->Generate(&context, request);
  int64_t got = 0;
  for (v1::GenerateEvent event; reader->Read(&event);) got += event.delta().tokens_size();
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return Unavailable("a request failed: %s", status.error_message());
  if (got != tokens) return Internal("%d of %d tokens came", got, tokens);
  return absl::OkStatus();
}

v1::GenerateRequest RequestOf(int64_t answer_tokens) {
  v1::GenerateRequest request;
  request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(answer_tokens));
  request.mutable_stop()->set_ignore_eos(true);
  return request;
}

v1::GenerateRequest TokenRequest(int64_t prompt_tokens, int64_t answer_tokens, int64_t i) {
  v1::GenerateRequest request = RequestOf(answer_tokens);
  for (int64_t t = 0; t < prompt_tokens; ++t) {
    request.mutable_tokens()->add_ids(BenchToken(t, i));
  }
  return request;
}

// A client of its own connection.
std::unique_ptr<v1::Inference::Stub> Connect(const BenchedRouter& router) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::Inference::NewStub(
      grpc::CreateCustomChannel(router.address(), grpc::InsecureChannelCredentials(), arguments));
}

// The same request by every client at once.
absl::Status StreamTogether(const std::vector<std::unique_ptr<v1::Inference::Stub>>& stubs,
                            const v1::GenerateRequest& request, int64_t tokens) {
  std::vector<absl::Status> ends(stubs.size());
  std::vector<std::thread> clients;
  for (size_t c = 0; c < stubs.size(); ++c) {
    clients.emplace_back([&, c] { ends[c] = Stream(stubs[c].get(), request, tokens); });
  }
  for (std::thread& client : clients) client.join();
  for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
  return absl::OkStatus();
}

// Text of about so many tokens.
absl::StatusOr<std::string> TextOf(v1::Inference::Stub* stub, int64_t tokens) {
  std::string sample;
  for (int i = 0; sample.size() < 20000; ++i) {
    sample += absl::StrFormat("Line %d: the mesh hands state over, one layer after another.\n", i);
  }
  grpc::ClientContext context;
  v1::TokenizeRequest request;
  request.set_text(sample);
  v1::CountTokensResponse response;
  const grpc::Status status = stub->CountTokens(&context, request, &response);
  if (!status.ok()) return Unavailable("CountTokens failed: %s", status.error_message());
  const auto bytes = static_cast<size_t>(static_cast<double>(tokens) *
                                         static_cast<double>(sample.size()) / response.count());
  std::string text;
  while (text.size() < bytes) text += sample;
  text.resize(bytes);
  return text;
}

absl::StatusOr<std::vector<RouterFigure>> MeasureRequests(const RouterBenchOptions& o) {
  ASSIGN_OR_RETURN(const auto router, BenchedRouter::Start(o, 1));
  const auto stub = Connect(*router);
  const auto tokens = [&](int64_t answer_tokens) -> Ask {
    return [&, answer_tokens](int64_t i) {
      return Stream(stub.get(), TokenRequest(o.prompt_tokens, answer_tokens, i), answer_tokens);
    };
  };
  ASSIGN_OR_RETURN(const std::string text, TextOf(stub.get(), o.prompt_tokens));
  const auto words = [&](int64_t answer_tokens) -> Ask {
    return [&, answer_tokens](int64_t i) {
      v1::GenerateRequest request = RequestOf(answer_tokens);
      request.set_text(std::to_string(i) + text);
      return Stream(stub.get(), request, answer_tokens);
    };
  };
  std::vector<std::unique_ptr<v1::Inference::Stub>> stubs;
  for (int64_t c = 0; c < o.together; ++c) stubs.push_back(Connect(*router));
  const Ask together = [&](int64_t i) {
    return StreamTogether(stubs, TokenRequest(o.prompt_tokens, o.answer_tokens, i),
                          o.answer_tokens);
  };
  const auto over_http = [&](int64_t answer_tokens) -> Ask {
    return [&, answer_tokens](int64_t i) {
      return StreamOverHttp(router->http(), o.prompt_tokens, answer_tokens, i);
    };
  };
  std::vector<RouterFigure> figures;
  const auto measure = [&](const char* name, double bar, int64_t count, const Ask& ask) {
    const absl::StatusOr<double> cost = MedianCost(*router, o.requests, count, ask);
    if (cost.ok()) figures.push_back({name, *cost, bar, false, "s"});
    return cost.status();
  };
  RETURN_IF_ERROR(measure("request_cpu_seconds", 0.05, 1, tokens(o.answer_tokens)));
  RETURN_IF_ERROR(measure("request_with_text_cpu_seconds", 0.05, 1, words(o.answer_tokens)));
  RETURN_IF_ERROR(measure("request_over_http_cpu_seconds", 0.05, 1, over_http(o.answer_tokens)));
  RETURN_IF_ERROR(measure("request_among_others_cpu_seconds", 0.05, o.together, together));
  RETURN_IF_ERROR(measure("intake_cpu_seconds", 0, 1, tokens(1)));
  RETURN_IF_ERROR(measure("intake_of_text_cpu_seconds", 0, 1, words(1)));
  RETURN_IF_ERROR(measure("intake_over_http_cpu_seconds", 0, 1, over_http(1)));
  return figures;
}

absl::StatusOr<std::vector<RouterFigure>> MeasureIdle(const RouterBenchOptions& o) {
  ASSIGN_OR_RETURN(const auto router, BenchedRouter::Start(o, o.idle_workers));
  ASSIGN_OR_RETURN(const double before, router->CpuSeconds());
  const absl::Time start = absl::Now();
  absl::SleepFor(absl::Seconds(o.idle_seconds));
  ASSIGN_OR_RETURN(const double after, router->CpuSeconds());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return std::vector<RouterFigure>{
      {"idle_cores", (after - before) / seconds, 0.02, false, "cores"}};
}

}  // namespace

absl::StatusOr<std::vector<RouterFigure>> MeasureRouterProcess(const RouterBenchOptions& o) {
  ASSIGN_OR_RETURN(std::vector<RouterFigure> figures, MeasureRequests(o));
  ASSIGN_OR_RETURN(const std::vector<RouterFigure> idle, MeasureIdle(o));
  figures.insert(figures.end(), idle.begin(), idle.end());
  return figures;
}

}  // namespace deltamesh
