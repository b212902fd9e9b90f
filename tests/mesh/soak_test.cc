// Random requests, cancels, deadlines, damaged messages and lost processes, a run per seed. Whatever ends
// well must be bit-equal to one engine; whatever does not must end; nothing may be held at the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "runtime/base/log.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

// DELTAMESH_SOAK_SEEDS=500 runs that many.
int Seeds() {
  const char* text = std::getenv("DELTAMESH_SOAK_SEEDS");
  return text == nullptr ? 8 : std::atoi(text);
}

class MeshSoakTest : public ::testing::TestWithParam<int> {};

TEST_P(MeshSoakTest, EverythingEndsAndWhatEndsWellIsExact) {
  InitLog("test", LogLevel::kError);
  const auto seed = static_cast<uint64_t>(GetParam());
  SeededEntropy entropy(seed * 1000 + 17);
  auto pick = [&](uint64_t n) { return entropy.Next() % n; };
  TestMeshOptions options;
  options.folder = Golden(seed % 2 == 0 ? "kimi_k3" : "kimi_linear");
  options.shards = static_cast<int>(1 + pick(3));
  options.prefill = 2;
  options.decode = 2;
  options.seed = seed;
  TestMesh mesh(options);
  mesh.Start();
  PlainEngine plain(options.folder);
  mesh.network().SetFault([&](const InprocMessage& message) {
    InprocFault fault;
    const bool handoff = message.type == MessageType::kHandoffSegment;
    if (handoff && pick(400) == 0) fault.flip_payload_byte = static_cast<int64_t>(pick(4096));
    if (handoff && pick(400) == 0) fault.drop = true;
    return fault;
  });

  std::vector<ClientRequest> requests;
  std::vector<RequestId> expected, cancelled;
  for (int i = 0; i < 24; ++i) {
    ClientRequest request =
        MakeRequest(absl::StrFormat("s%d", i), 1 + static_cast<int64_t>(pick(300)),
                    1 + static_cast<int64_t>(pick(24)), pick(1000));
    if (pick(8) == 0) request.deadline = mesh.now() + absl::Milliseconds(10 + pick(200));
    if (mesh.Submit(request).ok()) {
      requests.push_back(request);
      expected.push_back(request.request_id);
    }
    mesh.RunFor(absl::Milliseconds(static_cast<int64_t>(pick(60))));
    if (pick(6) == 0 && !expected.empty()) {
      const RequestId victim = expected[pick(expected.size())];
      if (mesh.Cancel(victim)) {
        cancelled.push_back(victim);
        std::erase(expected, victim);
      }
    }
    if (pick(10) == 0) {
      const std::vector<std::string> names = mesh.names();
      const std::string victim = names[pick(names.size())];
      mesh.Restart(victim);
    }
  }
  ASSERT_TRUE(mesh.RunUntilEnded(expected, absl::Minutes(10)));
  int exact = 0;
  for (const ClientRequest& request : requests) {
    const Answer& answer = mesh.answer(request.request_id);
    const bool was_cancelled =
        std::find(cancelled.begin(), cancelled.end(), request.request_id) != cancelled.end();
    if (was_cancelled || !answer.status.ok()) continue;
    ++exact;
    EXPECT_TRUE(SameAnswer(answer, plain.Run(request)))
        << request.request_id << " " << Describe(answer);
  }
  EXPECT_GT(exact, 5);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

INSTANTIATE_TEST_SUITE_P(Seeds, MeshSoakTest, ::testing::Range(1, Seeds() + 1));

}  // namespace
}  // namespace deltamesh::testing
