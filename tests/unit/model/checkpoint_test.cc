// Every way a checkpoint can be damaged is one error that names file and tensor, before anything is
// packed. Starting point: the golden checkpoints, which load.
#include "runtime/model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "runtime/base/status.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/model/weights.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kFirst = "model-00001-of-000002.safetensors";
constexpr const char* kSecond = "model-00002-of-000002.safetensors";
constexpr const char* kQuery =
    "language_model.model.layers.0.self_attn.q_proj.weight";       // in kFirst
constexpr const char* kNorm = "language_model.model.norm.weight";  // in kSecond

// Whatever a server would answer when told to load the folder.
absl::Status TryLoad(const std::string& folder) {
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(folder));
  ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(folder));
  return LoadWeights(config, std::move(checkpoint), {}).status();
}

class DamagedK3 : public testing::Test {
 protected:
  // The load fails and its message names all of these.
  template <typename... Parts>
  void ExpectError(absl::StatusCode code, const Parts&... parts) {
    const absl::Status status = TryLoad(copy_.folder());
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(MessageOf(status), AllOf(HasSubstr(parts)...));
  }
  void EditHeader(const std::function<void(json&)>& edit) {
    copy_.EditShard(kFirst, [&](ShardText& shard) { edit(shard.header); });
  }
  // Header text as it is, without going through a JSON value.
  void EditHeaderText(const std::function<void(std::string&)>& edit) {
    copy_.EditText(kFirst, [&](std::string& file) {
      uint64_t length = 0;
      std::memcpy(&length, file.data(), 8);
      std::string text = file.substr(8, length);
      edit(text);
      length = text.size();
      file =
          std::string(reinterpret_cast<const char*>(&length), 8) + text + file.substr(8 + length);
    });
  }

  CheckpointCopy copy_{"kimi_k3_tiny"};
};

TEST_F(DamagedK3, TheUntouchedCopyLoads) { EXPECT_TRUE(TryLoad(copy_.folder()).ok()); }

TEST_F(DamagedK3, TheCopyWrittenAnewLoads) {
  EditHeader([](json&) {});
  const absl::Status status = TryLoad(copy_.folder());
  EXPECT_TRUE(status.ok()) << status;
}

// ---- index and shards ----

TEST_F(DamagedK3, AMissingShardIsNamed) {
  copy_.Remove(kSecond);
  ExpectError(absl::StatusCode::kNotFound, kSecond, "is not there", "language_model.");
}

TEST_F(DamagedK3, AMissingIndexIsNamed) {
  copy_.Remove(kIndex);
  ExpectError(absl::StatusCode::kNotFound, kIndex, "2 .safetensors files need it");
}

TEST_F(DamagedK3, AFolderWithoutWeightsIsRefused) {
  for (const char* file : {kIndex, kFirst, kSecond}) copy_.Remove(file);
  ExpectError(absl::StatusCode::kNotFound, copy_.folder().c_str(), "nor a .safetensors file");
}

TEST_F(DamagedK3, TheIndexNamesATensorTheShardLacks) {
  EditHeader([](json& header) { header.erase(kQuery); });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, "has no tensor", kQuery);
}

TEST_F(DamagedK3, TheIndexPlacesATensorInTheWrongShard) {
  copy_.EditJson(kIndex, [](json& index) { index["weight_map"][kQuery] = kSecond; });
  ExpectError(absl::StatusCode::kInvalidArgument, kIndex, kQuery, kSecond, kFirst);
}

TEST_F(DamagedK3, ATensorIsNotInTheIndex) {
  copy_.EditJson(kIndex, [](json& index) { index["weight_map"].erase(kQuery); });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, kQuery,
              "is not in model.safetensors.index.json");
}

