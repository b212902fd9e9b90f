// Fetches of states that only the holder's disk has: it reads them first, and the answer keeps the bits of an
// engine that knows of none of it. What cannot be read is refused, and the prompt goes where it is computed
// best.
#include <filesystem>

#include "tests/mesh/fetch_fixture.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh::testing {
namespace {

namespace fs = std::filesystem;

class ColdFetchTest : public MeshFetchTest {
 protected:
  TestMeshOptions ColdOptions() const {
    TestMeshOptions options = Options();
    options.store_folder = folder_.path;
    options.store_each = true;  // what the others cannot read themselves
    options.tier.write_after = absl::Milliseconds(200);
    options.tier.check_every = absl::Milliseconds(50);
    options.tier.scan_every = absl::Milliseconds(100);
    options.tier.load_max = absl::Seconds(2);
    options.fetch.whole_max = absl::Seconds(5);
    options.router.disaggregation = Disaggregation::kNever;
    return options;
  }
  // The state of a session's first turn lies on its holder's disk only, and another one computes the next.
  ClientRequest ColdTurn(TestMesh& mesh, const std::string& name, int64_t tail, uint64_t seed,
                         std::string* holder) {
    const ClientRequest turn = NextTurn(mesh, name, tail, seed, holder);
    GoCold(mesh, *holder);
    Shun(mesh, *holder);
    return turn;
  }
  void GoCold(TestMesh& mesh, const std::string& holder) {
    mesh.RunFor(absl::Seconds(1));
    mesh.cache(holder).Clear();
    mesh.RunFor(absl::Milliseconds(300));
  }
  void ExpectRefused(TestMesh& mesh, const ClientRequest& turn, const std::string& holder,
                     const std::string& reason) {
    const Decision& d = ExpectFetchRefused(mesh, turn, reason);
    EXPECT_EQ(d.placements, 2);
    EXPECT_EQ(Sample(mesh.decode(holder).Metrics(), "fetches_served_total", reason), 1);
    EXPECT_EQ(Sample(mesh.decode(holder).Metrics(), "fetches_read_total"), 0);
    mesh.SetStuckDisk(holder, false);
    EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(12)));
  }
  std::vector<fs::path> FilesOf(const std::string& worker) const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder_.path + "/" + worker)) {
      if (entry.path().extension() == ".state") files.push_back(entry.path());
    }
    EXPECT_FALSE(files.empty());
    return files;
  }
  TestFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Families, ColdFetchTest, ::testing::Values("kimi_k3", "kimi_linear"));

