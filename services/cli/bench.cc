#include "services/cli/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "kernels/base/cpu_features.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/model.h"
#include "services/cli/load_progress.h"
#include "services/cli/roofline.h"

namespace deltamesh {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint64_t Mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

TokenId BenchToken(uint64_t sequence, uint64_t position, int64_t vocab) {
  return static_cast<TokenId>(Mix((sequence << 32) ^ position) % static_cast<uint64_t>(vocab - 16));
}

struct Result {
  std::string test;  // "prefill" or "decode"
  int64_t n, depth, seqs;
  std::vector<double> rates;  // tokens per second, one per repetition
  double step_bytes = 0;      // decode: bytes a step must touch
  double token_flops = 0;     // prefill: useful operations of one token

  double median() const {
    std::vector<double> v = rates;
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }
};

class Bench {
 public:
  Bench(const BenchOptions& options, Model* model)
      : options_(options),
        model_(model),
        pool_(options.threads),
        experts_(&model->experts(), &pool_) {}

  absl::StatusOr<Result> Prefill(int64_t tokens) {
    Result result = {.test = "prefill", .n = tokens, .depth = 0, .seqs = 1, .rates = {}};
    for (int r = 0; r < options_.repetitions; ++r) {
      RETURN_IF_ERROR(Restart(1, tokens));
      const double start = Seconds();
      RETURN_IF_ERROR(Feed(tokens));
      result.rates.push_back(static_cast<double>(tokens) / (Seconds() - start));
    }
    result.token_flops = TokenFlops(static_cast<double>(tokens) / 2);
    return result;
  }

  absl::StatusOr<Result> Decode(int64_t sequences, int64_t depth) {
    const int64_t steps = options_.decode_steps;
    Result result = {.test = "decode", .n = steps, .depth = depth, .seqs = sequences, .rates = {}};
    for (int r = 0; r < options_.repetitions; ++r) {
      RETURN_IF_ERROR(Restart(sequences, depth + steps));
      if (depth > 0) RETURN_IF_ERROR(Feed(depth));
      const double start = Seconds();
      for (int64_t i = 0; i < steps; ++i) RETURN_IF_ERROR(Step());
      result.rates.push_back(static_cast<double>(steps * sequences) / (Seconds() - start));
    }
    result.step_bytes =
        StepBytes(sequences, static_cast<double>(depth) + static_cast<double>(steps) / 2);
    return result;
  }

 private:
  absl::Status Restart(int64_t sequences, int64_t tokens) {
    states_.clear();
    const int64_t blocks = sequences * ((tokens + kBlockTokens - 1) / kBlockTokens);
    ASSIGN_OR_RETURN(pools_, StatePools::Create(model_->state_layout(), sequences, blocks));
    for (int64_t s = 0; s < sequences; ++s) {
      ASSIGN_OR_RETURN(std::unique_ptr<SequenceState> state, SequenceState::Create(pools_));
      RETURN_IF_ERROR(state->Reserve(tokens));
      states_.push_back(std::move(state));
    }
    logits_.resize(static_cast<size_t>(sequences * model_->config().vocab));
    return absl::OkStatus();
  }

