// The records of a DiskStore: conversations, which nothing here removes.
#include <utility>

#include "runtime/base/status.h"
#include "runtime/store/disk_store.h"
#include "runtime/store/record_file.h"

namespace deltamesh {
namespace {

constexpr std::string_view kRecordSuffix = ".record";

}  // namespace

std::string DiskStore::NameOf(std::string_view record) {
  return RecordFileName(record) + std::string(kRecordSuffix);
}

absl::Status DiskStore::CheckRecordRoom(std::string_view name, int64_t bytes) const {
  ASSIGN_OR_RETURN(const std::vector<FolderEntry> entries, folder_->List());
  int64_t held = 0, count = 0;
  for (const FolderEntry& entry : entries) {
    if (!entry.name.ends_with(kRecordSuffix) || entry.name == NameOf(name)) continue;
    held += entry.bytes;
    ++count;
  }
  const int64_t most = std::min(options_.records_bytes_max, options_.bytes_max);
  if (count < options_.records_max && held + bytes <= most) return absl::OkStatus();
  return ResourceExhausted(
      "record \"%s\" of %d bytes: the store holds %d other records of %d bytes, and may hold %d of "
      "%d; "
      "they are conversations and none is removed for it: remove the files *.record of those that "
      "are "
      "over, or raise --store-records and --store-gib",
      name, bytes, count, held, options_.records_max, most);
}

absl::StatusOr<std::string> DiskStore::ReadRecordFile(std::string_view name) const {
  ASSIGN_OR_RETURN(const auto reader, folder_->OpenFile(NameOf(name)));
  return ReadRecord(*reader, name);
}

absl::Status DiskStore::WriteRecord(std::string_view name, const std::string& bytes,
                                    const RecordStays& stays) {
  ASSIGN_OR_RETURN(const FolderLock lock, folder_->Lock());
  RETURN_IF_ERROR(CheckReplaceable(name, ReadRecordFile(name), stays));
  const auto size = static_cast<int64_t>(bytes.size());
  RETURN_IF_ERROR(CheckRecordRoom(name, size));
  ASSIGN_OR_RETURN(TemporaryFile file, MakeFile(size, {}));
  RETURN_IF_ERROR(file.Write({std::as_bytes(std::span(bytes))}));
  return folder_->Commit(std::move(file), NameOf(name), clock_->Now()).status();
}

absl::Status DiskStore::PutRecord(std::string_view name, std::string_view content,
                                  const RecordStays& stays) {
  RETURN_IF_ERROR(CheckRecord(name, content.size()));
  const absl::Status status = WriteRecord(name, EncodeRecord(name, content), stays);
  absl::MutexLock lock(&mu_);
  ++(status.ok() ? stats_.record_writes : stats_.write_failures);
  return status;
}

absl::StatusOr<std::string> DiskStore::GetRecord(std::string_view name) {
  RETURN_IF_ERROR(CheckRecord(name, 0));
  absl::StatusOr<std::string> content = ReadRecordFile(name);
  if (absl::IsNotFound(content.status())) return NotFound("no record \"%s\"", name);
  if (!content.ok()) {
    Count(content.status(), NameOf(name));
    return content;
  }
  folder_->Touch(NameOf(name), clock_->Now());
  absl::MutexLock lock(&mu_);
  ++stats_.record_reads;
  return content;
}

}  // namespace deltamesh