TEST_F(DamagedK3, ATensorIsInTwoShards) {
  copy_.EditShard(kSecond, [](ShardText& shard) {
    shard.header[kQuery] = {{"dtype", "BF16"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
  });
  ExpectError(absl::StatusCode::kInvalidArgument, kSecond, kQuery, "is stored in", kFirst);
}

TEST_F(DamagedK3, ATensorIsStoredUnderBothNames) {
  copy_.EditShard(kSecond, [](ShardText& shard) {
    shard.header["model.norm.weight"] = shard.header[kNorm];
    shard.header["model.norm.weight"]["data_offsets"] = {0, 0};
    shard.header["model.norm.weight"]["shape"] = {0};
  });
  copy_.EditJson(kIndex, [](json& index) { index["weight_map"]["model.norm.weight"] = kSecond; });
  ExpectError(absl::StatusCode::kInvalidArgument, kSecond, "model.norm.weight", "is stored as");
}

TEST_F(DamagedK3, TheIndexIsNoJson) {
  copy_.EditText(kIndex, [](std::string& text) { text.resize(text.size() - 2); });
  ExpectError(absl::StatusCode::kInvalidArgument, kIndex, "not valid JSON");
}

TEST_F(DamagedK3, TheIndexHasNoMap) {
  copy_.EditText(kIndex, [](std::string& text) { text = "{}"; });
  ExpectError(absl::StatusCode::kInvalidArgument, kIndex, "weight_map: is missing");
}

TEST_F(DamagedK3, TheIndexLeadsOutOfTheFolder) {
  copy_.EditJson(kIndex, [](json& index) { index["weight_map"][kQuery] = "../x.safetensors"; });
  ExpectError(absl::StatusCode::kInvalidArgument, kIndex, kQuery,
              "\"../x.safetensors\" is not the name");
}

// ---- the file itself ----

TEST_F(DamagedK3, AFileCutAnywhereIsRefused) {
  const std::string whole = ReadFile(copy_.Path(kFirst));
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (const size_t size :
       {size_t{0}, size_t{7}, size_t{8}, size_t{8 + header / 2}, size_t{8 + header},
        size_t{8 + header + 1}, whole.size() / 2, whole.size() - 1}) {
    WriteFile(copy_.Path(kFirst), whole.substr(0, size));
    ExpectError(absl::StatusCode::kDataLoss, kFirst);
  }
  ExpectError(absl::StatusCode::kDataLoss, kFirst, "tensor language_model.", "cut short");
}

TEST_F(DamagedK3, AHugeHeaderLengthIsRefused) {
  copy_.EditText(kFirst, [](std::string& file) { std::memset(file.data(), 0xff, 8); });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, "not a safetensors file");
}

TEST_F(DamagedK3, TheHeaderIsNoJson) {
  EditHeaderText([](std::string& text) { text[0] = '?'; });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, "header: not valid JSON at byte 1");
}

// Values are walked recursively, so that depth must be bounded before.
TEST_F(DamagedK3, DeeplyNestedJsonIsRefused) {
  for (const int depth : {70, 200'000}) {
    const std::string deep = std::string(depth, '[') + std::string(depth, ']');
    const std::string objects = "{\"x\":{\"y\":" + deep + ",\"y\":1}}";
    for (const std::string& text : {"{\"hidden_size\":" + deep + "}", deep, objects}) {
      copy_.EditText("config.json", [&](std::string& file) { file = text; });
      ExpectError(absl::StatusCode::kInvalidArgument, "config.json", "nested more than 64 deep");
    }
    for (const std::string& text :
         {"{\"a\":{\"dtype\":" + deep + "}}", "{\"a\":{\"shape\":" + deep + "}}"}) {
      CheckpointCopy copy("kimi_k3_tiny");
      copy.EditText(kIndex, [&](std::string& file) { file = text; });
      const absl::Status status = TryLoad(copy.folder());
      EXPECT_THAT(MessageOf(status), AllOf(HasSubstr(kIndex), HasSubstr("nested more than")));
    }
  }
}

TEST_F(DamagedK3, ATensorIsTwiceInTheHeader) {
  EditHeaderText([](std::string& text) {
    text =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}";
  });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, "key \"a\" occurs twice");
}

TEST_F(DamagedK3, OffsetsBeyondTheFileAreRefused) {
  copy_.EditShard(kFirst, [](ShardText& shard) {
    auto& offsets = shard.header[kQuery]["data_offsets"];
    const int64_t bytes = offsets[1].get<int64_t>() - offsets[0].get<int64_t>();
    const int64_t begin = std::ssize(shard.data) - bytes + 1;
    offsets = {begin, begin + bytes};
  });
  ExpectError(absl::StatusCode::kDataLoss, kFirst, kQuery, "cut short");
}

