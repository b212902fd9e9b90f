#include "services/cli/bench_mesh.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "CLI/CLI.hpp"
#include "runtime/base/status.h"
#include "services/cli/bench_rows.h"
#include "services/cli/mesh_client.h"

namespace deltamesh {

void AddBenchMeshFlags(CLI::App* app, BenchMeshOptions* o) {
  app->add_option("--router", o->router, "the router's gRPC address")->capture_default_str();
  app->add_option("--prefill", o->prefill, "prompt lengths: 128,512")->delimiter(',');
  app->add_option("--sequences", o->sequences, "streams decoded at once: 1,4,8")->delimiter(',');
  app->add_option("--decode-steps", o->decode_steps, "tokens of each stream")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app->add_option("--repetitions", o->repetitions, "the median is reported")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--seconds", o->seconds, "longest a request may take")
      ->check(CLI::Range(0.001, 1e6))
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
  MeshClient client(o.router, absl::Seconds(o.seconds));
  RETURN_IF_ERROR(client.Open());
  std::vector<BenchRow> rows;
  uint64_t next = 0;  // no two prompts alike
  const auto add = [&](const char* test, int64_t n, int64_t sequences, auto measure) {
    BenchRow row = {
        .test = test, .n = n, .seqs = sequences, .runs = {}, .ceiling = "", .ceiling_runs = {}};
    for (int r = 0; r < o.repetitions; ++r) {
      const absl::StatusOr<double> rate = measure();
      if (!rate.ok()) return Annotate(rate.status(), absl::StrFormat("%s %d", test, n));
      row.runs.push_back(*rate);
    }
    rows.push_back(std::move(row));
    return absl::OkStatus();
  };
  for (const int64_t n : o.prefill) {
    RETURN_IF_ERROR(add("prefill", n, 1, [&] { return client.Prefill(n, ++next); }));
  }
  for (const int64_t n : o.sequences) {
    RETURN_IF_ERROR(add("decode", o.decode_steps, n, [&] {
      next += static_cast<uint64_t>(n);
      return client.Decode(n, o.decode_steps, next);
    }));
  }
  const nlohmann::ordered_json doc = {{"label", o.label.empty() ? "deltamesh mesh" : o.label},
                                      {"router", o.router},
                                      {"results", RowsJson(rows)}};
  out << JsonText(doc);
  return absl::OkStatus();
}

}  // namespace deltamesh
