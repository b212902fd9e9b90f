// Reads one state from the files of its chain into memory, and encodes one from memory; the same for every
// tier.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/store/state_file.h"
#include "runtime/store/store_index.h"
#include "runtime/store/store_types.h"

namespace deltamesh {

// A header with its checksums for what `source` holds from block `from` on. `parent`: as in StateHeader.
StateHeader MakeStateHeader(const StateSource& source, const StateIdentity& identity, int64_t from,
                            const PrefixKey& parent);
// The whole file, `encoded_header` first. Points into both.
BytePieces StatePieces(const StateSource& source, const std::string& encoded_header, int64_t from);

struct PartRead {
  absl::Status status;
  PrefixKey file;     // the last one that was opened
  int64_t bytes = 0;  // read, over all files
};

// Fills `target` from `parts` (StoreIndex::Chain): the slab from the first one, latents where the target has
// room for them. Stops with CANCELLED between files and blocks when `cancelled` says so.
PartRead ReadParts(
    std::span<const StoredPart> parts, const StateIdentity& identity, const StateTarget& target,
    const std::function<absl::StatusOr<std::unique_ptr<ByteReader>>(const PrefixKey&)>& open,
    const std::function<bool()>& cancelled);

}  // namespace deltamesh
