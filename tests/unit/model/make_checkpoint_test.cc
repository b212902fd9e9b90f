// The generator's output is a checkpoint both for us and for the oracle, and the same options give
// the same files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <sstream>

#include "runtime/base/checkpoint_marks.h"
#include "runtime/base/status.h"
#include "runtime/model/digest.h"
#include "runtime/model/weights.h"
#include "services/cli/inspect.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

using testing::HasSubstr;

struct Output {
  int status;
  std::string text;  // stdout and stderr
};

Output RunPython(const std::string& arguments) {
  const std::string command = std::string(DELTAMESH_PYTHON) + " -B " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  CHECK(pipe != nullptr, "%s", command);
  Output output;
  char buffer[4096];
  while (const size_t n = fread(buffer, 1, sizeof(buffer), pipe)) output.text.append(buffer, n);
  output.status = WEXITSTATUS(pclose(pipe));
  return output;
}

// A folder of its own that goes with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "deltamesh-make-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr, "%s", pattern);
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Output Make(const std::string& folder, const std::string& options) {
  return RunPython(std::string(DELTAMESH_SOURCE_DIR) + "/tools/make_checkpoint.py --out " + folder +
                   " " + options);
}

struct Shape {
  const char* name;
  const char* options;
};

class MakeCheckpoint : public testing::TestWithParam<Shape> {};

TEST_P(MakeCheckpoint, LoadsHereAndInTheOracle) {
  TempFolder folder;
  const Output made = Make(folder.path(), GetParam().options);
  ASSERT_EQ(made.status, 0) << made.text;
  const absl::StatusOr<ModelConfig> config = ModelConfig::Load(folder.path());
  ASSERT_TRUE(config.ok()) << config.status();
  auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto weights = LoadWeights(*config, *checkpoint, {});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_TRUE(HasRandomWeights(folder.path()));

  std::ostringstream text;
  const absl::Status inspected = RunInspect(folder.path(), text);
  ASSERT_TRUE(inspected.ok()) << inspected;
  EXPECT_THAT(text.str(), HasSubstr("family        " + config->family));
  EXPECT_THAT(text.str(), HasSubstr("WEIGHTS ARE RANDOM"));
  EXPECT_THAT(text.str(), HasSubstr(ModelDigest(**checkpoint).value()));

  const Output oracle =
      RunPython(std::string(DELTAMESH_SOURCE_DIR) + "/tests/data/reference.py logits " +
                folder.path() + " --tokens 1,2,3");
  EXPECT_EQ(oracle.status, 0) << oracle.text;
  EXPECT_THAT(oracle.text, testing::StartsWith("2 "));
  EXPECT_THAT(oracle.text, testing::Not(HasSubstr("nan")));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MakeCheckpoint,
    testing::Values(
        Shape{"DefaultK3", ""}, Shape{"DefaultLinear", "--family kimi_linear"},
        Shape{"OddK3",
              "--hidden 80 --layers 4 --full 2,4 --kda-heads 3 --kda-dim 24 --heads 3 "
              "--nope 12 --rope 6 --vdim 20 --q-lora 0 --kv-lora 40 --latent 0 --hidden 96 "
              "--block 0 --merges 64 --experts 5 --topk 2 --moe-inter 32 --shards 1"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(MakeCheckpointTool, TheSameOptionsGiveTheSameFiles) {
  TempFolder a, b, c;
  const std::string options = "--layers 4 --full 4 --merges 100 --seed ";
  ASSERT_EQ(Make(a.path(), options + "5").status, 0);
  ASSERT_EQ(Make(b.path(), options + "5").status, 0);
  ASSERT_EQ(Make(c.path(), options + "6").status, 0);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(a.path())) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(ReadFile(a.path() + "/" + name), ReadFile(b.path() + "/" + name)) << name;
    ++files;
  }
  EXPECT_EQ(files, 10);
  const auto digest = [](const TempFolder& folder) {
    return ModelDigest(**Checkpoint::Open(folder.path())).value();
  };
  EXPECT_EQ(digest(a), digest(b));
  EXPECT_NE(digest(a), digest(c));
}

TEST(MakeCheckpointTool, ImpossibleSizesAreRefusedByName) {
  TempFolder folder;
  const Output output = Make(folder.path(), "--latent 100 --topk 99");
  EXPECT_EQ(output.status, 1);
  EXPECT_THAT(output.text, HasSubstr("--topk 99: use 1 to --experts (16)"));
  EXPECT_THAT(output.text, HasSubstr("--latent: 100 is no multiple of 32"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Inspect, SaysWhatTheGoldenCheckpointHolds) {
  std::ostringstream out;
  const absl::Status status = RunInspect(GoldenFolder("kimi_k3_tiny"), out);
  ASSERT_TRUE(status.ok()) << status;
  for (const char* line :
       {"family        kimi_k3\n", "layers        5: 3 KDA, 2 MLA; 1 dense, 4 MoE\n",
        "schedule      1 KDA dense, 2 KDA, 2 MLA\n",
        "experts       12 per layer, 4 chosen, 2 shared", "context       1,048,576 tokens\n",
        "vocabulary    768\n", "not loaded    544 bytes in 2 tensors of the image path\n",
        "latents       320 bytes per token, 20,480 per block of 64 tokens\n"}) {
    EXPECT_THAT(out.str(), HasSubstr(line));
  }
  EXPECT_THAT(out.str(), testing::Not(HasSubstr("RANDOM")));
}

TEST(Inspect, PrintsNothingForADamagedCheckpoint) {
  CheckpointCopy copy("kimi_k3_tiny");
  copy.Remove("model-00002-of-000002.safetensors");
  std::ostringstream out;
  EXPECT_EQ(RunInspect(copy.folder(), out).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace deltamesh