// For tails of many lengths, with other sequences in both workers' batches.
TEST_P(ColdFetchTest, ADecodeWorkerGoesOnFromAnothersDisk) {
  TestMesh mesh(ColdOptions());
  mesh.Start();
  PlainEngine plain(Golden(GetParam()));
  int turns = 0;
  for (const int64_t tail : {1, 16, 57, 58, 63, 64, 65, 100}) {
    std::string holder;
    const uint64_t seed = 130 + static_cast<uint64_t>(turns);
    const ClientRequest turn = ColdTurn(mesh, absl::StrFormat("s%d", turns), tail, seed, &holder);
    const ClientRequest other = MakeRequest(absl::StrFormat("other-%d", turns), 90, 30, 300 + seed);
    CHECK_OK(mesh.Submit(other));
    mesh.RunFor(absl::Milliseconds(30));
    const Answer& answer = AskCompared(mesh, Golden(GetParam()), turn);
    EXPECT_EQ(answer.usage.cached_tokens, kHeld) << tail;
    ASSERT_TRUE(mesh.RunUntilEnded({other.request_id}));
    EXPECT_TRUE(SameAnswer(mesh.answer(other.request_id), plain.Run(other))) << tail;
    const Decision& d = Explained(mesh, turn.request_id);
    EXPECT_EQ(d.candidates[d.chosen].fetch_from, holder);
    EXPECT_TRUE(d.candidates[d.chosen].fetch_cold);
    EXPECT_EQ(d.fetched_from, holder);
    EXPECT_EQ(d.fetched_tokens, kHeld);
    Welcome(mesh, holder);
    ++turns;
  }
  EXPECT_EQ(Results(mesh, "OK"), static_cast<uint64_t>(turns));
  double read = 0;
  for (const char* worker : {"decode-0", "decode-1"}) {
    read += Sample(mesh.decode(worker).Metrics(), "fetches_read_total");
  }
  EXPECT_EQ(read, turns);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// It hands over what it fetched from the disk of the very worker that it hands over to.
TEST_P(ColdFetchTest, APrefillWorkerGoesOnFromADecodeWorkersDisk) {
  TestMeshOptions options = ColdOptions();
  options.decode = 1;
  options.router.disaggregation = Disaggregation::kAlways;
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  const ClientRequest turn = NextTurn(mesh, "s", 130, 150, &holder);
  GoCold(mesh, holder);
  EXPECT_EQ(AskCompared(mesh, Golden(GetParam()), turn).usage.cached_tokens, kHeld);
  const Decision& d = Explained(mesh, turn.request_id);
  EXPECT_EQ(d.candidates[d.chosen].prefill, "prefill-0");
  EXPECT_EQ(d.candidates[d.chosen].fetch_from, "decode-0");
  EXPECT_TRUE(d.candidates[d.chosen].fetch_cold);
  EXPECT_EQ(Results(mesh, "OK"), 1u);
}

// A disk that is slow, as its worker has learned, is left alone where computing is quicker.
TEST_P(ColdFetchTest, ASlowDiskIsNotRead) {
  TestMesh mesh(ColdOptions());
  mesh.Start();
  std::string holder;
  const ClientRequest turn = ColdTurn(mesh, "s", 40, 161, &holder);
  Pretend(mesh, holder, [](mesh::Heartbeat& b) {
    b.set_draining(true);
    b.set_store_bytes_per_second(10);
  });
  AskCompared(mesh, Golden(GetParam()), turn);
  EXPECT_EQ(mesh.router().counters().fetch_results.size(), 0u);
}

TEST_P(ColdFetchTest, ADamagedFile) {
  TestMesh mesh(ColdOptions());
  mesh.Start();
  std::string holder;
  const ClientRequest turn = ColdTurn(mesh, "s", 45, 171, &holder);
  for (const fs::path& file : FilesOf(holder)) {
    std::string bytes = ReadFile(file);
    bytes[bytes.size() - 1] ^= 1;
    WriteFile(file, bytes);
  }
  ExpectRefused(mesh, turn, holder, "NOT_HELD");
  EXPECT_GE(Sample(mesh.decode(holder).Metrics(), "store_refused_total", "bad_content"), 1);
}

TEST_P(ColdFetchTest, AFileThatIsGone) {
  TestMeshOptions options = ColdOptions();
  options.tier.scan_every = absl::Hours(1);  // nobody has noticed
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  const ClientRequest turn = ColdTurn(mesh, "s", 45, 173, &holder);
  for (const fs::path& file : FilesOf(holder)) fs::remove(file);
  ExpectRefused(mesh, turn, holder, "NOT_HELD");
}

TEST_P(ColdFetchTest, ADiskThatDoesNotAnswerInTime) {
  TestMesh mesh(ColdOptions());
  mesh.Start();
  std::string holder;
  const ClientRequest turn = ColdTurn(mesh, "s", 45, 175, &holder);
  mesh.SetStuckDisk(holder, true);
  ExpectRefused(mesh, turn, holder, "NOT_HELD");
  EXPECT_EQ(Sample(mesh.decode(holder).Metrics(), "store_loads_total", "late"), 1);
}

TEST_P(ColdFetchTest, TooManyAreBeingRead) {
  TestMeshOptions options = ColdOptions();
  options.tier.loads_max = 0;
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  const ClientRequest turn = ColdTurn(mesh, "s", 45, 177, &holder);
  ExpectRefused(mesh, turn, holder, "BUSY");
}

// Both ends give everything back, and what nobody waits for any more is not read.
TEST_P(ColdFetchTest, ACancelWhileItIsRead) {
  TestMesh mesh(ColdOptions());
  mesh.Start();
  std::string holder;
  const ClientRequest turn = ColdTurn(mesh, "s", 45, 179, &holder);
  mesh.SetStuckDisk(holder, true);
  CHECK_OK(mesh.Submit(turn));
  ASSERT_TRUE(
      mesh.RunUntil([&] { return Sample(mesh.decode(holder).Metrics(), "fetches_serving") == 1; },
                    absl::Seconds(1)));
  mesh.Cancel(turn.request_id);
  mesh.RunFor(absl::Seconds(1));
  EXPECT_EQ(Sample(mesh.decode(holder).Metrics(), "fetches_serving"), 0);
  mesh.SetStuckDisk(holder, false);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
  EXPECT_EQ(Sample(mesh.decode(holder).Metrics(), "store_loads_total", "cancelled"), 1);
  EXPECT_EQ(Sample(mesh.decode(holder).Metrics(), "store_loads_total", "hit"), 0);
}

}  // namespace
}  // namespace deltamesh::testing
