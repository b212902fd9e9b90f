#include "services/cli/bench_mesh.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "CLI/CLI.hpp"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// The ids of special tokens are the last ones.
constexpr int64_t kSpecialIds = 16;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// When each token of one stream arrived.
struct Stream {
  absl::Status status;
  double begin = 0;
  std::vector<double> tokens;
};

class MeshBench {
 public:
  explicit MeshBench(const BenchMeshOptions& options)
      : options_(options),
        stub_(v1::Inference::NewStub(
            grpc::CreateChannel(options.router, grpc::InsecureChannelCredentials()))) {}

  absl::Status Open() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::ListModelsResponse models;
    const grpc::Status status = stub_->ListModels(&context, {}, &models);
    if (!status.ok()) {
      return Unavailable("--router: %s does not answer: %s", options_.router,
                         status.error_message());
    }
    if (models.models_size() != 1) {
      return FailedPrecondition("--router: %s serves %d models; use one that serves one",
                                options_.router, models.models_size());
    }
    vocab_ = models.models(0).vocab_size();
    if (vocab_ <= kSpecialIds) {
      return FailedPrecondition("model: a vocabulary of %d leaves no ids to feed; use more than %d",
                                vocab_, kSpecialIds);
    }
    return absl::OkStatus();
  }

  // From sending a prompt to the first token after it.
  absl::StatusOr<double> Prefill(int64_t tokens) {
    const Stream stream = Generate(tokens, 1);
    RETURN_IF_ERROR(stream.status);
    return static_cast<double>(tokens) / (stream.tokens.back() - stream.begin);
  }

  // While all streams run: from the last one's first token to the first one's last.
  absl::StatusOr<double> Decode(int64_t sequences) {
    std::vector<Stream> streams(static_cast<size_t>(sequences));
    std::vector<std::thread> threads;
    for (Stream& stream : streams) {
      threads.emplace_back(
          [&, seed = ++seed_] { stream = Generate(1, options_.decode_steps + 1, seed); });
    }
    for (std::thread& thread : threads) thread.join();
    double begin = 0, end = 1e300;
    for (const Stream& stream : streams) {
      RETURN_IF_ERROR(stream.status);
      begin = std::max(begin, stream.tokens.front());
      end = std::min(end, stream.tokens.back());
    }
    int64_t count = 0;
    for (const Stream& stream : streams) {
      count += std::count_if(stream.tokens.begin(), stream.tokens.end(),
                             [&](double t) { return t > begin && t <= end; });
    }
    if (count == 0) {
      return FailedPrecondition("decode-steps: %d; the streams did not run at once, use more steps",
                                options_.decode_steps);
    }
    return static_cast<double>(count) / (end - begin);
  }

 private:
  Stream Generate(int64_t prompt, int64_t answer) { return Generate(prompt, answer, ++seed_); }

  Stream Generate(int64_t prompt, int64_t answer, uint64_t seed) const {
    v1::GenerateRequest request;
    for (int64_t i = 0; i < prompt; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      request.mutable_tokens()->add_ids(
          static_cast<int32_t>((seed >> 33) % static_cast<uint64_t>(vocab_ - kSpecialIds)));
    }
    request.mutable_sampling()->set_temperature(0);
    request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(answer));
    request.mutable_stop()->set_ignore_eos(true);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(static_cast<int64_t>(1000 * options_.seconds)));
    Stream stream;
    stream.begin = Seconds();
    const auto reader = stub_->Generate(&context, request);
    for (v1::GenerateEvent event; reader->Read(&event);) {
      const double now = Seconds();
      stream.tokens.insert(stream.tokens.end(), static_cast<size_t>(event.delta().tokens_size()),
                           now);
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) {
      stream.status =
          absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    } else if (static_cast<int64_t>(stream.tokens.size()) != answer) {
      stream.status = Internal("a request for %d tokens got %d", answer, stream.tokens.size());
    }
    return stream;
  }

  const BenchMeshOptions& options_;
  std::unique_ptr<v1::Inference::Stub> stub_;
  int64_t vocab_ = 0;
  uint64_t seed_ = 0;  // no two prompts alike
};

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

}  // namespace

void AddBenchMeshFlags(CLI::App* app, BenchMeshOptions* o) {
  app->add_option("--router", o->router, "the router's gRPC address")->capture_default_str();
  app->add_option("--prefill", o->prefill, "prompt lengths: 128,512")->delimiter(',');
  app->add_option("--sequences", o->sequences, "streams decoded at once: 1,4,8")->delimiter(',');
  app->add_option("--decode-steps", o->decode_steps, "tokens of each stream")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app->add_option("--repetitions", o->repetitions, "the median is reported")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--seconds", o->seconds, "longest a request may take")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--label", o->label, "free text for the JSON");
}

absl::Status RunBenchMesh(const BenchMeshOptions& o, std::ostream& out) {
  for (const int64_t n : o.prefill) {
    if (n < 1) return InvalidArgument("prefill: %d tokens; use at least 1", n);
  }
  for (const int64_t n : o.sequences) {
    if (n < 1 || n > 1024) return InvalidArgument("sequences: %d; use 1 to 1024", n);
  }
  MeshBench bench(o);
  RETURN_IF_ERROR(bench.Open());
  nlohmann::ordered_json doc = {{"label", o.label.empty() ? "deltamesh mesh" : o.label},
                                {"router", o.router}};
  const auto add = [&](const char* test, int64_t n, int64_t sequences, auto measure) {
    std::vector<double> rates;
    for (int r = 0; r < o.repetitions; ++r) {
      const absl::StatusOr<double> rate = measure();
      if (!rate.ok()) return Annotate(rate.status(), absl::StrFormat("%s %d", test, n));
      rates.push_back(*rate);
    }
    doc["results"].push_back({{"test", test},
                              {"n", n},
                              {"depth", 0},
                              {"seqs", sequences},
                              {"median_tps", Median(rates)},
                              {"runs", rates}});
    return absl::OkStatus();
  };
  for (const int64_t n : o.prefill) {
    RETURN_IF_ERROR(add("prefill", n, 1, [&] { return bench.Prefill(n); }));
  }
  for (const int64_t n : o.sequences) {
    RETURN_IF_ERROR(add("decode", o.decode_steps, n, [&] { return bench.Decode(n); }));
  }
  out << doc.dump(1) << "\n";
  return absl::OkStatus();
}

}  // namespace deltamesh
