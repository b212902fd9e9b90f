// The digest is a function of what is served, not of how it is cut into files.
#include "runtime/model/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "runtime/base/status.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

using nlohmann::json;

std::string Digest(const std::string& folder) {
  const auto checkpoint = Checkpoint::Open(folder);
  CHECK_OK(checkpoint.status());
  const absl::StatusOr<std::string> digest = ModelDigest(**checkpoint);
  CHECK_OK(digest.status());
  return *digest;
}

TEST(Digest, IsStableHexAndDiffersBetweenModels) {
  const std::string digest = Digest(GoldenFolder("kimi_k3_tiny"));
  EXPECT_EQ(digest.size(), 64u);
  EXPECT_EQ(digest.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(digest, Digest(GoldenFolder("kimi_k3_tiny")));
  EXPECT_EQ(digest, Digest(CheckpointCopy("kimi_k3_tiny").folder()));
  EXPECT_NE(digest, Digest(GoldenFolder("kimi_linear_tiny")));
}

TEST(Digest, TellsHowFarItIs) {
  const auto checkpoint = Checkpoint::Open(GoldenFolder("kimi_k3_tiny"));
  CHECK_OK(checkpoint.status());
  const auto all = std::ssize((*checkpoint)->tensors());
  int64_t calls = 0;
  const auto digest = ModelDigest(**checkpoint, [&](int64_t done, int64_t of) {
    EXPECT_EQ(done, calls++);
    EXPECT_EQ(of, all);
  });
  ASSERT_TRUE(digest.ok());
  EXPECT_EQ(calls, all + 1);
  EXPECT_EQ(*digest, Digest(GoldenFolder("kimi_k3_tiny")));
}

TEST(Digest, FormattingAndFileLayoutDoNotEnter) {
  CheckpointCopy copy("kimi_k3_tiny");
  copy.EditText("config.json",
                [](std::string& text) { text = nlohmann::ordered_json::parse(text).dump(7); });
  copy.EditShard("model-00001-of-000002.safetensors", [](ShardText& shard) {
    shard.header["__metadata__"] = {{"note", "moved"}};
    shard.data.insert(0, 64, '\0');
    for (auto& [name, entry] : shard.header.items()) {
      if (name == "__metadata__") continue;
      for (auto& offset : entry["data_offsets"]) offset = offset.get<int64_t>() + 64;
    }
  });
  EXPECT_EQ(Digest(copy.folder()), Digest(GoldenFolder("kimi_k3_tiny")));
}

TEST(Digest, EveryPartOfTheModelEnters) {
  std::set<std::string> seen = {Digest(GoldenFolder("kimi_k3_tiny"))};
  const auto expect_new = [&](const char* what, const std::function<void(CheckpointCopy&)>& edit) {
    CheckpointCopy copy("kimi_k3_tiny");
    edit(copy);
    EXPECT_TRUE(seen.insert(Digest(copy.folder())).second) << what;
  };
  expect_new("config value", [](CheckpointCopy& c) {
    c.EditJson("config.json", [](json& j) { j["text_config"]["rms_norm_eps"] = 2e-5; });
  });
  for (const char* file : {"tiktoken.model", "tokenizer_config.json", "generation_config.json",
                           "chat_literals.json"}) {
    expect_new(file,
               [&](CheckpointCopy& c) { c.EditText(file, [](std::string& t) { t += " "; }); });
    expect_new(file, [&](CheckpointCopy& c) { c.Remove(file); });
  }
  for (const char* name :
       {"language_model.model.layers.0.self_attn.A_log", "language_model.lm_head.weight",
        "language_model.model.layers.3.block_sparse_moe.experts.11.w2.weight_scale"}) {
    for (const double place : {0.0, 0.5, 1.0}) {
      expect_new(name, [&](CheckpointCopy& c) {
        c.EditTensor(name, [&](std::string& bytes) {
          bytes[static_cast<size_t>(place * static_cast<double>(bytes.size() - 1))] ^= 1;
        });
      });
    }
  }
  expect_new("dtype", [](CheckpointCopy& c) {
    c.EditShard("model-00002-of-000002.safetensors", [](ShardText& shard) {
      shard.header["language_model.model.norm.weight"]["dtype"] = "F16";
    });
  });
  expect_new("shape", [](CheckpointCopy& c) {
    c.EditShard("model-00002-of-000002.safetensors", [](ShardText& shard) {
      shard.header["language_model.model.norm.weight"]["shape"] = {96, 1};
    });
  });
}

// What belongs to the image path is not served and does not enter.
TEST(Digest, TheImagePathDoesNotEnter) {
  CheckpointCopy copy("kimi_k3_tiny");
  copy.EditTensor("mm_projector.proj.0.weight", [](std::string& bytes) { bytes[0] ^= 1; });
  EXPECT_EQ(Digest(copy.folder()), Digest(GoldenFolder("kimi_k3_tiny")));
}

// Beyond the limit, sampled pages count and what lies between them does not.
TEST(Digest, WidthsServeUnderTheirOwn) {
  const std::string digest = Digest(GoldenFolder("kimi_k3_tiny"));
  EXPECT_EQ(ServedDigest(digest, WeightWidth::kStored), digest);
  const std::string narrow = ServedDigest(digest, WeightWidth::k8bit);
  EXPECT_NE(narrow, digest);
  EXPECT_EQ(narrow.size(), digest.size());
  EXPECT_NE(ServedDigest(narrow, WeightWidth::k8bit), narrow);
}

TEST(Digest, LargeTensorsAreSampled) {
  CheckpointCopy copy("kimi_k3_tiny");
  const auto with = [&](const char* name, int64_t size, int64_t flipped) {
    std::string bytes(static_cast<size_t>(size), '\0');
    if (flipped >= 0) bytes[static_cast<size_t>(flipped)] = 1;
    CheckpointCopy large("kimi_k3_tiny");
    large.ReplaceTensor(name, "U8", {size}, bytes);
    return Digest(large.folder());
  };
  const char* plain = "language_model.lm_head.weight";
  const std::string whole = with(plain, kWholeBytes, -1);
  for (const int64_t at : {int64_t{0}, int64_t{5000}, kWholeBytes - 1})
    EXPECT_NE(with(plain, kWholeBytes, at), whole);
  const int64_t size = 2 * kWholeBytes;
  const std::string sampled = with(plain, size, -1);
  const int64_t step = (size - kSamplePageBytes) / (kSamplePages - 1);
  EXPECT_NE(with(plain, size, 0), sampled);
  EXPECT_NE(with(plain, size, kSamplePageBytes - 1), sampled);
  EXPECT_EQ(with(plain, size, kSamplePageBytes), sampled);
  EXPECT_NE(with(plain, size, step + 5), sampled);
  EXPECT_NE(with(plain, size, size - 1), sampled);
  const char* expert = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed";
  const int64_t limit = kExpertWholeBytes;
  EXPECT_NE(with(expert, limit, limit / 2), with(expert, limit, -1));
  EXPECT_EQ(with(expert, limit + 1, limit / 2), with(expert, limit + 1, -1));
  EXPECT_NE(with(expert, limit + 1, limit), with(expert, limit + 1, -1));
}

}  // namespace
}  // namespace deltamesh
