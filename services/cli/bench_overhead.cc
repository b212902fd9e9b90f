#include "services/cli/bench_overhead.h"

#include <functional>
#include <string>

#include "runtime/base/status.h"
#include "services/cli/bench_load.h"
#include "services/cli/mesh_client.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kLongest = absl::Minutes(5);  // for one request
using Rate = std::function<absl::StatusOr<double>(uint64_t sequence)>;

// The same regions of time as MeshClient's.
absl::StatusOr<double> Prefill(BenchEngine* engine, int64_t tokens, uint64_t sequence) {
  RETURN_IF_ERROR(engine->Restart(1, tokens, sequence));
  const double start = BenchSeconds();
  RETURN_IF_ERROR(engine->Feed(tokens));
  return static_cast<double>(tokens) / (BenchSeconds() - start);
}

absl::StatusOr<double> Decode(BenchEngine* engine, int64_t sequences, int64_t steps,
                              uint64_t sequence) {
  RETURN_IF_ERROR(engine->Restart(sequences, steps + 1, sequence));
  RETURN_IF_ERROR(engine->Feed(1));
  const double start = BenchSeconds();
  for (int64_t i = 0; i < steps; ++i) RETURN_IF_ERROR(engine->StepGreedy());
  return static_cast<double>(sequences * steps) / (BenchSeconds() - start);
}

// One unmeasured turn of each first: connections, memory and caches as in the middle of a day's work.
absl::Status TakeTurns(int repetitions, const Rate& mesh, const Rate& engine, BenchRow* row) {
  static constexpr uint64_t kStride = 4096;  // of sequences: no two prompts alike
  for (int r = -1; r < repetitions; ++r) {
    const uint64_t sequence = kStride * static_cast<uint64_t>(r + 2);
    const OtherLoad load;
    ASSIGN_OR_RETURN(const double through, mesh(sequence));
    ASSIGN_OR_RETURN(const double inside, engine(sequence));
    if (r < 0) continue;
    row->AddOthers(load.cores());
    row->runs.push_back(through);
    row->ceiling_runs.push_back(inside);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status MeasureOverhead(const OverheadOptions& o, BenchEngine* engine,
                             std::vector<BenchRow>* rows) {
  ASSIGN_OR_RETURN(const std::unique_ptr<LocalMesh> mesh, LocalMesh::Start(o.mesh));
  MeshClient client(mesh->router(), kLongest);
  RETURN_IF_ERROR(client.Open());
  const std::string shards =
      o.mesh.experts == 0 ? "" : absl::StrFormat("-%d-shards", o.mesh.experts);
  const auto add = [&](const std::string& test, int64_t n, int64_t sequences, const Rate& through,
                       const Rate& inside) {
    BenchRow row = {.test = test,
                    .n = n,
                    .seqs = sequences,
                    .runs = {},
                    .ceiling = "the engine in process",
                    .ceiling_runs = {}};
    RETURN_IF_ERROR(TakeTurns(o.repetitions, through, inside, &row));
    rows->push_back(std::move(row));
    return absl::OkStatus();
  };
  for (const int64_t n : o.prefill) {
    RETURN_IF_ERROR(add(
        "mesh-prefill" + shards, n, 1, [&](uint64_t s) { return client.Prefill(n, s); },
        [&](uint64_t s) { return Prefill(engine, n, s); }));
  }
  for (const int64_t n : o.sequences) {
    RETURN_IF_ERROR(add(
        "mesh-decode" + shards, o.decode_steps, n,
        [&](uint64_t s) { return client.Decode(n, o.decode_steps, s); },
        [&](uint64_t s) { return Decode(engine, n, o.decode_steps, s); }));
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