TEST_F(DamagedK3, OverlappingTensorsAreRefused) {
  EditHeader([](json& header) {
    for (auto& offset : header[kQuery]["data_offsets"]) offset = offset.get<int64_t>() + 2;
  });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, kQuery, "overlaps tensor");
}

TEST_F(DamagedK3, ShapeAndBytesMustAgree) {
  EditHeader([](json& header) { header[kQuery]["shape"] = {96, 97}; });
  ExpectError(absl::StatusCode::kInvalidArgument, kFirst, kQuery, "[96, 97] takes 18624 bytes");
}

TEST_F(DamagedK3, BadHeaderEntriesAreRefused) {
  const std::string before = ReadFile(copy_.Path(kFirst));
  const std::pair<const char*, const char*> edits[] = {
      {R"({"dtype": "BF17", "shape": [1], "data_offsets": [0, 2]})", "dtype \"BF17\" is unknown"},
      {R"({"dtype": 3, "shape": [1], "data_offsets": [0, 2]})", "dtype: 3 is not a string"},
      {R"({"shape": [1], "data_offsets": [0, 2]})", "dtype: is missing"},
      {R"({"dtype": "BF16", "data_offsets": [0, 2]})", "shape or data_offsets is missing"},
      {R"({"dtype": "BF16", "shape": 1, "data_offsets": [0, 2]})", "shape is not a list"},
      {R"({"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]})", "shape holds -1"},
      {R"({"dtype": "BF16", "shape": [1.5], "data_offsets": [0, 2]})", "shape holds 1.5"},
      {R"({"dtype": "BF16", "shape": [1], "data_offsets": [2, 0]})", "[2, 0] is not [begin, end]"},
      {R"({"dtype": "BF16", "shape": [1], "data_offsets": [0]})", "is not [begin, end]"},
      {R"({"dtype": "BF16", "shape": [1, 1, 1, 1, 1, 1, 1, 1, 1], "data_offsets": [0, 2]})",
       "9 dimensions"},
      {R"({"dtype": "BF16", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]})",
       "impossibly large"},
      {R"([1])", "is not a JSON object"}};
  for (const auto& [entry, message] : edits) {
    WriteFile(copy_.Path(kFirst), before);
    EditHeader([&](json& header) { header[kQuery] = json::parse(entry); });
    ExpectError(absl::StatusCode::kInvalidArgument, kFirst, kQuery, message);
  }
}

TEST_F(DamagedK3, GapsAreAllowed) {
  copy_.ReplaceTensor(kQuery, "BF16", {96, 96}, std::string(96 * 96 * 2, '\0'));
  const absl::Status status = TryLoad(copy_.folder());
  EXPECT_TRUE(status.ok()) << status;
}

// ---- tensors against the configuration ----

TEST_F(DamagedK3, AMissingTensorIsNamed) {
  copy_.DropTensor(kQuery);
  ExpectError(absl::StatusCode::kNotFound,
              "model.layers.0.self_attn.q_proj.weight (BF16 [96, 96]) is missing",
              "1 missing in all", copy_.folder().c_str(), kFirst);
}

TEST_F(DamagedK3, AMissingScaleIsNamed) {
  copy_.DropTensor("language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight_scale");
  ExpectError(absl::StatusCode::kNotFound,
              "layers.2.block_sparse_moe.experts.3.w2.weight_scale (U8 [64, 2])");
}

