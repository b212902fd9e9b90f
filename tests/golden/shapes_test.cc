// Checkpoints of other shapes, written on the spot by the oracle: each must agree with the oracle in
// float64 and obey the exactness law.
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>

#include "tests/golden/exactness.h"
#include "tests/golden/oracle_comparison.h"

namespace deltamesh {
namespace {

constexpr char kOracle[] = DELTAMESH_SOURCE_DIR "/tests/data/reference.py";

struct Shape {
  const char* name;
  const char* family;
  int seed;
  const char* flags;                      // of make-tiny
  Sizes lengths;                          // for the exactness law
  std::string feed = "chunks:5,60,1,17";  // of the run that is compared with the oracle
  int64_t tokens = 83;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

const Shape kShapes[] = {
    {"k3_one_expert_long_blocks",
     "kimi_k3",
     11,
     "--kda-heads 1 --topk 1 --layers 9 --block 4 --full 4,8,9",
     {1, 16, 33, 65}},
    {"k3_real_head_width",
     "kimi_k3",
     12,
     "--kda-heads 2 --kda-dim 128 --kv-lora 64 --rope 16",
     {17, 66}},
    {"k3_every_expert_direct_query",
     "kimi_k3",
     13,
     "--topk 6 --experts 6 --q-lora 0 --block 1 --shared 1 --kda-heads 5 --kda-dim 16",
     {15, 64, 67}},
    {"k3_odd_widths",
     "kimi_k3",
     14,
     "--hidden 75 --heads 3 --nope 13 --rope 5 --vdim 11 --q-lora 19 --kv-lora 35 --dense-inter 61 "
     "--kda-heads 2 --kda-dim 33 --block 3",
     {1, 31, 65}},
    {"linear_odd_widths_every_expert",
     "kimi_linear",
     15,
     "--hidden 50 --heads 3 --nope 7 --rope 5 --vdim 9 --kv-lora 37 --moe-inter 19 --dense-inter "
     "35 --kda-heads 1 --kda-dim 37 --experts 5 --topk 5",
     {2, 47, 65}},
    {"linear_five_heads_one_expert",
     "kimi_linear",
     16,
     "--kda-heads 5 --kda-dim 32 --topk 1 --experts 7 --layers 9 --full 1,4,9 --shared 2",
     {16, 63, 66}},
    {"linear_real_head_width",
     "kimi_linear",
     17,
     "--kda-heads 2 --kda-dim 128 --layers 3 --full 2 --rope 64 --nope 128 --vdim 128 --heads 2 "
     "--kv-lora 96",
     {18, 64}},
    {"k3_a_single_expert",
     "kimi_k3",
     20,
     "--experts 1 --topk 1 --heads 5 --kda-heads 3 --kda-dim 32 --hidden 96 --moe-inter 32",
     {17, 65}},
    {"linear_a_single_expert_and_head",
     "kimi_linear",
     21,
     "--experts 1 --topk 1 --heads 1 --kda-heads 3 --kda-dim 32 --hidden 160 --moe-inter 96",
     {17, 65}},
    {"linear_beyond_a_span",
     "kimi_linear",
     18,
     "--kda-heads 1 --kda-dim 32 --layers 3 --full 1,3",
     {530},
     "chunks:511,2,9,55",
     577},
    {"k3_beyond_a_span",
     "kimi_k3",
     19,
     "--kda-heads 1 --kda-dim 32 --layers 3 --full 2,3",
     {513},
     "chunks:60,460,5,1",
     526},
};

class Shapes : public testing::TestWithParam<Shape> {
 protected:
  Shapes()
      : scratch_(std::string("shape-") + GetParam().name), folder_(scratch_.path() + "/model") {
    const Shape& s = GetParam();
    int status = 0;
    const std::string output =
        RunCommand(std::string(kPython) + " " + kOracle + " make-tiny --family " + s.family +
                       " --seed " + std::to_string(s.seed) + " --out " + folder_ + " " + s.flags,
                   &status);
    EXPECT_EQ(status, 0) << output;
  }

  ScratchFolder scratch_;
  std::string folder_;
};

TEST_P(Shapes, AgreesWithTheOracleAndWithItself) {
  const Shape& shape = GetParam();
  ModelRunner runner(folder_, 2);
  std::mt19937 random(static_cast<uint32_t>(shape.seed));
  const std::string said = ExpectTheOracles(
      folder_, RandomTokens(random, shape.tokens, runner.vocab()), shape.feed, scratch_.path());
  std::printf("%-32s %s", shape.name, said.c_str());
  ExpectExactness(runner, shape.lengths, static_cast<uint32_t>(shape.seed));
}

// Matrices whose columns are no multiple of 32 stay as stored, so odd widths mix both kinds.
TEST_P(Shapes, With8BitWeightsAgreesWithItself) {
  const Shape& shape = GetParam();
  LoadOptions options;
  options.weights = WeightWidth::k8bit;
  ModelRunner runner(folder_, 2, options);
  ExpectExactness(runner, shape.lengths, static_cast<uint32_t>(shape.seed));
}

// The mode is refused where no matrix could use it, and only there.
TEST_P(Shapes, With8BitActivationsAgreesWithItselfOrIsRefused) {
  const Shape& shape = GetParam();
  LoadOptions options;
  options.weights = WeightWidth::k8bit;
  options.activations = Activations::kInt8;
  if (const absl::Status status = Model::Load(folder_, options).status(); !status.ok()) {
    EXPECT_NE(status.message().find("activations"), absl::string_view::npos) << status;
    return;
  }
  ModelRunner runner(folder_, 2, options);
  ExpectExactness(runner, shape.lengths, static_cast<uint32_t>(shape.seed));
}

INSTANTIATE_TEST_SUITE_P(Tiny, Shapes, testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace deltamesh
