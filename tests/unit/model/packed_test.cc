// Packed files: what is served equals what memory holds, and nothing damaged, cut short, stale or
// foreign is ever served.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "runtime/model/digest.h"
#include "runtime/model/weights.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr char kGolden[] = "kimi_k3_tiny";

absl::StatusOr<std::unique_ptr<Weights>> Load(const std::string& folder,
                                              const LoadOptions& options = {}) {
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(folder));
  ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder));
  ASSIGN_OR_RETURN(const std::string source, SourceDigest(*checkpoint));
  return LoadWeights(config, checkpoint, options, source);
}

// A folder for packed files, and notes of what happened.
class Packed : public testing::Test {
 protected:
  Packed() : folder_(testing::TempDir() + "packed-" + std::to_string(getpid())) {
    fs::remove_all(folder_);
    options_.packed.folder = folder_;
    options_.threads = 2;
    options_.note = [this](std::string_view line) { notes_.emplace_back(line); };
  }
  ~Packed() override { fs::remove_all(folder_); }

  std::unique_ptr<Weights> MustLoad() {
    auto weights = Load(GoldenFolder(kGolden), options_);
    CHECK(weights.ok(), "%s", weights.status().ToString());
    return *std::move(weights);
  }
  std::string Build() { return MustLoad()->packed.path; }
  // As root does, or whoever owns the folder.
  static void Damage(const std::string& path, std::string_view content) {
    fs::permissions(path, fs::perms::owner_write, fs::perm_options::add);
    WriteFile(path, content);
  }
  PackedKey Key() const {
    const auto checkpoint = Checkpoint::Open(GoldenFolder(kGolden));
    return {*SourceDigest(**checkpoint), "stored"};
  }

  std::string folder_;
  LoadOptions options_;
  std::vector<std::string> notes_;
};

void ExpectSameMatrix(const PackedMatrix& a, const PackedMatrix& b) {
  ASSERT_EQ(a.rows, b.rows);
  ASSERT_EQ(a.cols, b.cols);
  ASSERT_EQ(a.format, b.format);
  const auto bytes = static_cast<size_t>(kernels::PackedBytes(a.format, a.rows, a.cols));
  ASSERT_EQ(reinterpret_cast<uintptr_t>(b.data) % kPackedPage, 0u);
  ASSERT_EQ(std::memcmp(a.data, b.data, bytes), 0);
}

// Some matrices of each kind.
void ExpectSameWeights(const Weights& memory, const Weights& file) {
  ExpectSameMatrix(memory.lm_head, file.lm_head);
  for (size_t i = 0; i < memory.layers.size(); ++i) {
    const LayerWeights& a = memory.layers[i];
    const LayerWeights& b = file.layers[i];
    if (a.kda.q.data != nullptr) ExpectSameMatrix(a.kda.q, b.kda.q);
    for (size_t h = 0; h < a.mla.wk.size(); ++h) {
      ExpectSameMatrix(a.mla.wk[h], b.mla.wk[h]);
      ExpectSameMatrix(a.mla.wv[h], b.mla.wv[h]);
    }
    for (size_t e = 0; e < memory.experts.layers[i].size(); ++e) {
      ExpectSameMatrix(memory.experts.layers[i][e].gate, file.experts.layers[i][e].gate);
      ExpectSameMatrix(memory.experts.layers[i][e].down, file.experts.layers[i][e].down);
    }
  }
}

TEST_F(Packed, HoldsTheBytesOfMemory) {
  const auto memory = Load(GoldenFolder(kGolden));
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto first = MustLoad();
  EXPECT_TRUE(first->packed.built);
  const auto second = MustLoad();
  EXPECT_FALSE(second->packed.built);
  EXPECT_EQ(second->packed.refused, 0);
  EXPECT_EQ(second->bytes(), first->bytes());
  ExpectSameWeights(**memory, *first);
  ExpectSameWeights(**memory, *second);
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("packing")));
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_FALSE(entry.path().string().ends_with(".partial")) << entry.path();
  }
}

