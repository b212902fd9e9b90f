// The digest is a function of what is served, not of how it is cut into files.
#include "runtime/model/digest.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "runtime/base/status.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

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
  int64_t last = -1, all = 0;
  for (const auto& [name, stored] : (*checkpoint)->tensors()) all += std::ssize(stored.view.bytes);
  const auto digest = ModelDigest(
      **checkpoint,
      [&](int64_t done, int64_t of) {
        EXPECT_GT(done, last);
        EXPECT_EQ(of, all);
        last = done;
      },
      /*threads=*/3);
  ASSERT_TRUE(digest.ok());
  EXPECT_EQ(last, all);
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

TEST(Digest, WidthsAndActivationsServeUnderTheirOwn) {
  const std::string digest = Digest(GoldenFolder("kimi_k3_tiny"));
  EXPECT_EQ(ServedDigest(digest, WeightWidth::kStored, Activations::kFloat), digest);
  std::set<std::string> served = {digest};
  for (const WeightWidth width : {WeightWidth::kStored, WeightWidth::k8bit}) {
    for (const Activations activations : {Activations::kFloat, Activations::kInt8}) {
      const std::string other = ServedDigest(digest, width, activations);
      EXPECT_EQ(other.size(), digest.size());
      served.insert(other);
    }
  }
  EXPECT_EQ(served.size(), 4u);
  const std::string narrow = ServedDigest(digest, WeightWidth::k8bit, Activations::kFloat);
  EXPECT_NE(ServedDigest(narrow, WeightWidth::k8bit, Activations::kFloat), narrow);
}

TEST(Digest, EveryByteOfALargeTensorCounts) {
  const int64_t size = 3 << 20;
  const auto with = [&](int64_t flipped) {
    std::string bytes(static_cast<size_t>(size), '\0');
    if (flipped >= 0) bytes[static_cast<size_t>(flipped)] = 1;
    CheckpointCopy large("kimi_k3_tiny");
    large.ReplaceTensor("language_model.lm_head.weight", "U8", {size}, bytes);
    return Digest(large.folder());
  };
  std::set<std::string> seen = {with(-1)};
  for (const int64_t at : {int64_t{0}, int64_t{4096}, int64_t{5000}, size / 2 + 1, size - 1}) {
    EXPECT_TRUE(seen.insert(with(at)).second) << at;
  }
}

// Bytes written again count as other files, whatever they hold; what is mapped stays the file it was.
TEST(SourceDigest, NamesTheVeryFiles) {
  CheckpointCopy copy("kimi_k3_tiny");
  const auto checkpoint = Checkpoint::Open(copy.folder());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string source = *SourceDigest(**checkpoint);
  const fs::path file = fs::path(copy.folder()) / (*checkpoint)->files().front();
  fs::last_write_time(file, fs::last_write_time(file) + std::chrono::milliseconds(1));
  EXPECT_EQ(*SourceDigest(**checkpoint), source);
  const auto later = Checkpoint::Open(copy.folder());
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_NE(*SourceDigest(**later), source);
}

TEST(RememberedDigest, IsTakenOnceAndNeverBelievedDamaged) {
  const auto checkpoint = Checkpoint::Open(GoldenFolder("kimi_k3_tiny"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string source = *SourceDigest(**checkpoint), digest = *ModelDigest(**checkpoint);
  const fs::path folder = testing::TempDir() + "digests-" + std::to_string(getpid());
  fs::remove_all(folder);
  LoadOptions options;
  options.packed.folder = folder;
  int taken = 0;
  options.digest_progress = [&](int64_t done, int64_t all) { taken += done == all ? 1 : 0; };
  const auto remembered = [&] { return *RememberedModelDigest(**checkpoint, source, options); };
  EXPECT_EQ(remembered(), digest);
  EXPECT_EQ(taken, 1);
  EXPECT_EQ(remembered(), digest);
  EXPECT_EQ(taken, 1);
  const fs::path record = folder / (source.substr(0, 16) + ".digest");
  std::stringstream good;
  good << std::ifstream(record).rdbuf();
  for (size_t at = 0; at < good.str().size(); at += 7) {
    std::string bad = good.str();
    bad[at] ^= 1;
    std::ofstream(record) << bad;
    taken = 0;
    EXPECT_EQ(remembered(), digest) << at;
    EXPECT_EQ(taken, 1) << at;
  }
  std::ofstream(record) << good.str().substr(0, 30);
  EXPECT_EQ(remembered(), digest);
  // Without a folder that can be written it is taken each time, and noted.
  fs::remove_all(folder);
  std::ofstream(folder) << "a file in the way";
  int notes = 0;
  options.note = [&](std::string_view) { ++notes; };
  taken = 0;
  EXPECT_EQ(remembered(), digest);
  EXPECT_EQ(remembered(), digest);
  EXPECT_EQ(taken, 2);
  EXPECT_EQ(notes, 2);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace deltamesh