  // The next `tokens` of every sequence, in chunks; logits of the very last position only.
  absl::Status Feed(int64_t tokens) {
    for (size_t s = 0; s < states_.size(); ++s) {
      for (int64_t done = 0; done < tokens;) {
        const int64_t n = std::min(options_.chunk_tokens, tokens - done);
        std::vector<TokenId> ids;
        for (int64_t i = 0; i < n; ++i) ids.push_back(Token(s, states_[s]->position() + i));
        done += n;
        SequenceChunk chunk = {.state = states_[s].get(), .tokens = ids, .layer_done = nullptr};
        if (done == tokens) {
          chunk.logits = 1;
          chunk.out = logits_.data();
        }
        RETURN_IF_ERROR(model_->Forward({&chunk, 1}, experts_, pool_));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Step() {
    std::vector<TokenId> ids(states_.size());
    std::vector<SequenceChunk> batch;
    for (size_t s = 0; s < states_.size(); ++s) {
      ids[s] = Token(s, states_[s]->position());
      batch.push_back({.state = states_[s].get(),
                       .tokens = {&ids[s], 1},
                       .logits = 1,
                       .out = logits_.data() + static_cast<int64_t>(s) * model_->config().vocab,
                       .layer_done = nullptr});
    }
    return model_->Forward(batch, experts_, pool_);
  }

  TokenId Token(size_t sequence, int64_t position) const {
    return BenchToken(sequence, static_cast<uint64_t>(position), model_->config().vocab);
  }

  double ExpertBytes() const {
    for (const auto& layer : model_->experts().layers) {
      if (layer.empty()) continue;
      const ExpertWeights& e = layer.front();
      double bytes = 0;
      for (const kernels::PackedMatrix* m : {&e.gate, &e.up, &e.down}) {
        bytes += static_cast<double>(kernels::PackedBytes(m->format, m->rows, m->cols));
      }
      return bytes;
    }
    return 0;
  }

  // Weights outside routed experts once, the expected distinct experts of `sequences` tokens once, and per
  // sequence its recurrent state (read, with the tile's share of the fold) and latents.
  double StepBytes(int64_t sequences, double context) const {
    const ModelConfig& c = model_->config();
    const double moe_layers = static_cast<double>(c.CountFfn(FfnKind::kMoe));
    const double e = static_cast<double>(c.experts), k = static_cast<double>(c.top_k);
    const double distinct =
        c.experts == 0 ? 0 : e * (1 - std::pow(1 - k / e, static_cast<double>(sequences)));
    const double rest =
        static_cast<double>(model_->weight_bytes()) - moe_layers * e * ExpertBytes();
    const StateLayout& l = model_->state_layout();
    const double slab =
        static_cast<double>(l.kda_layers * l.s_floats()) * 4 * (1 + 2.0 / kTileTokens);
    const double latents = static_cast<double>(l.mla_layers * l.latent_width()) * 4 * context;
    return rest + moe_layers * distinct * ExpertBytes() +
           static_cast<double>(sequences) * (slab + latents);
  }

  // Two operations per active weight, without the tables at both ends; KDA's 7 d^2 per head; attention in
  // its expanded form.
  double TokenFlops(double context) const {
    const ModelConfig& c = model_->config();
    const auto d = [](int64_t x) { return static_cast<double>(x); };
    const double kda = d(c.CountMixer(MixerKind::kKda)), mla = d(c.CountMixer(MixerKind::kMla));
    const double gate = c.full_rank_gate ? d(c.hidden) * d(c.kda_width())
                                         : d(c.kda_dim) * (d(c.hidden) + d(c.kda_width()));
    const double kda_weights = 4 * d(c.hidden) * d(c.kda_width()) + gate +
                               d(c.kda_dim) * (d(c.hidden) + d(c.kda_width())) +
                               d(c.hidden) * d(c.kda_heads);
    const double q_out = d(c.heads) * d(c.nope + c.rope);
    const double mla_weights =
        (c.q_rank > 0 ? d(c.q_rank) * (d(c.hidden) + q_out) : d(c.hidden) * q_out) +
        d(c.hidden) * d(c.kv_rank + c.rope) + d(c.heads) * d(c.nope + c.v_dim) * d(c.kv_rank) +
        d(c.hidden) * d(c.heads) * d(c.v_dim) * (c.mla_gate ? 2 : 1);
    const double expert = 3 * d(c.expert_width()) * d(c.moe_inter);
    const double latent_weights = c.latent > 0 ? 2 * d(c.hidden) * d(c.latent) : 0;
    const double moe_weights = d(c.top_k) * expert + 3 * d(c.hidden) * d(c.shared_inter()) +
                               d(c.hidden) * d(c.experts) + latent_weights;
    const double weights = kda * kda_weights + mla * mla_weights +
                           d(c.CountFfn(FfnKind::kDense)) * 3 * d(c.hidden) * d(c.dense_inter) +
                           d(c.CountFfn(FfnKind::kMoe)) * moe_weights;
    return 2 * weights + kda * 7 * d(c.kda_heads) * d(c.kda_dim) * d(c.kda_dim) +
           mla * 2 * d(c.heads) * d(c.nope + c.rope + c.v_dim) * context;
  }

  const BenchOptions& options_;
  Model* model_;
  ThreadPool pool_;
  LocalExperts experts_;
  StatePools pools_;
  std::vector<std::unique_ptr<SequenceState>> states_;
  std::vector<float> logits_;
};

// Fraction of the ceiling: median read bandwidth for decode, multiply-add peak for prefill.
double Fraction(const Result& r, const Roofline& roof) {
  if (r.test == "prefill") return r.median() * r.token_flops / roof.fma_flops.best;
  return r.median() / static_cast<double>(r.seqs) * r.step_bytes /
         roof.read_bytes_per_second.median;
}

void PrintTable(const std::vector<Result>& results, const Roofline* roof, std::ostream& out) {
  out << std::fixed << std::setprecision(1);
  if (roof != nullptr) {
    out << "ceilings  read " << roof->read_bytes_per_second.median / 1e9 << " GB/s median ("
        << roof->read_bytes_per_second.best / 1e9 << " best)  multiply-add "
        << roof->fma_flops.best / 1e9 << " GFLOP/s with " << roof->threads << " threads\n";
  }
  out << "test      tokens  context  sequences    tokens/s     range          of the ceiling\n";
  for (const Result& r : results) {
    const auto [low, high] = std::minmax_element(r.rates.begin(), r.rates.end());
    out << std::left << std::setw(9) << r.test << std::right << std::setw(7) << r.n << std::setw(9)
        << r.depth << std::setw(11) << r.seqs << std::setw(12) << r.median() << "   "
        << std::setw(7) << *low << " .. " << std::left << std::setw(8) << *high << std::right;
    if (roof != nullptr) {
      out << std::setw(6) << 100 * Fraction(r, *roof)
          << (r.test == "prefill" ? " % of multiply-add peak" : " % of median read bandwidth");
    }
    out << "\n";
  }
}

void PrintJson(const BenchOptions& o, const Model& model, const std::vector<Result>& results,
               const Roofline* roof, std::ostream& out) {
  nlohmann::ordered_json doc;
  doc["label"] = o.label.empty() ? "deltamesh" : o.label;
  doc["model"] = o.model;
  doc["model_bytes"] = model.weight_bytes();
  doc["threads"] = o.threads;
  doc["weights"] = o.weights;
  doc["packed"] = model.packed().path;
  doc["system"] = kernels::CpuTargets().front();
  if (roof != nullptr) {
    doc["ceilings"] = {{"read_gbs_best", roof->read_bytes_per_second.best / 1e9},
                       {"read_gbs_median", roof->read_bytes_per_second.median / 1e9},
                       {"fp32_fma_gflops_best", roof->fma_flops.best / 1e9},
                       {"fp32_fma_gflops_median", roof->fma_flops.median / 1e9}};
  }
  for (const Result& r : results) {
    nlohmann::ordered_json row = {{"test", r.test},           {"n", r.n},
                                  {"depth", r.depth},         {"seqs", r.seqs},
                                  {"median_tps", r.median()}, {"runs", r.rates}};
    if (roof != nullptr) row["fraction_of_ceiling"] = Fraction(r, *roof);
    doc["results"].push_back(std::move(row));
  }
  out << doc.dump(1) << "\n";
}

absl::Status CheckOptions(const BenchOptions& o) {
  if (o.repetitions < 1) return InvalidArgument("repetitions: %d; use at least 1", o.repetitions);
  if (o.decode_steps < 1)
    return InvalidArgument("decode-steps: %d; use at least 1", o.decode_steps);
  if (o.chunk_tokens < 1)
    return InvalidArgument("chunk-tokens: %d; use at least 1", o.chunk_tokens);
  for (const int64_t n : o.prefill) {
    if (n < 1) return InvalidArgument("prefill: %d tokens; use at least 1", n);
  }
  for (const int64_t n : o.depths) {
    if (n < 0) return InvalidArgument("depths: %d; use at least 0", n);
  }
  for (const int64_t n : o.sequences) {
    if (n < 1) return InvalidArgument("sequences: %d; use at least 1", n);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunBench(const BenchOptions& options, std::ostream& out) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::optional<Roofline> roof;
  if (options.roofline) {
    ASSIGN_OR_RETURN(roof, MeasureRoofline({.threads = options.threads}));
  }
  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load,
                   ToolLoadOptions(options.model, options.threads, options.weights,
                                   options.packed_dir, &clock, &std::cerr));
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(options.model, load));
  if (model->config().vocab <= 16) {
    return InvalidArgument("model: a vocabulary of %d leaves no ids to feed; use more than 16",
                           model->config().vocab);
  }
  Bench bench(options, model.get());
  std::vector<Result> results;
  for (const int64_t n : options.prefill) {
    ASSIGN_OR_RETURN(Result r, bench.Prefill(n));
    results.push_back(std::move(r));
  }
  for (const int64_t depth : options.depths) {
    ASSIGN_OR_RETURN(Result r, bench.Decode(1, depth));
    results.push_back(std::move(r));
  }
  for (const int64_t n : options.sequences) {
    ASSIGN_OR_RETURN(Result r, bench.Decode(n, 0));
    results.push_back(std::move(r));
  }
  const Roofline* ceilings = roof ? &*roof : nullptr;
  if (options.json) {
    PrintJson(options, *model, results, ceilings, out);
  } else {
    PrintTable(results, ceilings, out);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
