// Strong types for identifiers, so that one kind is never passed for another.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace deltamesh {

using TokenId = int32_t;

// An integer with a name. Tag makes the type distinct.
template <typename Tag>
struct StrongId {
  uint64_t value = 0;
  friend auto operator<=>(const StrongId&, const StrongId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const StrongId& id) {
    return H::combine(std::move(h), id.value);
  }
};

using SequenceId = StrongId<struct SequenceTag>;  // unique within one engine
using TransferId = StrongId<struct TransferTag>;  // unguessable, single use, given by the receiver
using Epoch = StrongId<struct EpochTag>;          // grows each time a worker or a table changes

using RequestId = std::string;  // one id end to end, given by client or router
using WorkerName = std::string;

}  // namespace deltamesh
