// The records of a DiskStore: conversations, which nothing here removes.
#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/store/disk_store.h"
#include "runtime/store/record_file.h"

namespace deltamesh {
namespace {

constexpr std::string_view kRecordSuffix = ".record";
constexpr std::string_view kMarkSuffix = ".unsent";  // an empty file beside the record

std::string MarkOf(std::string_view record) {
  return RecordFileName(record) + std::string(kMarkSuffix);
}

}  // namespace

std::string DiskStore::NameOf(std::string_view record) {
  return RecordFileName(record) + std::string(kRecordSuffix);
}

int64_t DiskStore::CountRecords(const std::vector<FolderEntry>& entries) {
  return std::count_if(entries.begin(), entries.end(), [](const FolderEntry& entry) {
    return entry.name.ends_with(kRecordSuffix);
  });
}

absl::StatusOr<int64_t> DiskStore::CheckRecordRoom(std::string_view name, int64_t bytes) const {
  ASSIGN_OR_RETURN(const std::vector<FolderEntry> entries, folder_->List());
  RecordRoom room{.records_max = options_.records_max,
                  .bytes_max = std::min(options_.records_bytes_max, options_.bytes_max),
                  .group_share = options_.record_group_share};
  const std::string group = RecordFileName(RecordGroupOf(name));
  for (const FolderEntry& entry : entries) {
    if (!entry.name.ends_with(kRecordSuffix)) continue;
    if (entry.name == NameOf(name)) {
      room.replaced_bytes = entry.bytes;
      continue;
    }
    ++room.records;
    room.bytes += entry.bytes;
    if (group.empty() || !entry.name.starts_with(group)) continue;
    ++room.group_records;
    room.group_bytes += entry.bytes;
  }
  RETURN_IF_ERROR(deltamesh::CheckRecordRoom(name, bytes, room));
  return room.growth(bytes);
}

absl::StatusOr<std::string> DiskStore::ReadRecordFile(std::string_view name) const {
  ASSIGN_OR_RETURN(const auto reader, folder_->OpenFile(NameOf(name)));
  return ReadRecord(*reader, name);
}

absl::Status DiskStore::WriteRecord(std::string_view name, const std::string& bytes,
                                    const RecordStays& stays, bool unsent) {
  ASSIGN_OR_RETURN(const FolderLock lock, folder_->Lock());
  const absl::StatusOr<std::string> there = ReadRecordFile(name);
  RETURN_IF_ERROR(CheckReplaceable(name, there, stays));
  const auto size = static_cast<int64_t>(bytes.size());
  ASSIGN_OR_RETURN(const int64_t growth, CheckRecordRoom(name, size));
  ASSIGN_OR_RETURN(TemporaryFile file, MakeFile(size, growth, {}));
  RETURN_IF_ERROR(file.Write({std::as_bytes(std::span(bytes))}));
  if (unsent) RETURN_IF_ERROR(folder_->Mark(MarkOf(name)));
  RETURN_IF_ERROR(folder_->Commit(std::move(file), NameOf(name), clock_->Now()).status());
  {
    absl::MutexLock counting(&mu_);
    stats_.records += absl::IsNotFound(there.status()) ? 1 : 0;
  }
  // Whoever hears OK forgets the conversation, so a crash must not take this back.
  return folder_->Flush();
}

absl::Status DiskStore::PutRecord(std::string_view name, std::string_view content,
                                  const RecordStays& stays, bool unsent) {
  RETURN_IF_ERROR(CheckRecord(name, content.size()));
  const absl::Status status = WriteRecord(name, EncodeRecord(name, content), stays, unsent);
  absl::MutexLock lock(&mu_);
  ++(status.ok() ? stats_.record_writes : stats_.write_failures);
  stats_.records_refused += absl::IsResourceExhausted(status) ? 1 : 0;
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

std::vector<std::string> DiskStore::Unsent(size_t most) const {
  std::vector<std::string> names;
  const absl::StatusOr<std::vector<FolderEntry>> entries = folder_->List();
  if (!entries.ok()) return names;
  for (const FolderEntry& entry : *entries) {
    if (!entry.name.ends_with(kMarkSuffix)) continue;
    std::string name = RecordNameOf(
        std::string_view(entry.name).substr(0, entry.name.size() - kMarkSuffix.size()));
    if (!name.empty()) names.push_back(std::move(name));
    if (names.size() == most) break;
  }
  return names;
}

bool DiskStore::IsUnsent(std::string_view record) const { return folder_->Has(MarkOf(record)); }

// Under the lock, so that nobody gives the record a new content between the look and the removal.
absl::Status DiskStore::MarkSent(std::string_view name, std::string_view sent) {
  ASSIGN_OR_RETURN(const FolderLock lock, folder_->Lock());
  const absl::StatusOr<std::string> there = ReadRecordFile(name);
  if (there.ok() ? *there != sent : !absl::IsNotFound(there.status())) return absl::OkStatus();
  return folder_->Remove(MarkOf(name));
}

}  // namespace deltamesh
