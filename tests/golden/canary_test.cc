// Proof that the golden tests bite: a wrong weight, a lost piece of state or a plausible bug of the
// arithmetic moves the logits well beyond the bound those tests use.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>

#include "runtime/base/status.h"
#include "services/cli/logits.h"
#include "tests/golden/model_runner.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

constexpr double kLogitError = 1e-3;  // the bound of the golden tests
constexpr char kCheck[] = DELTAMESH_SOURCE_DIR "/tests/golden/oracle_check.py";

// One stored tensor, opened for changing its bytes in place.
struct StoredBytes {
  std::string file, name, dtype;
  uint64_t begin, end;  // in the file
};

std::vector<StoredBytes> ListTensors(const std::string& folder) {
  std::vector<StoredBytes> all;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::ifstream in(entry.path(), std::ios::binary);
    uint64_t length = 0;
    in.read(reinterpret_cast<char*>(&length), sizeof(length));
    std::string text(length, '\0');
    in.read(text.data(), static_cast<std::streamsize>(length));
    const nlohmann::json header = nlohmann::json::parse(text);
    for (const auto& [name, t] : header.items()) {
      if (name == "__metadata__") continue;
      const auto offsets = t.at("data_offsets").get<std::vector<uint64_t>>();
      all.push_back({entry.path().string(), name, t.at("dtype").get<std::string>(),
                     8 + length + offsets[0], 8 + length + offsets[1]});
    }
  }
  return all;
}

// Negates every value (halves or doubles each scale). Doing it twice restores the tensor.
void Flip(const StoredBytes& tensor) {
  std::fstream file(tensor.file, std::ios::binary | std::ios::in | std::ios::out);
  std::vector<char> bytes(tensor.end - tensor.begin);
  file.seekg(static_cast<std::streamoff>(tensor.begin));
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const bool scales = tensor.name.ends_with("_scale"), codes = tensor.name.ends_with("_packed");
  const size_t step = scales || codes ? 1 : tensor.dtype == "BF16" ? 2 : 4;
  const int mask = scales ? 0x01 : codes ? 0x88 : 0x80;
  for (size_t i = step - 1; i < bytes.size(); i += step)
    bytes[i] = static_cast<char>(bytes[i] ^ mask);
  file.seekp(static_cast<std::streamoff>(tensor.begin));
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  CHECK(file.good(), "cannot change %s", tensor.file);
}

bool Unused(const std::string& name) {
  return name.find("layers.0.self_attention_res") != std::string::npos ||  // model.md 9
         name.starts_with("vision_tower") || name.starts_with("mm_projector");
}

// Every expert is alike to the loader: of each layer the first few that the prompt visits stand for all.
bool SkippedExpert(const std::string& name, const RecordingExperts& experts) {
  const size_t layer = name.find("layers."), expert = name.find(".experts.");
  if (expert == std::string::npos) return false;
  const int64_t i = std::atoll(name.c_str() + layer + 7), e = std::atoll(name.c_str() + expert + 9);
  return e > 2 || !experts.Visited(i, e);
}

class Canary : public testing::TestWithParam<std::string> {
 protected:
  std::string folder_ = GoldenFolder(GetParam());
};

TEST_P(Canary, EveryTensorMatters) {
  const ScratchFolder scratch("canary-" + GetParam());
  const std::string copy = scratch.path() + "/model";
  fs::copy(folder_, copy, fs::copy_options::recursive);
  for (const auto& entry : fs::directory_iterator(copy)) {
    fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
  }
  std::mt19937 random(5);
  const auto run = [](ModelRunner& runner, const Tokens& tokens) {
    const auto state = runner.NewState(static_cast<int64_t>(tokens.size()));
    return runner.FeedAll(*state, tokens);
  };
  ModelRunner right(copy, 1);
  const Tokens tokens = RandomTokens(random, 40, right.vocab());
  const std::vector<float> truth = run(right, tokens);
  double least = 1e30;
  int flipped = 0;
  for (const StoredBytes& tensor : ListTensors(copy)) {
    if (Unused(tensor.name) || SkippedExpert(tensor.name, right.experts())) continue;
    Flip(tensor);
    ModelRunner wrong(copy, 1);
    const double moved = WorstDifference(run(wrong, tokens), truth);
    EXPECT_GT(moved, 10 * kLogitError) << tensor.name;
    least = std::min(least, moved);
    ++flipped;
    Flip(tensor);
  }
  ModelRunner restored(copy, 1);
  EXPECT_TRUE(SameBits(run(restored, tokens), truth));
  EXPECT_GT(flipped, 80);
  std::printf("%d tensors, each moves some logit by %.2g or more\n", flipped, least);
}

