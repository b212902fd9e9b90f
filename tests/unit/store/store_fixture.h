// Small states with contents that their keys fix, as the exactness law has it, and folders of a test's own.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/base/clock.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/prefix/prefix_hash.h"
#include "runtime/store/state_file.h"
#include "runtime/store/store_types.h"

namespace deltamesh::testing {

class TestFolder {
 public:
  TestFolder() {
    // In memory where that is to be had: these tests are not about the disk's speed.
    for (std::string name : {"/dev/shm/deltamesh-store-XXXXXX", "/tmp/deltamesh-store-XXXXXX"}) {
      if (path.empty() && mkdtemp(name.data()) != nullptr) path = name;
    }
    CHECK(!path.empty(), "no folder for temporary files");
  }
  ~TestFolder() { std::filesystem::remove_all(path); }
  std::string path;
};

class SteppedClock final : public Clock {
 public:
  absl::Time Now() const override { return now; }
  absl::Time now = absl::FromUnixSeconds(1'700'000'000);
};

inline StateLayout TinyLayout() {
  return {
      .kda_layers = 2, .heads = 1, .dim = 4, .conv_taps = 4, .mla_layers = 1, .rank = 3, .rope = 1};
}
inline StateIdentity TinyIdentity() {
  return {.model = PrefixModel("digest", 1), .layout = TinyLayout()};
}

inline std::vector<PrefixKey> PathOfTokens(const std::vector<TokenId>& tokens) {
  PrefixChain chain(TinyIdentity().model, "");
  chain.Append(tokens);
  return chain.keys();
}
// `blocks` blocks, the first `shared` of them the same for every seed.
inline std::vector<PrefixKey> TestPath(uint64_t seed, int64_t blocks, int64_t shared = 0) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < blocks * 64; ++i) {
    tokens.push_back(
        static_cast<TokenId>(i < shared * 64 ? i : i + 1000 * static_cast<int64_t>(seed + 1)));
  }
  return PathOfTokens(tokens);
}

// What the slab at a key, or the latents of the block that a key ends, must hold.
inline std::vector<std::byte> ContentOf(const PrefixKey& key, int64_t bytes, uint64_t what) {
  SeededEntropy random(key.index() + what);
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  for (std::byte& b : out) b = static_cast<std::byte>(random.Next());
  return out;
}

struct TestState {
  explicit TestState(std::vector<PrefixKey> path_of) : path(std::move(path_of)) {
    slab = ContentOf(path.back(), TinyLayout().snapshot_bytes(), 1);
    for (const PrefixKey& key : path)
      latents.push_back(ContentOf(key, TinyLayout().block_bytes(), 2));
  }
  StateSource source(SnapshotKind kind = SnapshotKind::kPromptTail) const {
    StateSource s{.path = path, .kind = kind, .slab = slab, .latents = {}};
    for (const auto& block : latents) s.latents.push_back(block);
    return s;
  }
  std::vector<PrefixKey> path;
  std::vector<std::byte> slab;
  std::vector<std::vector<std::byte>> latents;
};

// Memory for a state, of which the first `have` blocks are held already.
struct TestTarget {
  TestTarget(std::vector<PrefixKey> path_of, int64_t have_blocks = 0)
      : path(std::move(path_of)),
        have(have_blocks),
        slab(static_cast<size_t>(TinyLayout().snapshot_bytes())),
        latents(path.size(),
                std::vector<std::byte>(static_cast<size_t>(TinyLayout().block_bytes()))) {}
  StateTarget target() {
    StateTarget t{.path = path, .slab = slab, .latents = {}};
    for (size_t i = 0; i < path.size(); ++i) {
      t.latents.push_back(static_cast<int64_t>(i) < have ? std::span<std::byte>()
                                                         : std::span(latents[i]));
    }
    return t;
  }
  bool Right() const {
    const TestState right(path);
    return slab == right.slab &&
           std::equal(latents.begin() + have, latents.end(), right.latents.begin() + have);
  }
  std::vector<PrefixKey> path;
  int64_t have;
  std::vector<std::byte> slab;
  std::vector<std::vector<std::byte>> latents;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

}  // namespace deltamesh::testing
