// The format of a record: a small named string of bytes that the store does not look into.
//
//     0  "DMRECRD" 0A                                  8 bytes
//     8  version, bytes of the name                    u32 each
//    16  bytes of the content                          u64
//    24  checksum of the content                       u32
//    28  checksum of bytes 0..27 and the name          u32
//    32  the name, then the content
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "runtime/store/byte_reader.h"
#include "runtime/store/store_types.h"

namespace deltamesh {

inline constexpr uint32_t kRecordFileVersion = 1;

// INVALID_ARGUMENT when the name or the content is too long, or the name empty.
absl::Status CheckRecord(std::string_view name, size_t content_bytes);
// What a record's name becomes where only letters, digits, '-' and '_' are sure to survive: others are
// written as '.' and two hex digits.
std::string RecordFileName(std::string_view name);
// The name whose RecordFileName this is; empty when there is none.
std::string RecordNameOf(std::string_view file_name);

std::string EncodeRecord(std::string_view name, std::string_view content);
// Refuses by name what is not the record `name`.
absl::StatusOr<std::string> ReadRecord(ByteReader& reader, std::string_view name);

}  // namespace deltamesh