TEST_F(Packed, AShardMapsOnlyItsExperts) {
  Build();
  options_.only_experts = true;
  options_.experts = {ExpertSelection::Kind::kList, {1, 3}};
  LoadOptions in_memory;
  in_memory.only_experts = true;
  in_memory.experts = options_.experts;
  const auto memory = Load(GoldenFolder(kGolden), in_memory);
  const auto shard = MustLoad();
  EXPECT_FALSE(shard->packed.built);
  for (size_t i = 0; i < shard->experts.layers.size(); ++i) {
    for (size_t e = 0; e < shard->experts.layers[i].size(); ++e) {
      const ExpertWeights& held = shard->experts.layers[i][e];
      ASSERT_EQ(held.gate.data != nullptr, e == 1 || e == 3);
      if (held.gate.data != nullptr) {
        ExpectSameMatrix((*memory)->experts.layers[i][e].up, held.up);
      }
    }
  }
}

// Header and directory: every byte. Matrices: a byte of every piece, and their first and last.
TEST_F(Packed, EveryFlippedByteIsRefused) {
  const std::string path = Build();
  const PackedKey key = Key();
  const std::string good = ReadFile(path);
  ASSERT_TRUE(PackedFile::Open(path, key).ok());
  constexpr size_t kHeaderBytes = 128;
  int64_t directory = 0;
  std::memcpy(&directory, good.data() + 104, sizeof(directory));
  const auto refuses = [&](size_t at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 16);
    Damage(path, bad);
    const auto file = PackedFile::Open(path, key);
    if (!file.ok()) {
      EXPECT_TRUE(absl::IsDataLoss(file.status()) || absl::IsFailedPrecondition(file.status()));
      EXPECT_THAT(MessageOf(file.status()), HasSubstr(path));
      return true;
    }
    int damaged = 0;
    for (const PackedEntry& e : (*file)->entries()) {
      for (int64_t p = 0; p < std::ssize(e.pieces); ++p) {
        damaged += (*file)->CheckPiece(e, p).code() == absl::StatusCode::kDataLoss;
      }
    }
    return damaged == 1;
  };
  for (size_t at = 0; at < kHeaderBytes; ++at) ASSERT_TRUE(refuses(at)) << at;
  ASSERT_GT(directory, 1000);
  for (int64_t at = 0; at<directory; at += directory> 20000 ? 13 : 1) {
    ASSERT_TRUE(refuses(static_cast<size_t>(kPackedPage + at))) << at;
  }
  Damage(path, good);
  const auto file = PackedFile::Open(path, key);
  ASSERT_TRUE(file.ok());
  size_t n = 0;
  for (const PackedEntry& e : (*file)->entries()) {
    if (++n % 5 != 0) continue;  // the copies take the time
    for (const int64_t at : {int64_t{0}, e.bytes() / 2, e.bytes() - 1}) {
      ASSERT_TRUE(refuses(static_cast<size_t>(e.offset + at))) << e.name << " " << at;
    }
  }
}

TEST_F(Packed, ADamagedFileIsPackedAgain) {
  const std::string path = Build();
  const std::string good = ReadFile(path);
  std::string flipped = good, longer = good + "x", foreign = good, layout = good;
  flipped[flipped.size() / 2] = static_cast<char>(flipped[flipped.size() / 2] ^ 1);
  foreign[0] = 'X';
  layout[8] = 99;
  const std::pair<std::string, const char*> cases[] = {
      {flipped, "damaged"},           {good.substr(0, good.size() - 1), "its header says"},
      {good.substr(0, 100), "bytes"}, {good.substr(0, 5000), "its header says"},
      {"", "not a packed file"},      {longer, "its header says"},
      {foreign, "wrong magic"},       {layout, "layout"}};
  for (const auto& [bytes, why] : cases) {
    Damage(path, bytes);
    notes_.clear();
    const auto weights = MustLoad();
    EXPECT_TRUE(weights->packed.built) << why;
    EXPECT_EQ(weights->packed.refused, 1) << why;
    EXPECT_THAT(notes_,
                ElementsAre(testing::AllOf(HasSubstr(path), HasSubstr(why), HasSubstr("refused")),
                            HasSubstr("packing")));
    EXPECT_TRUE(ReadFile(path) == good) << why;
  }
}

// Under the name of another model, as after a copy by hand.
TEST_F(Packed, AStaleKeyIsRefused) {
  const std::string path = Build();
  PackedKey other = Key();
  other.digest[0] = other.digest[0] == 'a' ? 'b' : 'a';
  EXPECT_EQ(PackedFile::Open(path, other).status().code(), absl::StatusCode::kFailedPrecondition);
  other = Key();
  other.width = "8bit";
  EXPECT_EQ(PackedFile::Open(path, other).status().code(), absl::StatusCode::kFailedPrecondition);
  CheckpointCopy changed(kGolden);
  changed.EditTensor("language_model.model.norm.weight", [](std::string& bytes) { bytes[0] ^= 1; });
  auto weights = Load(changed.folder(), options_);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_TRUE((*weights)->packed.built);
  const std::string fresh = (*weights)->packed.path;
  EXPECT_NE(fresh, path);
  weights->reset();
  Damage(fresh, ReadFile(path));
  weights = Load(changed.folder(), options_);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ((*weights)->packed.refused, 1);
  EXPECT_TRUE((*weights)->packed.built);
}