// Each piece of the state, changed between two calls, shows in the next token's logits.
TEST_P(Canary, EveryPieceOfStateMatters) {
  ModelRunner runner(folder_, 1);
  const StateLayout layout = runner.model().state_layout();
  std::mt19937 random(6);
  const Tokens tokens =
      RandomTokens(random, 91, runner.vocab());  // 11 open rows, 27 open positions
  const auto prompt = std::span(tokens).first(tokens.size() - 1);
  const auto next_logits = [&](const std::function<void(SequenceState&)>& damage) {
    const auto state = runner.NewState(static_cast<int64_t>(tokens.size()));
    runner.FeedAll(*state, prompt);
    damage(*state);
    return runner.FeedAll(*state, std::span(tokens).last(1));
  };
  const std::vector<float> truth = next_logits([](SequenceState&) {});
  const auto expect_moves = [&](const std::string& what,
                                const std::function<void(SequenceState&)>& damage) {
    EXPECT_GT(WorstDifference(next_logits(damage), truth), kLogitError) << what;
  };
  for (int64_t i = 0; i < layout.kda_layers; ++i) {
    const std::string layer = " of KDA layer " + std::to_string(i);
    const auto zero = [&](const char* what, float* SlabLayer::*part, int64_t floats) {
      expect_moves(what + layer,
                   [=](SequenceState& s) { std::fill_n(s.slab_layer(i).*part, floats, 0.0f); });
    };
    zero("S", &SlabLayer::s, layout.s_floats());
    zero("conv", &SlabLayer::conv, layout.conv_floats());
    zero("decay", &SlabLayer::decay, layout.decay_floats());
    zero("khat", &SlabLayer::khat, layout.khat_floats());
    zero("u", &SlabLayer::u, layout.u_floats());
  }
  const auto stranger = runner.NewState(90);
  runner.FeedAll(*stranger, RandomTokens(random, 90, runner.vocab()));
  for (int64_t i = 0; i < layout.mla_layers; ++i) {
    for (int64_t block = 0; block < 2; ++block) {
      expect_moves("another sequence's block " + std::to_string(block), [&](SequenceState& s) {
        const int64_t rows = std::min(kBlockTokens, 90 - block * kBlockTokens);
        std::copy_n(stranger->block_layer(block, i), rows * layout.latent_width(),
                    s.block_layer(block, i));
      });
    }
  }
}

// What a sequence forgets is gone: a slab taken again starts empty.
TEST_P(Canary, ASlotTakenAgainStartsEmpty) {
  ModelRunner runner(folder_, 1);
  std::mt19937 random(7);
  const Tokens tokens = RandomTokens(random, 20, runner.vocab());
  const std::vector<float> first = runner.FeedAll(*runner.NewState(20), tokens);
  for (int i = 0; i < 20; ++i) {
    runner.FeedAll(*runner.NewState(70), RandomTokens(random, 70, runner.vocab()));
  }
  EXPECT_TRUE(SameBits(runner.FeedAll(*runner.NewState(20), tokens), first));
}

// The oracle with a plausible bug is a hundred times farther from our logits than the oracle itself, for
// every bug of its table that this model can have and does not hide by construction.
TEST_P(Canary, NoPlausibleBugFitsBetter) {
  const ScratchFolder scratch("mutations-" + GetParam());
  LogitsOptions options;
  options.model = folder_;
  options.out = scratch.path() + "/logits.npy";
  std::string list;
  for (int i = 0; i < 24; ++i) {
    options.tokens.push_back((i * 197 + 31) % 768);
    if (!list.empty()) list += ',';
    list += std::to_string(options.tokens.back());
  }
  const absl::Status status = RunLogits(options);
  ASSERT_TRUE(status.ok()) << status;
  int exit = 0;
  const std::string output = RunCommand(std::string(kPython) + " " + kCheck + " mutations " +
                                            folder_ + " " + options.out + " --tokens " + list,
                                        &exit);
  std::printf("%s", output.c_str());
  EXPECT_EQ(exit, 0) << output;
}

INSTANTIATE_TEST_SUITE_P(All, Canary, testing::ValuesIn(GoldenNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace deltamesh
