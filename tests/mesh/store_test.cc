// Prefix caches with a disk below them, in a mesh: what left memory, or its process, comes back from files,
// and the answer keeps the bits of one engine that knows of none of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "runtime/base/log.h"
#include "tests/mesh/compared.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh::testing {
namespace {

namespace fs = std::filesystem;

class MeshStoreTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  TestMeshOptions Options() const {
    TestMeshOptions options;
    options.folder = Golden(GetParam());
    options.cache_bytes = int64_t{32} << 20;
    options.store_folder = folder_.path;
    options.tier.write_after = absl::Milliseconds(200);
    options.tier.check_every = absl::Milliseconds(50);
    options.tier.scan_every = absl::Milliseconds(100);
    return options;
  }

  const Answer& Ask(TestMesh& mesh, const ClientRequest& request) {
    return AskCompared(mesh, Golden(GetParam()), request);
  }
  static double Hits(TestMesh& mesh) {
    return Sample(mesh.prefill("prefill-0").Metrics(), "store_loads_total", "hit") +
           Sample(mesh.decode("decode-0").Metrics(), "store_loads_total", "hit");
  }
  static void RestartWorkers(TestMesh& mesh) {
    for (const char* worker : {"prefill-0", "decode-0"}) {
      mesh.Kill(worker);
      mesh.Restart(worker);
    }
    mesh.Start();
    mesh.RunFor(absl::Seconds(1));
  }

  TestFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Families, MeshStoreTest, ::testing::Values("kimi_k3", "kimi_linear"));

TEST_P(MeshStoreTest, ARestartedMeshRemembersWhatRested) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("a", 300, 6, 8);
  Ask(mesh, request);
  mesh.RunFor(absl::Seconds(1));
  RestartWorkers(mesh);
  request.request_id = "b";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 256);
  EXPECT_EQ(Hits(mesh), 1);
  request.request_id = "c";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 256);
  EXPECT_EQ(Hits(mesh), 1);  // it is in memory again
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// A memory of a few snapshots and a disk of many: everything is found again.
TEST_P(MeshStoreTest, WhatMemoryEvictsIsReadFromDisk) {
  TestMeshOptions options = Options();
  const StateLayout layout = SharedModel(Golden(GetParam()), {}).state_layout();
  options.cache_bytes = 3 * (layout.snapshot_bytes() + 5 * layout.block_bytes());
  TestMesh mesh(options);
  mesh.Start();
  for (uint64_t i = 0; i < 8; ++i) {
    ClientRequest request = MakeRequest(absl::StrFormat("a%d", i), 260, 4, 20 + i);
    EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
    mesh.RunFor(absl::Milliseconds(400));
  }
  for (uint64_t i = 0; i < 8; ++i) {
    ClientRequest request = MakeRequest(absl::StrFormat("b%d", i), 260, 4, 20 + i);
    EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 256) << i;
    mesh.RunFor(absl::Milliseconds(100));
  }
  EXPECT_GE(Hits(mesh), 4);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

TEST_P(MeshStoreTest, DamagedFilesAreRecomputedAndCounted) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("a", 300, 6, 9);
  Ask(mesh, request);
  mesh.RunFor(absl::Seconds(1));
  RestartWorkers(mesh);
  int damaged = 0;
  for (const auto& entry : fs::directory_iterator(folder_.path)) {
    if (entry.path().extension() != ".state") continue;
    std::string bytes = ReadFile(entry.path());
    bytes[bytes.size() - 1] ^= 1;  // content: the header is read again only with it
    WriteFile(entry.path(), bytes);
    ++damaged;
  }
  EXPECT_GT(damaged, 0);
  request.request_id = "b";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  EXPECT_EQ(Hits(mesh), 0);
  const double refused =
      Sample(mesh.prefill("prefill-0").Metrics(), "store_refused_total", "bad_content") +
      Sample(mesh.decode("decode-0").Metrics(), "store_refused_total", "bad_content");
  EXPECT_GE(refused, 1);
}

// Workers that hold nothing share a bucket: routers credit each with what it would read there, and once it is
// gone, behind their backs, with nothing.
TEST_P(MeshStoreTest, ABucketIsCreditedToEveryWorkerThatKnowsIt) {
  MemoryBucket bucket;
  TestMeshOptions options = Options();
  options.store_folder.clear();
  options.bucket = &bucket;
  options.tier.list_every = absl::Milliseconds(100);
  TestMesh mesh(options);
  mesh.Start();
  ClientRequest request = MakeRequest("a", 300, 6, 8);
  Ask(mesh, request);
  mesh.RunFor(absl::Seconds(1));
  EXPECT_FALSE(bucket.objects.empty());
  RestartWorkers(mesh);
  request.request_id = "b";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 256);
  const auto decided = [&] { return *mesh.router().decisions().Last(1).front(); };
  Decision d = decided();
  EXPECT_EQ(d.latent_tokens, 0);
  EXPECT_EQ(d.object_tokens, 256);
  EXPECT_EQ(d.candidates[d.chosen].read_from, ReadFrom::kObjects);
  EXPECT_EQ(d.candidates[d.chosen].cached_tokens, 256);
  EXPECT_GT(d.candidates[d.chosen].read_bytes, 0);
  RestartWorkers(mesh);
  bucket.objects.clear();
  request.request_id = "c";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  EXPECT_EQ(decided().object_tokens, 256) << "as of the last listing";
  bucket.objects.clear();  // what that answer left there
  EXPECT_TRUE(
      mesh.RunUntil([&] { return mesh.router().gauges().prefix_objects == 0; }, absl::Seconds(1)));
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// A request that is cancelled while its state is read leaves nothing behind, and the next one is served.
TEST_P(MeshStoreTest, ACancelledRequestLeavesNothing) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("a", 300, 6, 10);
  Ask(mesh, request);
  mesh.RunFor(absl::Seconds(1));
  RestartWorkers(mesh);
  request.request_id = "b";
  CHECK_OK(mesh.Submit(request));
  mesh.RunUntil(
      [&] { return mesh.prefill("prefill-0").loading() + mesh.decode("decode-0").loading() > 0; },
      absl::Seconds(2));
  mesh.Cancel("b");
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(2)));
  request.request_id = "c";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 256);
}

}  // namespace
}  // namespace deltamesh::testing