TEST_F(Packed, FiveProcessesPackOnce) {
  std::vector<pid_t> children;
  for (int i = 0; i < 5; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      LoadOptions options;
      options.packed.folder = folder_;
      const auto weights = Load(GoldenFolder(kGolden), options);
      _exit(!weights.ok() || (*weights)->packed.path.empty() ? 2
            : (*weights)->packed.built                       ? 1
                                                             : 0);
    }
    children.push_back(child);
  }
  int built = 0;
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) <= 1) << status;
    built += WEXITSTATUS(status);
  }
  EXPECT_EQ(built, 1);
}

// The room that a packer took before it was killed must not stay taken when the same model is packed again.
TEST_F(Packed, WhatAKilledPackerLeftMakesRoom) {
  const std::string path = Build(), left = path + ".77.partial";
  fs::remove(path);
  WriteFile(left, std::string(1000, 'x'));
  options_.packed.required = true;
  options_.packed.free_bytes = [&](const std::string&) {
    return fs::exists(left) ? int64_t{1} << 20 : int64_t{1} << 40;
  };
  EXPECT_EQ(Build(), path);
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(Packed, AFileIsReadOnly) {
  EXPECT_EQ(fs::status(Build()).permissions(),
            fs::perms::owner_read | fs::perms::group_read | fs::perms::others_read);
}

// Neither hangs on it nor takes it for a file.
TEST_F(Packed, APipeInItsPlaceIsRefused) {
  const std::string path = Build();
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(PackedFile::Open(path, Key()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(MustLoad()->packed.path.empty());
  EXPECT_THAT(notes_.back(), HasSubstr("is not a regular file"));
}

// What was read while someone wrote is neither the old model nor the new one.
TEST_F(Packed, ACheckpointChangedWhileItIsPackedIsRefused) {
  CheckpointCopy copy(kGolden);
  const std::string shard = copy.Path(copy.FileOf("language_model.lm_head.weight"));
  options_.progress = [&](int64_t, int64_t) {  // in place, for it is mapped
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  };
  for (const std::string& folder : {folder_, std::string()}) {
    options_.packed.folder = folder;
    const auto weights = Load(copy.folder(), options_);
    EXPECT_EQ(weights.status().code(), absl::StatusCode::kFailedPrecondition) << weights.status();
    EXPECT_THAT(MessageOf(weights.status()),
                testing::AllOf(HasSubstr(shard), HasSubstr("changed")));
  }
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_TRUE(entry.path().string().ends_with(".lock")) << entry.path();
  }
  options_.progress = nullptr;
  options_.packed.folder = folder_;
  EXPECT_TRUE(Load(copy.folder(), options_).ok());
}

// Holds the lock as a process that packs does.
class Holder {
 public:
  explicit Holder(const std::string& path) : fd_(open(path.c_str(), O_RDWR | O_CREAT, 0644)) {
    CHECK(fd_ >= 0 && flock(fd_, LOCK_EX | LOCK_NB) == 0, "%s", path);
  }
  ~Holder() { close(fd_); }
  void Tell(int64_t done, int64_t all) {
    const int64_t news[2] = {done, all};
    CHECK(pwrite(fd_, news, sizeof(news), 0) == sizeof(news));
  }

 private:
  int fd_;
};

TEST_F(Packed, WaitingIsSeenAndEndsWhenTheOtherStops) {
  const std::string path = Build();
  fs::remove(path);
  std::atomic<int64_t> seen{0};
  options_.progress = [&](int64_t done, int64_t all) {
    if (all == 4000) seen = done;
  };
  auto holder = std::make_unique<Holder>(path + ".lock");
  std::thread other([&] {
    for (int64_t i = 1; seen < 3000; ++i) {
      holder->Tell(1000 * std::min<int64_t>(i, 3), 4000);
      absl::SleepFor(absl::Milliseconds(60));
    }
    holder.reset();
  });
  notes_.clear();
  const auto weights = MustLoad();
  other.join();
  EXPECT_TRUE(weights->packed.built);
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("waiting"), HasSubstr("packing")));
}

