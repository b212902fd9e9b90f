#include "runtime/store/state_reader.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// Latents are read in runs of at most so many bytes: a request to an object store costs a round trip, and a
// cancelled read should end soon.
constexpr int64_t kRunBytes = int64_t{32} << 20;

absl::Status CheckPath(const StateHeader& header, const StoredPart& part,
                       std::span<const PrefixKey> path) {
  if (part.begin != header.from || part.end > header.blocks) {
    return NotFound("%s was written anew with blocks %d to %d", part.file.Hex(), header.from,
                    header.blocks);
  }
  for (int64_t block = part.begin; block < part.end; ++block) {
    const PrefixKey& found = header.keys[static_cast<size_t>(block - header.from)];
    if (found != path[static_cast<size_t>(block)]) {
      return Refused(StoreRefusal::kWrongPath, "block %d is %s; the prompt has %s", block,
                     found.Hex(), path[static_cast<size_t>(block)].Hex());
    }
  }
  if (header.from > 0 && header.from_key != path[static_cast<size_t>(header.from - 1)]) {
    return Refused(StoreRefusal::kWrongPath, "it goes on from another prompt at block %d",
                   header.from);
  }
  return absl::OkStatus();
}

// Blocks [begin, end) that the target has room for, in runs without a gap.
absl::Status ReadLatents(ByteReader& reader, const StateHeader& header, const StoredPart& part,
                         const StateTarget& target, const std::function<bool()>& cancelled,
                         int64_t* bytes) {
  for (int64_t block = part.begin; block < part.end;) {
    if (cancelled && cancelled()) return Cancelled("nobody waits for the state");
    if (target.latents[static_cast<size_t>(block)].empty()) {
      ++block;
      continue;
    }
    std::vector<std::span<std::byte>> run;
    int64_t run_bytes = 0;
    const int64_t first = block;
    for (; block < part.end && run_bytes < kRunBytes; ++block) {
      const std::span<std::byte> to = target.latents[static_cast<size_t>(block)];
      if (to.empty()) break;
      run.push_back(to);
      run_bytes += static_cast<int64_t>(to.size());
    }
    RETURN_IF_ERROR(reader.Read(header.block_offset(first), run));
    *bytes += run_bytes;
    for (size_t i = 0; i < run.size(); ++i) {
      const int64_t at = first + static_cast<int64_t>(i);
      if (ChecksumOf(run[i]) != header.checksums[static_cast<size_t>(at - header.from)]) {
        return Refused(StoreRefusal::kBadContent, "the latents of block %d", at);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

StateHeader MakeStateHeader(const StateSource& source, const StateIdentity& identity, int64_t from,
                            const PrefixKey& parent) {
  StateHeader header;
  header.identity = identity;
  header.blocks = static_cast<int64_t>(source.path.size());
  header.from = from;
  header.key = source.path.back();
  if (from > 0) {
    header.parent = parent;
    header.from_key = source.path[static_cast<size_t>(from - 1)];
  }
  header.kind = source.kind;
  header.slab_checksum = ChecksumOf(source.slab);
  CHECK(static_cast<int64_t>(source.slab.size()) == header.slab_bytes(), "a slab of %d bytes",
        source.slab.size());
  for (size_t block = static_cast<size_t>(from); block < source.path.size(); ++block) {
    CHECK(static_cast<int64_t>(source.latents[block].size()) == header.block_bytes(),
          "block %d of %d bytes", block, source.latents[block].size());
    header.keys.push_back(source.path[block]);
    header.checksums.push_back(ChecksumOf(source.latents[block]));
  }
  return header;
}

BytePieces StatePieces(const StateSource& source, const std::string& encoded_header, int64_t from) {
  BytePieces pieces = {std::as_bytes(std::span(encoded_header)), source.slab};
  pieces.insert(pieces.end(), source.latents.begin() + from, source.latents.end());
  return pieces;
}

PartRead ReadParts(
    std::span<const StoredPart> parts, const StateIdentity& identity, const StateTarget& target,
    const std::function<absl::StatusOr<std::unique_ptr<ByteReader>>(const PrefixKey&)>& open,
    const std::function<bool()>& cancelled) {
  PartRead read;
  const auto one = [&](const StoredPart& part, bool first) -> absl::Status {
    ASSIGN_OR_RETURN(const std::unique_ptr<ByteReader> reader, open(part.file));
    ASSIGN_OR_RETURN(const StateHeader header, ReadStateHeader(*reader));
    RETURN_IF_ERROR(CheckStateHeader(header, identity, part.file));
    RETURN_IF_ERROR(CheckPath(header, part, target.path));
    read.bytes += header.header_bytes();
    if (first) {
      if (!target.slab.empty()) RETURN_IF_ERROR(reader->ReadOne(header.slab_offset(), target.slab));
      read.bytes += static_cast<int64_t>(target.slab.size());
      if (ChecksumOf(target.slab) != header.slab_checksum) {
        return Refused(StoreRefusal::kBadContent, "the slab");
      }
    }
    return ReadLatents(*reader, header, part, target, cancelled, &read.bytes);
  };
  for (size_t i = 0; i < parts.size() && read.status.ok(); ++i) {
    // A parent whose latents are all in memory is not opened.
    const auto begin = target.latents.begin() + parts[i].begin,
               end = target.latents.begin() + parts[i].end;
    if (i > 0 && std::all_of(begin, end, [](const auto& to) { return to.empty(); })) continue;
    if (cancelled && cancelled()) {
      read.status = Cancelled("nobody waits for the state");
      break;
    }
    read.file = parts[i].file;
    read.status = one(parts[i], i == 0);
  }
  return read;
}

}  // namespace deltamesh
