// A mesh in which a session's state lies where the next turn is not computed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "runtime/base/log.h"
#include "tests/mesh/compared.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {

class MeshFetchTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kFirst = 200, kAnswer = 70;
  // Where the end of the first turn's answer is kept.
  static constexpr int64_t kHeld = (kFirst + kAnswer - 1) / 64 * 64;

  void SetUp() override { InitLog("test", LogLevel::kError); }

  TestMeshOptions Options() const {
    TestMeshOptions options;
    options.folder = Golden(GetParam());
    options.cache_bytes = int64_t{32} << 20;
    options.decode = 2;
    return options;
  }
  StateLayout layout() const { return SharedModel(Golden(GetParam()), {}).state_layout(); }

  // All say that they compute a thousand tokens of a prompt a second, and each what it pretends.
  void Listen(TestMesh& mesh) {
    mesh.SetLost([this](const std::string& from, mesh::WorkerMessage& message) {
      if (!message.has_heartbeat()) return false;
      message.mutable_heartbeat()->set_prompt_tokens_per_second(1000);
      const auto found = changes_.find(from);
      if (found != changes_.end()) found->second(*message.mutable_heartbeat());
      return false;
    });
  }
  // Its heartbeats say from now on what `change` makes of them.
  using Change = std::function<void(mesh::Heartbeat&)>;
  void Pretend(TestMesh& mesh, const std::string& worker, Change change) {
    changes_[worker] = std::move(change);
    Listen(mesh);
    mesh.RunFor(absl::Seconds(2));  // a worker that has nothing new to say says it seldom
  }
  // It admits nothing new, as far as the router knows.
  void Shun(TestMesh& mesh, const std::string& worker) {
    Pretend(mesh, worker, [](mesh::Heartbeat& beat) { beat.set_draining(true); });
  }
  void Welcome(TestMesh& mesh, const std::string& worker) {
    Pretend(mesh, worker, [](mesh::Heartbeat&) {});
  }

  // A first turn, compared; the next one goes on from it with `tail` tokens. `holder` is who has its state.
  ClientRequest NextTurn(TestMesh& mesh, const std::string& name, int64_t tail, uint64_t seed,
                         std::string* holder) {
    Listen(mesh);
    ClientRequest request = MakeRequest(name + "-1", kFirst, kAnswer, seed);
    request.cache.set_session(seed);
    const Answer answer = AskCompared(mesh, Golden(GetParam()), request);
    mesh.RunFor(absl::Milliseconds(300));  // what was kept is told
    const Decision& d = *mesh.router().decisions().Find(request.request_id, 1).at(0);
    *holder = d.candidates[d.chosen].decode;
    request.request_id = name + "-2";
    request.max_tokens = 9;
    const std::vector<TokenId> more = MakeRequest("", tail, 1, 1000 + seed).prompt;
    request.prompt.insert(request.prompt.end(), answer.tokens.begin(), answer.tokens.end());
    request.prompt.insert(request.prompt.end(), more.begin(), more.end());
    return request;
  }
  static std::string Other(const std::string& decode) {
    return decode == "decode-0" ? "decode-1" : "decode-0";
  }

  static uint64_t Results(TestMesh& mesh, const std::string& reason) {
    for (const auto& [name, count] : mesh.router().counters().fetch_results) {
      if (name == reason) return count;
    }
    return 0;
  }
  static const Decision& Explained(TestMesh& mesh, const std::string& id) {
    return *mesh.router().decisions().Find(id, 1).at(0);
  }

  // The turn ends in time, with the right answer, and without what was refused as `reason`.
  const Decision& ExpectFetchRefused(TestMesh& mesh, const ClientRequest& turn,
                                     const std::string& reason) {
    const absl::Time begin = mesh.now();
    const Answer& answer = AskCompared(mesh, Golden(GetParam()), turn);
    EXPECT_LT(mesh.now() - begin, absl::Seconds(8));
    EXPECT_LT(answer.usage.cached_tokens, kHeld);
    EXPECT_EQ(Results(mesh, reason), 1u);
    EXPECT_EQ(Results(mesh, "OK"), 0u);
    const Decision& d = Explained(mesh, turn.request_id);
    EXPECT_TRUE(d.fetch_refusal.starts_with(reason)) << d.fetch_refusal;
    return d;
  }

  std::map<std::string, Change> changes_;
};

}  // namespace deltamesh::testing
