// Packed weights hold exactly the stored values: every element of every tensor is compared with an
// independent reading of the checkpoint's bytes.
#include "runtime/model/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "runtime/base/status.h"
#include "runtime/model/tensor_plan.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

using kernels::UnpackOne;
using kernels::WeightFormat;

struct Loaded {
  ModelConfig config;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::unique_ptr<Weights> weights;
};

absl::StatusOr<Loaded> Load(const std::string& folder, const LoadOptions& options = {}) {
  Loaded loaded;
  ASSIGN_OR_RETURN(loaded.config, ModelConfig::Load(folder));
  ASSIGN_OR_RETURN(loaded.checkpoint, Checkpoint::Open(folder));
  ASSIGN_OR_RETURN(loaded.weights, LoadWeights(loaded.config, loaded.checkpoint, options));
  return loaded;
}

// Twin of the element formats, from the bytes.
class Reader {
 public:
  explicit Reader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  double Value(const std::string& name, int64_t flat) {
    const StoredTensor& tensor = Tensor(name);
    const auto* bytes = reinterpret_cast<const unsigned char*>(tensor.view.bytes.data());
    uint32_t bits = 0;
    if (tensor.view.dtype == DType::kF32) {
      std::memcpy(&bits, bytes + 4 * flat, 4);
    } else {
      bits = uint32_t{bytes[2 * flat + 1]} << 24 | uint32_t{bytes[2 * flat]} << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  double Mxfp4(const std::string& name, int64_t row, int64_t col) {
    const StoredTensor& packed = Tensor(name + "_packed");
    const StoredTensor& scale = Tensor(name + "_scale");
    const int64_t half = packed.view.shape[1];
    const int code =
        static_cast<int>(packed.view.bytes[row * half + col / 2]) >> (col % 2 * 4) & 15;
    const int exponent = static_cast<int>(scale.view.bytes[row * (half / 16) + col / 32]) - 127;
    const double steps[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return std::ldexp(code & 8 ? -steps[code & 7] : steps[code & 7], exponent);
  }
  int64_t Rows(const std::string& name) { return Tensor(name).view.shape[0]; }
  int64_t Cols(const std::string& name) { return Tensor(name).view.shape[1]; }

  void ExpectMatrix(const PackedMatrix& m, const std::string& name) {
    const std::string full = name + ".weight";
    ASSERT_EQ(m.rows, Rows(full)) << name;
    ASSERT_EQ(m.cols, Cols(full)) << name;
    ASSERT_EQ(reinterpret_cast<uintptr_t>(m.data) % 64, 0u) << name;
    for (int64_t r = 0; r < m.rows; ++r) {
      for (int64_t c = 0; c < m.cols; ++c) {
        ASSERT_EQ(UnpackOne(m, r, c), Value(full, r * m.cols + c)) << name << " " << r << "," << c;
      }
    }
  }
  void ExpectFloats(const FloatVector& v, const std::string& name) {
    ASSERT_EQ(std::ssize(v), Tensor(name).view.elements()) << name;
    for (int64_t i = 0; i < std::ssize(v); ++i) ASSERT_EQ(v[i], Value(name, i)) << name << " " << i;
  }
  size_t used() const { return used_.size(); }

 private:
  const StoredTensor& Tensor(const std::string& name) {
    const StoredTensor* tensor = checkpoint_.Find(name);
    CHECK(tensor != nullptr, "%s", name);
    used_.insert(name);
    return *tensor;
  }

  const Checkpoint& checkpoint_;
  std::set<std::string> used_;
};

void ExpectKda(Reader& reader, const ModelConfig& c, const KdaWeights& k, const std::string& p) {
  reader.ExpectMatrix(k.q, p + "q_proj");
  reader.ExpectMatrix(k.k, p + "k_proj");
  reader.ExpectMatrix(k.v, p + "v_proj");
  reader.ExpectMatrix(k.f_a, p + "f_a_proj");
  reader.ExpectMatrix(k.f_b, p + "f_b_proj");
  reader.ExpectMatrix(k.b, p + "b_proj");
  reader.ExpectMatrix(k.o, p + "o_proj");
  if (c.full_rank_gate) {
    reader.ExpectMatrix(k.g, p + "g_proj");
  } else {
    reader.ExpectMatrix(k.g_a, p + "g_a_proj");
    reader.ExpectMatrix(k.g_b, p + "g_b_proj");
  }
  reader.ExpectFloats(k.dt_bias, p + "dt_bias");
  reader.ExpectFloats(k.o_norm, p + "o_norm.weight");
  ASSERT_EQ(std::ssize(k.a_scale), c.kda_heads);
  for (int64_t h = 0; h < c.kda_heads; ++h) {
    EXPECT_EQ(k.a_scale[h], static_cast<float>(std::exp(reader.Value(p + "A_log", h))));
  }
  const std::pair<const FloatVector*, const char*> filters[] = {{&k.q_conv, "q_conv1d.weight"},
                                                                {&k.k_conv, "k_conv1d.weight"},
                                                                {&k.v_conv, "v_conv1d.weight"}};
  for (const auto& [filter, name] : filters) {
    ASSERT_EQ(std::ssize(*filter), c.conv_taps * c.kda_width());
    for (int64_t channel = 0; channel < c.kda_width(); ++channel) {
      for (int64_t tap = 0; tap < c.conv_taps; ++tap) {
        ASSERT_EQ((*filter)[tap * c.kda_width() + channel],
                  reader.Value(p + name, channel * c.conv_taps + tap));
      }
    }
  }
}

void ExpectMla(Reader& reader, const ModelConfig& c, const MlaWeights& m, const std::string& p) {
  if (c.q_rank > 0) {
    reader.ExpectMatrix(m.q_a, p + "q_a_proj");
    reader.ExpectFloats(m.q_a_norm, p + "q_a_layernorm.weight");
    reader.ExpectMatrix(m.q_b, p + "q_b_proj");
  } else {
    reader.ExpectMatrix(m.q, p + "q_proj");
  }
  reader.ExpectMatrix(m.kv_a, p + "kv_a_proj_with_mqa");
  reader.ExpectFloats(m.kv_a_norm, p + "kv_a_layernorm.weight");
  if (c.mla_gate) reader.ExpectMatrix(m.g, p + "g_proj");
  reader.ExpectMatrix(m.o, p + "o_proj");
  ASSERT_EQ(std::ssize(m.wk), c.heads);
  for (int64_t h = 0; h < c.heads; ++h) {
    const int64_t base = h * (c.nope + c.v_dim);
    ASSERT_EQ(m.wk[h].rows, c.kv_rank);
    ASSERT_EQ(m.wk[h].cols, c.nope);
    ASSERT_EQ(m.wv[h].rows, c.v_dim);
    ASSERT_EQ(m.wv[h].cols, c.kv_rank);
    for (int64_t r = 0; r < c.kv_rank; ++r) {
      for (int64_t n = 0; n < c.nope; ++n) {
        ASSERT_EQ(UnpackOne(m.wk[h], r, n),
                  reader.Value(p + "kv_b_proj.weight", (base + n) * c.kv_rank + r));
      }
      for (int64_t v = 0; v < c.v_dim; ++v) {
        ASSERT_EQ(UnpackOne(m.wv[h], v, r),
                  reader.Value(p + "kv_b_proj.weight", (base + c.nope + v) * c.kv_rank + r));
      }
    }
  }
}

void ExpectGlu(Reader& reader, const GluWeights& g, const std::string& p) {
  reader.ExpectMatrix(g.gate, p + "gate_proj");
  reader.ExpectMatrix(g.up, p + "up_proj");
  reader.ExpectMatrix(g.down, p + "down_proj");
}

void ExpectResidual(Reader& reader, const FloatVector& w, const std::string& name) {
  for (int64_t i = 0; i < std::ssize(w); ++i) {
    const float norm = static_cast<float>(reader.Value(name + "_norm.weight", i));
    const float proj = static_cast<float>(reader.Value(name + "_proj.weight", i));
    ASSERT_EQ(w[i], norm * proj) << name;
  }
}

void ExpectExpert(Reader& reader, const ModelConfig& c, const ExpertWeights& expert, int64_t layer,
                  int64_t e) {
  const std::pair<const PackedMatrix*, const char*> parts[] = {
      {&expert.gate, "w1"}, {&expert.up, "w3"}, {&expert.down, "w2"}};
  for (const auto& [m, name] : parts) {
    const std::string full = ExpertTensor(layer, e, name);
    const bool down = m == &expert.down;
    ASSERT_EQ(m->rows, down ? c.expert_width() : c.moe_inter) << full;
    ASSERT_EQ(m->cols, down ? c.moe_inter : c.expert_width()) << full;
    ASSERT_EQ(m->format, c.experts_mxfp4 ? WeightFormat::kMxfp4 : WeightFormat::kBf16);
    for (int64_t r = 0; r < m->rows; ++r) {
      for (int64_t k = 0; k < m->cols; ++k) {
        const double stored =
            c.experts_mxfp4 ? reader.Mxfp4(full, r, k) : reader.Value(full, r * m->cols + k);
        ASSERT_EQ(UnpackOne(*m, r, k), stored) << full << " " << r << "," << k;
      }
    }
  }
}

void ExpectMoe(Reader& reader, const ModelConfig& c, const MoeWeights& m, const std::string& p) {
  reader.ExpectMatrix(m.gate, p + "gate");
  reader.ExpectFloats(m.bias, p + "gate.e_score_correction_bias");
  if (c.shared_experts > 0) ExpectGlu(reader, m.shared, p + "shared_experts.");
  if (c.latent > 0) {
    reader.ExpectMatrix(m.latent_down, p + "routed_expert_down_proj");
    reader.ExpectFloats(m.latent_norm, p + "routed_expert_norm.weight");
    reader.ExpectMatrix(m.latent_up, p + "routed_expert_up_proj");
  }
}

class WeightsTest : public testing::TestWithParam<const char*> {};

TEST_P(WeightsTest, EveryStoredValueIsUnpackedExactly) {
  LoadOptions options;
  options.threads = 2;
  int64_t done = 0, total = 0;
  options.progress = [&](int64_t d, int64_t t) { done = d, total = t; };
  const absl::StatusOr<Loaded> loaded = Load(GoldenFolder(GetParam()), options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(done, total);
  EXPECT_GT(total, 0);
  const ModelConfig& c = loaded->config;
  const Weights& w = *loaded->weights;
  Reader reader(*loaded->checkpoint);
  for (int64_t i = 0; i < c.layer_count(); ++i) {
    const std::string p = LayerPrefix(i);
    const LayerWeights& layer = w.layers[i];
    reader.ExpectFloats(layer.input_norm, p + "input_layernorm.weight");
    reader.ExpectFloats(layer.post_attention_norm, p + "post_attention_layernorm.weight");
    ExpectResidual(reader, layer.attn_res, p + "self_attention_res");
    ExpectResidual(reader, layer.mlp_res, p + "mlp_res");
    if (c.layers[i].mixer == MixerKind::kKda) {
      ExpectKda(reader, c, layer.kda, p + "self_attn.");
    } else {
      ExpectMla(reader, c, layer.mla, p + "self_attn.");
    }
    if (c.layers[i].ffn == FfnKind::kDense) {
      ExpectGlu(reader, layer.dense, p + "mlp.");
      continue;
    }
    ExpectMoe(reader, c, layer.moe, p + "block_sparse_moe.");
    for (int64_t e = 0; e < c.experts; ++e) ExpectExpert(reader, c, w.experts.layers[i][e], i, e);
  }
  ExpectResidual(reader, w.output_res, "model.output_attn_res");
  reader.ExpectFloats(w.final_norm, "model.norm.weight");
  reader.ExpectMatrix(w.lm_head, "lm_head");
  std::vector<float> row(static_cast<size_t>(c.hidden));
  for (int64_t id = 0; id < c.vocab; ++id) {
    w.embedding.Row(static_cast<TokenId>(id), row.data());
    for (int64_t i = 0; i < c.hidden; ++i) {
      ASSERT_EQ(row[i], reader.Value("model.embed_tokens.weight", id * c.hidden + i));
    }
  }
  // Nothing was left out of the comparison.
  EXPECT_EQ(reader.used(), loaded->checkpoint->tensors().size());
}

TEST_P(WeightsTest, AShardHoldsNothingButItsExperts) {
  LoadOptions options;
  options.only_experts = true;
  options.experts = {ExpertSelection::Kind::kList, {1, 7}};
  const absl::StatusOr<Loaded> shard = Load(GoldenFolder(GetParam()), options);
  ASSERT_TRUE(shard.ok()) << shard.status();
  const absl::StatusOr<Loaded> whole = Load(GoldenFolder(GetParam()));
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_TRUE(shard->weights->layers.empty());
  EXPECT_EQ(shard->weights->lm_head.data, nullptr);
  EXPECT_LT(shard->weights->bytes(), whole->weights->bytes() / 5);
  Reader reader(*shard->checkpoint);
  const ModelConfig& c = shard->config;
  for (int64_t i = 0; i < c.layer_count(); ++i) {
    const auto& experts = shard->weights->experts.layers[i];
    if (c.layers[i].ffn == FfnKind::kDense) {
      EXPECT_TRUE(experts.empty());
      continue;
    }
    for (int64_t e = 0; e < c.experts; ++e) {
      if (e == 1 || e == 7) {
        ExpectExpert(reader, c, experts[e], i, e);
      } else {
        EXPECT_EQ(experts[e].gate.data, nullptr);
      }
    }
  }
}

TEST_P(WeightsTest, AnAttentionWorkerHoldsNoExperts) {
  LoadOptions options;
  options.experts.kind = ExpertSelection::Kind::kNone;
  const absl::StatusOr<Loaded> loaded = Load(GoldenFolder(GetParam()), options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  for (const auto& layer : loaded->weights->experts.layers) {
    for (const ExpertWeights& expert : layer) EXPECT_EQ(expert.down.data, nullptr);
  }
  EXPECT_NE(loaded->weights->lm_head.data, nullptr);
}

TEST_P(WeightsTest, AnUnknownExpertIsRefused) {
  LoadOptions options;
  options.experts = {ExpertSelection::Kind::kList, {0, 12}};
  const absl::Status status = Load(GoldenFolder(GetParam()), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(status), testing::HasSubstr("12 is not one of the model's 12 experts"));
}

INSTANTIATE_TEST_SUITE_P(Golden, WeightsTest, testing::Values("kimi_k3_tiny", "kimi_linear_tiny"),
                         [](const auto& info) { return std::string(info.param); });

TEST(WeightsFormats, TensorsAtOddAddressesAreReadExactly) {
  CheckpointCopy copy("kimi_linear_tiny");
  // One byte in front of everything shifts every tensor to an odd address.
  for (const char* file :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    copy.EditShard(file, [](ShardText& shard) {
      shard.data.insert(0, 1, '\x7f');
      for (auto& [name, entry] : shard.header.items()) {
        if (name == "__metadata__") continue;
        for (auto& offset : entry["data_offsets"]) offset = offset.get<int64_t>() + 1;
      }
    });
  }
  const absl::StatusOr<Loaded> odd = Load(copy.folder());
  const absl::StatusOr<Loaded> even = Load(GoldenFolder("kimi_linear_tiny"));
  ASSERT_TRUE(odd.ok()) << odd.status();
  ASSERT_TRUE(even.ok()) << even.status();
  ASSERT_EQ(odd->weights->bytes(), even->weights->bytes());
  EXPECT_EQ(0, std::memcmp(odd->weights->arena.data(), even->weights->arena.data(),
                           static_cast<size_t>(odd->weights->bytes())));
  EXPECT_EQ(odd->weights->layers[0].kda.dt_bias, even->weights->layers[0].kda.dt_bias);
}

TEST(WeightsFormats, TheThreadCountDoesNotShow) {
  LoadOptions three;
  three.threads = 3;
  const absl::StatusOr<Loaded> a = Load(GoldenFolder("kimi_k3_tiny"));
  const absl::StatusOr<Loaded> b = Load(GoldenFolder("kimi_k3_tiny"), three);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(0, std::memcmp(a->weights->arena.data(), b->weights->arena.data(),
                           static_cast<size_t>(a->weights->bytes())));
}

TEST(WeightsFormats, TheSmallestScaleIsExact) {
  CheckpointCopy copy("kimi_k3_tiny");
  const std::string name = "language_model." + ExpertTensor(1, 0, "w1");
  copy.EditTensor(name + "_scale", [](std::string& bytes) {
    bytes[0] = 0;
    bytes[1] = static_cast<char>(252);
  });
  const absl::StatusOr<Loaded> loaded = Load(copy.folder());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  Reader reader(*loaded->checkpoint);
  ExpectExpert(reader, loaded->config, loaded->weights->experts.layers[1][0], 1, 0);
}

TEST(WeightsFormats, TiedEmbeddingsServeAsHead) {
  CheckpointCopy copy("kimi_linear_tiny");
  copy.DropTensor("lm_head.weight");
  copy.EditJson("config.json", [](nlohmann::json& c) { c["tie_word_embeddings"] = true; });
  const absl::StatusOr<Loaded> loaded = Load(copy.folder());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  Reader reader(*loaded->checkpoint);
  reader.ExpectMatrix(loaded->weights->lm_head, "model.embed_tokens");
}

}  // namespace
}  // namespace deltamesh
