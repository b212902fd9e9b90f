#include "services/cli/random_model.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "kernels/base/types.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/model/tensor_plan.h"

namespace deltamesh {
namespace {

using nlohmann::ordered_json;

ordered_json ConfigOf(const RandomShape& s) {
  auto kda = ordered_json::array();
  for (int64_t i = 1; i <= s.layers; ++i) {
    if (std::find(s.full.begin(), s.full.end(), i) == s.full.end()) kda.push_back(i);
  }
  return {{"architectures", {"KimiLinearForCausalLM"}},
          {"model_type", "kimi_linear"},
          {"torch_dtype", "bfloat16"},
          {"vocab_size", s.vocab},
          {"bos_token_id", s.vocab - 3},
          {"eos_token_id", s.vocab - 2},
          {"pad_token_id", s.vocab - 1},
          {"hidden_size", s.hidden},
          {"hidden_act", "silu"},
          {"num_hidden_layers", s.layers},
          {"rms_norm_eps", 1e-5},
          {"tie_word_embeddings", false},
          {"linear_attn_config",
           {{"full_attn_layers", s.full},
            {"kda_layers", kda},
            {"num_heads", s.kda_heads},
            {"head_dim", s.kda_dim},
            {"short_conv_kernel_size", 4}}},
          {"num_attention_heads", s.heads},
          {"num_key_value_heads", s.heads},
          {"q_lora_rank", nullptr},
          {"kv_lora_rank", s.rank},
          {"qk_nope_head_dim", s.nope},
          {"qk_rope_head_dim", s.rope},
          {"v_head_dim", s.v_dim},
          {"mla_use_nope", true},
          {"intermediate_size", s.dense_inter},
          {"first_k_dense_replace", 1},
          {"moe_layer_freq", 1},
          {"num_experts", s.experts},
          {"num_experts_per_token", s.top_k},
          {"num_shared_experts", 1},
          {"moe_intermediate_size", s.moe_inter},
          {"moe_renormalize", true},
          {"moe_router_activation_func", "sigmoid"},
          {"num_expert_group", 1},
          {"topk_group", 1},
          {"use_grouped_topk", true},
          {"routed_scaling_factor", 2.446},
          {"num_nextn_predict_layers", 0},
          {"rope_scaling", nullptr},
          {"rope_theta", 10000.0},
          {"model_max_length", int64_t{1} << 24},
          {"use_cache", true}};
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : bits_(seed) {}
  double Uniform(double low, double high) {
    return low + (high - low) * 0x1p-53 * static_cast<double>(bits_.Next() >> 11);
  }
  // Mean 0, variance 1; bounded, which does no harm here.
  double Normal() {
    const uint64_t b = bits_.Next();
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(b >> (16 * i) & 0xFFFF);
    return (sum / 65535 - 2) * std::sqrt(3.0);
  }

 private:
  SeededEntropy bits_;
};

// What the values of a tensor are drawn from. Matrices keep the size of what they are applied to, the last
// ones of a sub-layer make it smaller; gates and decays stay inside their active range.
std::function<double()> ValuesOf(const ExpectedTensor& t, Draw& draw) {
  const auto has = [&](const char* part) { return t.name.find(part) != std::string::npos; };
  if (has("norm.weight")) return [&] { return draw.Uniform(0.6, 1.4); };
  if (has("A_log")) return [&] { return std::log(draw.Uniform(1, 4)); };
  if (has("dt_bias")) return [&] { return draw.Uniform(-3.5, 0); };
  if (has("conv1d")) return [&] { return 0.7 * draw.Normal(); };
  if (has("correction_bias")) return [&] { return 0.2 * draw.Normal(); };
  if (has("embed_tokens")) return [&] { return draw.Normal(); };
  const double gain = (has("o_proj") || has("down_proj") || has(".w2")) ? 0.4 : 1.0;
  const double scale = gain / std::sqrt(static_cast<double>(t.shape.back()));
  return [&draw, scale] { return scale * draw.Normal(); };
}

void WriteValues(const ExpectedTensor& t, Draw& draw, std::ostream& out) {
  const std::function<double()> next = ValuesOf(t, draw);
  std::string bytes(static_cast<size_t>(t.bytes()), '\0');
  const int64_t size = DTypeBytes(t.dtype);
  for (int64_t i = 0; i < t.bytes(); i += size) {
    const auto value = static_cast<float>(next());
    if (t.dtype == DType::kF32) {
      std::memcpy(bytes.data() + i, &value, sizeof(value));
    } else {
      const uint16_t half = kernels::FloatToBf16(value);
      std::memcpy(bytes.data() + i, &half, sizeof(half));
    }
  }
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

absl::Status WriteRandomModel(const RandomShape& shape, uint64_t seed, const std::string& folder) {
  const std::string text = ConfigOf(shape).dump(1);
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Parse(text, "random model"));
  const std::vector<ExpectedTensor> plan = TensorPlan(config, StorageForms::KimiLinear());
  ordered_json header;
  int64_t at = 0;
  for (const ExpectedTensor& t : plan) {
    header[t.name] = {
        {"dtype", DTypeName(t.dtype)}, {"shape", t.shape}, {"data_offsets", {at, at + t.bytes()}}};
    at += t.bytes();
  }
  std::string head = header.dump();
  head.resize((head.size() + 7) / 8 * 8, ' ');
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  std::ofstream(folder + "/config.json") << text;
  std::ofstream out(folder + "/model.safetensors", std::ios::binary);
  for (int i = 0; i < 8; ++i) out.put(static_cast<char>(uint64_t{head.size()} >> (8 * i)));
  out << head;
  Draw draw(seed);
  for (const ExpectedTensor& t : plan) WriteValues(t, draw, out);
  out.close();
  if (!out || !std::filesystem::exists(folder + "/config.json")) {
    return Unavailable("%s: cannot write a model of %d bytes there: %s; free some space", folder,
                       at, std::strerror(errno));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ScratchFolder>> ScratchFolder::Create() {
  std::error_code error;
  std::string path = (std::filesystem::temp_directory_path(error) / "deltamesh-XXXXXX").string();
  if (error || mkdtemp(path.data()) == nullptr) {
    return Unavailable("%s: cannot be made: %s; set TMPDIR to a folder that can be written", path,
                       error ? error.message() : std::strerror(errno));
  }
  return std::unique_ptr<ScratchFolder>(new ScratchFolder(std::move(path)));
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace deltamesh