TEST_F(Packed, WithoutProgressTheWaitEndsInMemory) {
  const std::string path = Build();
  fs::remove(path);
  const Holder holder(path + ".lock");
  options_.packed.patience = absl::Milliseconds(150);
  const auto weights = MustLoad();
  EXPECT_TRUE(weights->packed.path.empty());
  EXPECT_THAT(notes_.back(), HasSubstr("packing in memory"));
  options_.packed.required = true;
  EXPECT_EQ(Load(GoldenFolder(kGolden), options_).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(Packed, WithoutRoomMemoryServes) {
  options_.packed.free_bytes = [](const std::string&) { return int64_t{1} << 20; };
  const auto weights = MustLoad();
  EXPECT_TRUE(weights->packed.path.empty());
  ASSERT_NE(weights->lm_head.data, nullptr);
  ASSERT_EQ(notes_.size(), 1u);
  EXPECT_THAT(notes_[0], HasSubstr("MiB and 64 MiB more that stay free, 1 MiB are free"));
  options_.packed.required = true;
  EXPECT_EQ(Load(GoldenFolder(kGolden), options_).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// Another model's file goes when a new one needs its room, but not while anyone uses it.
TEST_F(Packed, OthersMakeRoomUnlessInUse) {
  options_.packed.bytes_max = 1;
  auto first = MustLoad();
  const std::string path = first->packed.path;
  options_.weights = WeightWidth::k8bit;
  const std::string second = Build();
  EXPECT_TRUE(fs::exists(path));
  EXPECT_TRUE(fs::exists(second));
  first.reset();
  notes_.clear();
  fs::remove(second);
  EXPECT_EQ(Build(), second);
  EXPECT_FALSE(fs::exists(path));
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("removed"), HasSubstr("packing")));
  options_.weights = WeightWidth::kStored;
  EXPECT_TRUE(MustLoad()->packed.built);
}

// A folder that cannot be written serves what it has, and otherwise memory does. (The superuser may
// write anywhere, so the folder is one that cannot exist.)
TEST_F(Packed, WithoutAWritableFolderMemoryServes) {
  WriteFile(folder_, "a file");
  options_.packed.folder = folder_ + "/below";
  const auto weights = MustLoad();
  EXPECT_TRUE(weights->packed.path.empty());
  EXPECT_THAT(notes_, ElementsAre(testing::AllOf(HasSubstr("cannot be created"),
                                                 HasSubstr("packing in memory"))));
}

TEST_F(Packed, AReadOnlyFolderServesWhatItHas) {
  Build();
  notes_.clear();
  fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec);
  const auto weights = MustLoad();
  fs::permissions(folder_, fs::perms::owner_all);
  EXPECT_FALSE(weights->packed.path.empty());
  EXPECT_FALSE(weights->packed.built);
  EXPECT_THAT(notes_, IsEmpty());
}

// Values are checked when they are packed; nothing is left behind then.
TEST_F(Packed, AValueThatIsNotFiniteEndsThePacking) {
  CheckpointCopy copy(kGolden);
  copy.EditTensor("language_model.model.embed_tokens.weight", [](std::string& bytes) {
    bytes[100] = '\x80';
    bytes[101] = '\x7f';
  });
  const auto weights = Load(copy.folder(), options_);
  EXPECT_EQ(weights.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(weights.status()), HasSubstr("not finite"));
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_TRUE(entry.path().string().ends_with(".lock")) << entry.path();
  }
}

TEST(PackedFolders, FollowTheFlag) {
  const std::string golden = GoldenFolder(kGolden);
  EXPECT_EQ(PackedFolder("off", golden), "");
  EXPECT_EQ(PackedFolder("auto", golden), "");  // too small to be worth a file
  EXPECT_EQ(PackedFolder("some/where", golden), "some/where");
  setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(DefaultPackedFolder(golden), "/cache/deltamesh/packed");
  unsetenv("XDG_CACHE_HOME");
  setenv("HOME", "/someone", 1);
  EXPECT_EQ(DefaultPackedFolder(golden), "/someone/.cache/deltamesh/packed");
  unsetenv("HOME");
  EXPECT_EQ(DefaultPackedFolder(golden), golden + "/packed");
}

}  // namespace
}  // namespace deltamesh