TEST_F(DamagedK3, AnExtraTensorIsNamed) {
  copy_.ReplaceTensor(kNorm, "BF16", {96}, std::string(192, '\0'));
  copy_.EditShard(kSecond, [](ShardText& shard) {
    shard.header["language_model.model.layers.0.self_attn.q_proj.bias"] = {
        {"dtype", "BF16"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
  });
  copy_.EditJson(kIndex, [](json& index) {
    index["weight_map"]["language_model.model.layers.0.self_attn.q_proj.bias"] = kSecond;
  });
  ExpectError(absl::StatusCode::kInvalidArgument, kSecond, "q_proj.bias: is not part of the model");
}

TEST_F(DamagedK3, TensorsOfTheImagePathAreNotMissed) {
  const auto checkpoint = Checkpoint::Open(copy_.folder());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->skipped_tensors(), 2);
  EXPECT_EQ((*checkpoint)->skipped_bytes(), 2 * 16 + 2 * 16 * 16);
  copy_.DropTensor("mm_projector.proj.0.weight");
  EXPECT_TRUE(TryLoad(copy_.folder()).ok());
}

struct Reshaped {
  const char* tensor;
  const char* dtype;
  std::vector<int64_t> shape;
  const char* message;
};

TEST_F(DamagedK3, WrongShapesAndTypesAreNamed) {
  const std::string attention = "language_model.model.layers.0.self_attn.";
  const std::string moe = "language_model.model.layers.1.block_sparse_moe.";
  const Reshaped cases[] = {
      {"language_model.lm_head.weight",
       "BF16",
       {768, 95},
       "shape is [768, 95], config.json asks for [768, 96]"},
      {"language_model.lm_head.weight", "BF16", {96, 768}, "shape is [96, 768]"},
      {"language_model.lm_head.weight", "F32", {768, 96}, "dtype is F32, BF16 is required"},
      {"language_model.lm_head.weight", "F16", {768, 96}, "dtype is F16, BF16 is required"},
      {"language_model.model.norm.weight", "BF16", {1, 96}, "shape is [1, 96]"},
      {"A_log", "BF16", {128}, "dtype is BF16, F32 is required"},
      {"A_log", "F32", {3}, "shape is [3], config.json asks for [128]"},
      {"A_log", "F32", {1, 1, 3, 1}, "shape is [1, 1, 3, 1]"},
      {"dt_bias", "BF16", {96}, "dtype is BF16, F32 is required"},
      {"k_conv1d.weight", "BF16", {96, 1, 4}, "dtype is BF16, F32 is required"},
      {"k_conv1d.weight", "F32", {96, 4}, "shape is [96, 4], config.json asks for [96, 1, 4]"},
      {"o_norm.weight", "BF16", {32}, "dtype is BF16, F32 is required"},
      {"gate.e_score_correction_bias", "BF16", {12}, "dtype is BF16, F32 is required"},
      {"gate.weight", "BF16", {11, 96}, "shape is [11, 96]"},
      {"experts.0.w1.weight_packed", "I8", {64, 32}, "dtype is I8, U8 is required"},
      {"experts.0.w1.weight_packed",
       "U8",
       {64, 64},
       "shape is [64, 64], config.json asks for [64, 32]"},
      {"experts.0.w1.weight_scale",
       "U8",
       {64, 4},
       "shape is [64, 4], config.json asks for [64, 2]"},
  };
  for (const Reshaped& c : cases) {
    std::string name = c.tensor;
    if (!name.starts_with("language_model.")) {
      const bool in_moe = name.starts_with("gate.") || name.starts_with("experts.");
      name = (in_moe ? moe : attention) + name;
    }
    const std::string file = copy_.FileOf(name);
    const std::string before = ReadFile(copy_.Path(file));
    int64_t bytes = std::string_view(c.dtype) == "F32"         ? 4
                    : std::string_view(c.dtype).ends_with("8") ? 1
                                                               : 2;
    for (const int64_t size : c.shape) bytes *= size;
    copy_.ReplaceTensor(name, c.dtype, c.shape, std::string(static_cast<size_t>(bytes), '\0'));
    ExpectError(absl::StatusCode::kInvalidArgument, file.c_str(), name.c_str(), c.message);
    WriteFile(copy_.Path(file), before);
  }
}

// The lists, not the names, say which layer is which: g_proj is in both kinds.
TEST_F(DamagedK3, LayerListsOfAnotherModelAreNoticed) {
  copy_.EditJson("config.json", [](json& c) {
    c["text_config"]["linear_attn_config"]["kda_layers"] = {1, 2, 4};
    c["text_config"]["linear_attn_config"]["full_attn_layers"] = {3, 5};
  });
  ExpectError(absl::StatusCode::kNotFound, "model.layers.2.self_attn.", "missing in all");
}

// ---- values ----

TEST_F(DamagedK3, AScaleThatMeansNanIsNamed) {
  const std::string name =
      "language_model.model.layers.1.block_sparse_moe.experts.5.w3.weight_scale";
  copy_.EditTensor(name, [](std::string& bytes) { bytes[7] = '\xff'; });
  ExpectError(absl::StatusCode::kInvalidArgument, copy_.FileOf(name).c_str(), name.c_str(),
              "scale [3, 1] is 255, which means NaN");
  copy_.EditTensor(name, [](std::string& bytes) { bytes[7] = '\xfd'; });
  ExpectError(absl::StatusCode::kInvalidArgument, name.c_str(),
              "is 253, beyond the range of float32");
}

TEST_F(DamagedK3, ValuesThatAreNotFiniteAreNamed) {
  const std::pair<const char*, const char*> places[] = {
      {"language_model.model.layers.3.self_attn.kv_b_proj.weight", "value [159, 31] is not finite"},
      {"language_model.lm_head.weight", "value [767, 95] is not finite"},
      {"language_model.model.embed_tokens.weight", "value [767, 95] is not finite"},
      {"language_model.model.layers.1.mlp_res_proj.weight", "value [0, 95] is not finite"},
      {"language_model.model.layers.0.self_attn.dt_bias", "value [95] is not finite"},
      {"language_model.model.layers.0.self_attn.q_conv1d.weight",
       "value [95, 0, 3] is not finite"}};
  for (const char* bits : {"\x80\x7f", "\xc0\xff", "\x81\x7f"}) {  // infinity, -NaN, NaN
    for (const auto& [name, message] : places) {
      const std::string file = copy_.FileOf(name);
      const std::string before = ReadFile(copy_.Path(file));
      copy_.EditTensor(name,
                       [&](std::string& bytes) { bytes.replace(bytes.size() - 2, 2, bits, 2); });
      ExpectError(absl::StatusCode::kInvalidArgument, file.c_str(), name, message);
      WriteFile(copy_.Path(file), before);
    }
  }
}

TEST_F(DamagedK3, ADecayBeyondFloatIsRefused) {
  copy_.EditTensor("language_model.model.layers.1.self_attn.A_log", [](std::string& bytes) {
    const float big = 89;
    std::memcpy(bytes.data() + 4, &big, 4);
  });
  ExpectError(absl::StatusCode::kInvalidArgument, "layers.1.self_attn.A_log",
              "exp(89) is beyond float32");
}

// ---- accepted forms ----

TEST(Forms, OneFileWithoutIndexLoads) {
  CheckpointCopy copy("kimi_linear_tiny");
  ShardText all;
  for (const char* file :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
    copy.EditShard(file, [&](ShardText& shard) {
      for (auto& [name, entry] : shard.header.items()) {
        if (name == "__metadata__") continue;
        for (auto& offset : entry["data_offsets"])
          offset = offset.get<int64_t>() + std::ssize(all.data);
        all.header[name] = entry;
      }
      all.data += shard.data;
    });
    copy.Remove(file);
  }
  copy.Remove("model.safetensors.index.json");
  WriteFile(copy.Path("model.safetensors"), all.Serialise());
  const absl::Status status = TryLoad(copy.folder());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Forms, ALogMayHaveOneEntryPerHead) {
  CheckpointCopy copy("kimi_linear_tiny");
  for (const int layer : {0, 1, 2, 4}) {
    const std::string name = LayerPrefix(layer) + "self_attn.A_log";
    copy.ReplaceTensor(name, "F32", {3}, std::string(12, '\0'));
  }
  const absl::Status status = TryLoad(copy.folder());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Forms, QuantisedExpertsNeedTheKey) {
  CheckpointCopy copy("kimi_k3_tiny");
  copy.EditJson("config.json", [](json& c) { c["text_config"].erase("quantization_config"); });
  const absl::Status status = TryLoad(copy.folder());
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(status), HasSubstr("experts.0.w1.weight (BF16 [64, 64]) is missing"));
}

}  // namespace
}  // namespace deltamesh
