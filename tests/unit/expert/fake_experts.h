// A set of experts with random weights that owns its memory, and a double-precision twin of one
// expert.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "runtime/base/random.h"
#include "runtime/expert/expert_set.h"

namespace deltamesh::testing {

// 64-byte aligned bytes.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes) : storage_(static_cast<size_t>(bytes) + 64) {}
  std::byte* data() {
    return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(storage_.data()) + 63) / 64 *
                                        64);
  }

 private:
  std::vector<std::byte> storage_;
};

inline float RandomFloat(Entropy& e) {
  return static_cast<float>(static_cast<int64_t>(e.Next() >> 40)) * 0x1p-23f - 1.0f;
}

// Layer 0 is dense, the others have `experts` experts each.
class FakeExperts {
 public:
  FakeExperts(uint64_t seed, int64_t layers, int64_t experts, int64_t width, int64_t inter) {
    SeededEntropy entropy(seed);
    set_.experts = experts;
    set_.width = width;
    set_.inter = inter;
    set_.activation = kernels::Activation::kSitu;
    set_.beta = 4;
    set_.linear_beta = 25;
    set_.layers.resize(static_cast<size_t>(layers));
    for (int64_t l = 1; l < layers; ++l) {
      for (int64_t e = 0; e < experts; ++e) {
        set_.layers[static_cast<size_t>(l)].push_back({Make(entropy, inter, width),
                                                       Make(entropy, inter, width),
                                                       Make(entropy, width, inter)});
      }
    }
  }
  const ExpertSet& set() const { return set_; }

  // The same weights with only the experts e where e % shards == shard.
  ExpertSet Shard(int64_t shard, int64_t shards) const {
    ExpertSet part = set_;
    for (auto& layer : part.layers) {
      for (size_t e = 0; e < layer.size(); ++e) {
        if (static_cast<int64_t>(e) % shards != shard) layer[e] = ExpertWeights();
      }
    }
    return part;
  }

  std::vector<double> Twin(int64_t layer, int32_t expert, const float* x) const {
    const ExpertWeights& w = set_.layers[static_cast<size_t>(layer)][static_cast<size_t>(expert)];
    const std::vector<double> in(x, x + set_.width);
    std::vector<double> g = Multiply(w.gate, in), u = Multiply(w.up, in);
    for (size_t i = 0; i < g.size(); ++i) {
      const double gate = 4 * std::tanh(g[i] / 4) / (1 + std::exp(-g[i]));
      g[i] = gate * 25 * std::tanh(u[i] / 25);
    }
    return Multiply(w.down, g);
  }

 private:
  kernels::PackedMatrix Make(Entropy& entropy, int64_t rows, int64_t cols) {
    std::vector<float> source(static_cast<size_t>(rows * cols));
    for (float& f : source) f = RandomFloat(entropy) * 0.25f;
    const auto format = kernels::WeightFormat::kF32;
    memory_.emplace_back(kernels::PackedBytes(format, rows, cols));
    kernels::PackedMatrix m{
        .format = format, .rows = rows, .cols = cols, .data = memory_.back().data()};
    kernels::Pack({.format = format,
                   .rows = rows,
                   .cols = cols,
                   .row_stride = cols,
                   .source = source.data(),
                   .packed = memory_.back().data(),
                   .panel_begin = 0,
                   .panel_end = m.panels()});
    return m;
  }
  static std::vector<double> Multiply(const kernels::PackedMatrix& w,
                                      const std::vector<double>& x) {
    std::vector<double> y(static_cast<size_t>(w.rows));
    for (int64_t r = 0; r < w.rows; ++r) {
      for (int64_t c = 0; c < w.cols; ++c) {
        y[static_cast<size_t>(r)] +=
            static_cast<double>(kernels::UnpackOne(w, r, c)) * x[static_cast<size_t>(c)];
      }
    }
    return y;
  }

  ExpertSet set_;
  std::vector<AlignedBytes> memory_;
};

// Inputs and chosen experts of one layer of one step.
struct FakeBatch {
  FakeBatch(uint64_t seed, int64_t layer, int64_t tokens, int64_t top_k, const ExpertSet& set)
      : x(static_cast<size_t>(tokens * set.width)),
        ids(static_cast<size_t>(tokens * top_k)),
        out(static_cast<size_t>(tokens * top_k * set.width), NAN) {
    SeededEntropy entropy(seed);
    for (float& f : x) f = RandomFloat(entropy);
    for (int64_t t = 0; t < tokens; ++t) {
      // Distinct experts per token, as a gate gives them.
      std::vector<int32_t> all(static_cast<size_t>(set.experts));
      for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
      for (int64_t k = 0; k < top_k; ++k) {
        const size_t pick =
            static_cast<size_t>(k) + entropy.Next() % (all.size() - static_cast<size_t>(k));
        std::swap(all[static_cast<size_t>(k)], all[pick]);
        ids[static_cast<size_t>(t * top_k + k)] = all[static_cast<size_t>(k)];
      }
    }
    batch = {.layer = layer,
             .tokens = tokens,
             .top_k = top_k,
             .width = set.width,
             .x = x.data(),
             .ids = ids.data(),
             .out = out.data()};
  }
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> out;
  ExpertBatch batch;
};

}  // namespace deltamesh::testing
