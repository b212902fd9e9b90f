// Whatever bytes config.json, the index or a header hold, loading ends with a Status.
#include <gtest/gtest.h>

#include <cstring>

#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/model/weights.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

absl::Status TryLoad(const std::string& folder) {
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(folder));
  ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(folder));
  return LoadWeights(config, std::move(checkpoint), {}).status();
}

// Bytes that tend to keep JSON alive make deeper code run than random ones.
char LikelyByte(SeededEntropy& random) {
  constexpr std::string_view kAlphabet = "0123456789-.eE\"{}[]:,ntf \\uBFU";
  const uint64_t draw = random.Next();
  return draw % 4 == 0 ? static_cast<char>(draw >> 8) : kAlphabet[(draw >> 8) % kAlphabet.size()];
}

// One to four edits in [0, limit): replace, insert, erase, repeat a stretch, or cut.
void Mutate(std::string& text, size_t limit, SeededEntropy& random) {
  for (uint64_t n = random.Next() % 4 + 1; n > 0 && limit > 1; --n) {
    const size_t at = random.Next() % limit;
    const size_t length = std::min<size_t>(random.Next() % 24 + 1, limit - at);
    switch (random.Next() % 10) {
      case 0:
        text.insert(at, 1, LikelyByte(random));
        break;
      case 1:
        text.erase(at, length);
        limit -= length;
        break;
      case 2:
        text.insert(at, text.substr(at, length));
        break;
      case 3:
        if (random.Next() % 8 == 0) {
          text.resize(at);
          limit = at;
        }
        break;
      default:
        text[at] = LikelyByte(random);
    }
  }
}

struct Target {
  const char* file;
  int rounds;
  bool header_only;
};

class Fuzz : public testing::TestWithParam<Target> {};

TEST_P(Fuzz, LoadingEndsWithAStatus) {
  const Target& target = GetParam();
  CheckpointCopy copy("kimi_k3_tiny");
  const std::string before = ReadFile(copy.Path(target.file));
  size_t limit = before.size();
  if (target.header_only) {
    uint64_t length = 0;
    std::memcpy(&length, before.data(), 8);
    limit = 8 + length;
  }
  int refused = 0;
  for (int seed = 0; seed < target.rounds; ++seed) {
    SeededEntropy random(static_cast<uint64_t>(seed));
    std::string text = before;
    Mutate(text, limit, random);
    WriteFile(copy.Path(target.file), text);
    const absl::Status status = TryLoad(copy.folder());
    if (!status.ok()) {
      ++refused;
      EXPECT_FALSE(status.message().empty()) << "seed " << seed;
      EXPECT_NE(MessageOf(status).find(copy.folder()), std::string::npos)
          << "seed " << seed << ": " << status;
    }
  }
  EXPECT_GT(refused, target.rounds / 4);
}

INSTANTIATE_TEST_SUITE_P(Files, Fuzz,
                         testing::Values(Target{"config.json", 1000, false},
                                         Target{"generation_config.json", 300, false},
                                         Target{"model.safetensors.index.json", 200, false},
                                         Target{"model-00002-of-000002.safetensors", 400, true}),
                         [](const auto& info) {
                           std::string name = info.param.file;
                           std::erase_if(name, [](char c) { return !std::isalnum(c); });
                           return name;
                         });

}  // namespace
}  // namespace deltamesh
