// The format of a record: a small named string of bytes that the store does not look into.
//
//     0  "DMRECRD" 0A                                  8 bytes
//     8  version, bytes of the name                    u32 each
//    16  bytes of the content                          u64
//    24  checksum of the content                       u32
//    28  checksum of bytes 0..27 and the name          u32
//    32  the name, then the content
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "runtime/store/byte_reader.h"
#include "runtime/store/store_types.h"

namespace deltamesh {

inline constexpr std::string_view kRecordMagic = "DMRECRD\n";
inline constexpr uint32_t kRecordFileVersion = 1;

// Asked with the content that a record is about to replace; true: that one stays.
using RecordStays = std::function<bool(std::string_view there)>;

// INVALID_ARGUMENT when the name or the content is too long, or the name empty.
absl::Status CheckRecord(std::string_view name, size_t content_bytes);
// What a record's name becomes where only letters, digits, '-' and '_' are sure to survive: others are
// written as '.' and two hex digits.
std::string RecordFileName(std::string_view name);
// The name whose RecordFileName this is; empty when there is none.
std::string RecordNameOf(std::string_view file_name);

// Records whose names agree up to and with their last '-' are one group's, which may have a share of a store;
// empty: of none.
std::string_view RecordGroupOf(std::string_view name);

// What a group, or all records, hold and may hold, and what is about to be put.
struct RecordRoom {
  int64_t records = 0, bytes = 0;              // but for the one that is replaced
  int64_t group_records = 0, group_bytes = 0;  // of them
  int64_t replaced_bytes = -1;                 // -1: none is
  int64_t records_max = 0, bytes_max = 0;
  double group_share = 1;
  bool in_bucket = false;  // for what to do

  // How many bytes more the store holds once one of `bytes` is there.
  int64_t growth(int64_t bytes) const {
    return std::max<int64_t>(0, bytes - std::max<int64_t>(0, replaced_bytes));
  }
};
// RESOURCE_EXHAUSTED with what to do. One that is replaced by no larger one always fits: whatever the bounds
// were made, a session's record can follow it.
absl::Status CheckRecordRoom(std::string_view name, int64_t bytes, const RecordRoom& room);

std::string EncodeRecord(std::string_view name, std::string_view content);
// Refuses by name what is not the record `name`.
absl::StatusOr<std::string> ReadRecord(ByteReader& reader, std::string_view name);
// Whether what was read in place of `name` (or why it was not) may be replaced: what is damaged may,
// FAILED_PRECONDITION for one of another format, ABORTED for one that `stays`, other errors as they are.
absl::Status CheckReplaceable(std::string_view name, const absl::StatusOr<std::string>& there,
                              const RecordStays& stays);
// Whether it refused because of what is stored, which does not pass by itself.
bool IsForeignRecord(const absl::Status& status);

}  // namespace deltamesh
