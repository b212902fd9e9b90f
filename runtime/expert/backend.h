// Where routed experts are computed: in this process or on shards. The model hands over rows and chosen
// experts and gets one unweighted row per (token, rank); it sums them itself, so the order of the sum does
// not depend on where they were computed.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/base/ids.h"

namespace deltamesh {

// One MoE layer of one step. Pointers stay valid until Finish returned.
struct ExpertBatch {
  int64_t layer;  // 0-based layer of the model
  int64_t tokens, top_k;
  int64_t width;       // values per row
  const float* x;      // [tokens, width]
  const int32_t* ids;  // [tokens, top_k], each below the expert count
  float* out;          // [tokens * top_k, width]
};

// Most requests that one call to a shard names.
inline constexpr size_t kNotedRequestsMax = 64;

// Used by one thread, the one that runs the model.
class ExpertBackend {
 public:
  virtual ~ExpertBackend() = default;

  // Begins the work; returns a ticket, which must be finished whatever happens in between. Until then the
  // caller may compute other things.
  // UNAVAILABLE when some expert has no live shard.
  virtual absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) = 0;

  // Waits for the ticket's results to be in batch.out. UNAVAILABLE when a shard was lost, stayed silent or
  // answered wrong: a part of the mesh that fails is neither the caller's deadline nor its data. The step
  // must then be given up.
  virtual absl::Status Finish(uint64_t ticket) = 0;

  // Rows of this request will be among those of coming batches. Only logs depend on it.
  virtual void Note(const RequestId&) {}
};

}  // namespace deltamesh
