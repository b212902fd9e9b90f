// An expert shard as a process: loads its experts and nothing else, answers calls until a signal.
#pragma once

#include <cstdint>
#include <vector>

#include "services/common/flags.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct ExpertFlags {
  WorkerFlags worker;
  int64_t shard = 0, shards = 1;             // expert e lives on shard e % shards
  std::vector<int32_t> experts;              // hosted instead of those; empty: as above
  int64_t landing_bytes = int64_t{1} << 30;  // rows received and answers not yet sent
  int64_t queue = 256;                       // calls accepted and not yet answered
};
void AddExpertFlags(CLI::App* app, ExpertFlags* flags);

// Returns the exit code. Call on the main thread before any other thread exists.
int RunExpert(ExpertFlags flags);

}  // namespace deltamesh
