#include "runtime/store/record_file.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <vector>

#include "runtime/base/crc32c.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int64_t kFixedBytes = 32;
constexpr char kForeignPayload[] = "deltamesh.store.foreign-record";

bool Plain(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
         c == '_';
}

template <typename T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T At(const std::vector<std::byte>& bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

uint32_t HeaderChecksum(std::span<const std::byte> fixed28, std::string_view name) {
  return Crc32c(std::as_bytes(std::span(name)), Crc32c(fixed28));
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

absl::Status CheckRecord(std::string_view name, size_t content_bytes) {
  if (name.empty() || name.size() > static_cast<size_t>(kRecordNameMax)) {
    return InvalidArgument("record: a name of %d bytes; use 1 to %d", name.size(), kRecordNameMax);
  }
  if (content_bytes > static_cast<size_t>(kRecordBytesMax)) {
    return InvalidArgument("record \"%s\": %d bytes; at most %d", name, content_bytes,
                           kRecordBytesMax);
  }
  return absl::OkStatus();
}

std::string RecordFileName(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (Plain(c)) {
      out += c;
    } else {
      out += absl::StrFormat(".%02x", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string RecordNameOf(std::string_view file_name) {
  std::string out;
  for (size_t i = 0; i < file_name.size(); ++i) {
    if (Plain(file_name[i])) {
      out += file_name[i];
      continue;
    }
    if (file_name[i] != '.' || i + 2 >= file_name.size()) return "";
    const int high = HexDigit(file_name[i + 1]), low = HexDigit(file_name[i + 2]);
    if (high < 0 || low < 0) return "";
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

std::string_view RecordGroupOf(std::string_view name) {
  const size_t dash = name.rfind('-');
  return dash == std::string_view::npos ? std::string_view() : name.substr(0, dash + 1);
}

absl::Status CheckRecordRoom(std::string_view name, int64_t bytes, const RecordRoom& room) {
  const auto share = [&room](int64_t of) {
    return std::max<int64_t>(1, static_cast<int64_t>(room.group_share * static_cast<double>(of)));
  };
  const bool adds = room.replaced_bytes<0, grows = bytes> room.replaced_bytes;
  constexpr char kNone[] = "they are conversations and none is removed for it";
  if ((adds && room.records >= room.records_max) ||
      (grows && room.bytes + bytes > room.bytes_max)) {
    return ResourceExhausted(
        "record \"%s\" of %d bytes: the %s holds %d other records of %d bytes, and may hold %d of "
        "%d; %s: remove the %s of those that are over, or raise %s",
        name, bytes, room.in_bucket ? "bucket" : "folder", room.records, room.bytes,
        room.records_max, room.bytes_max, kNone,
        room.in_bucket ? "objects records/*" : "files *.record",
        room.in_bucket ? "--store-s3-records and --store-s3-gib"
                       : "--store-records and --store-gib");
  }
  const std::string_view group = RecordGroupOf(name);
  if (group.empty()) return absl::OkStatus();
  if ((adds && room.group_records >= share(room.records_max)) ||
      (grows && room.group_bytes + bytes > share(room.bytes_max))) {
    return ResourceExhausted(
        "record \"%s\" of %d bytes: its tenant has %d other records of %d bytes in the %s, and may "
        "have %d of %d; %s: remove the %s%s*%s of those that are over, or raise "
        "--store-tenant-share",
        name, bytes, room.group_records, room.group_bytes, room.in_bucket ? "bucket" : "folder",
        share(room.records_max), share(room.bytes_max), kNone,
        room.in_bucket ? "objects records/" : "files ", group, room.in_bucket ? "" : ".record");
  }
  return absl::OkStatus();
}

std::string EncodeRecord(std::string_view name, std::string_view content) {
  std::string out(kRecordMagic);
  Append<uint32_t>(out, kRecordFileVersion);
  Append<uint32_t>(out, static_cast<uint32_t>(name.size()));
  Append<uint64_t>(out, content.size());
  Append<uint32_t>(out, Crc32c(std::as_bytes(std::span(content))));
  Append<uint32_t>(out, HeaderChecksum(std::as_bytes(std::span(out)), name));
  out += name;
  out += content;
  return out;
}

absl::StatusOr<std::string> ReadRecord(ByteReader& reader, std::string_view name) {
  const int64_t size = reader.size();
  if (size < kFixedBytes)
    return Refused(StoreRefusal::kTruncated, "%d bytes, less than a header", size);
  std::vector<std::byte> fixed(static_cast<size_t>(kFixedBytes));
  RETURN_IF_ERROR(reader.ReadOne(0, fixed));
  if (std::memcmp(fixed.data(), kRecordMagic.data(), kRecordMagic.size()) != 0) {
    return Refused(StoreRefusal::kBadMagic, "it does not begin with DMRECRD");
  }
  if (const auto version = At<uint32_t>(fixed, 8); version != kRecordFileVersion) {
    return Refused(StoreRefusal::kBadVersion, "version %d; this reads %d", version,
                   kRecordFileVersion);
  }
  const auto name_bytes = static_cast<int64_t>(At<uint32_t>(fixed, 12));
  const auto content_bytes = At<uint64_t>(fixed, 16);
  if (name_bytes > kRecordNameMax || content_bytes > static_cast<uint64_t>(kRecordBytesMax)) {
    return Refused(StoreRefusal::kBadHeader, "a name of %d bytes, a content of %d", name_bytes,
                   content_bytes);
  }
  if (size != kFixedBytes + name_bytes + static_cast<int64_t>(content_bytes)) {
    return Refused(StoreRefusal::kTruncated, "%d bytes; the header says %d", size,
                   kFixedBytes + name_bytes + static_cast<int64_t>(content_bytes));
  }
  std::string found(static_cast<size_t>(name_bytes), 0),
      content(static_cast<size_t>(content_bytes), 0);
  const std::span<std::byte> both[] = {std::as_writable_bytes(std::span(found)),
                                       std::as_writable_bytes(std::span(content))};
  RETURN_IF_ERROR(reader.Read(kFixedBytes, both));
  if (HeaderChecksum(std::span(fixed).first(28), found) != At<uint32_t>(fixed, 28)) {
    return Refused(StoreRefusal::kBadHeader, "the header's checksum");
  }
  if (found != name) {
    return Refused(StoreRefusal::kWrongName, "it holds \"%s\" and is named \"%s\"", found, name);
  }
  if (Crc32c(std::as_bytes(std::span(content))) != At<uint32_t>(fixed, 24)) {
    return Refused(StoreRefusal::kBadContent, "the content's checksum");
  }
  return content;
}

absl::Status CheckReplaceable(std::string_view name, const absl::StatusOr<std::string>& there,
                              const RecordStays& stays) {
  if (there.ok()) {
    if (stays == nullptr || !stays(*there)) return absl::OkStatus();
    return Aborted("record \"%s\": a newer one is stored", name);
  }
  if (absl::IsNotFound(there.status())) return absl::OkStatus();
  const std::optional<StoreRefusal> refusal = RefusalOf(there.status());
  if (!refusal) return there.status();
  if (!IsForeign(*refusal)) return absl::OkStatus();
  absl::Status status = FailedPrecondition(
      "record \"%s\": what is stored is of another format (%s); it is left as it is", name,
      ToStd(there.status().message()));
  status.SetPayload(kForeignPayload, absl::Cord("1"));
  return status;
}

bool IsForeignRecord(const absl::Status& status) {
  return status.GetPayload(kForeignPayload).has_value();
}

}  // namespace deltamesh
