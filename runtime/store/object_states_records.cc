// The records of ObjectStates: conversations, which nothing here removes.
#include <utility>

#include "runtime/base/status.h"
#include "runtime/store/object_states.h"
#include "runtime/store/record_file.h"

namespace deltamesh {
namespace {

constexpr int kPutsMax = 3;  // of one record that others put at the same time
constexpr int64_t kRecordObjectBytesMax = kRecordBytesMax + kRecordNameMax + 1024;

std::string RecordObject(std::string_view name) {
  return std::string(kRecordObjects) + RecordFileName(name);
}

}  // namespace

absl::StatusOr<int64_t> ObjectStates::MakeRecordRoom(std::string_view name, int64_t bytes) {
  const std::string object = RecordObject(name);
  RecordRoom room{.records_max = options_.records_max,
                  .bytes_max = options_.bytes_max,
                  .group_share = options_.record_group_share,
                  .in_bucket = true};
  {
    absl::MutexLock lock(&mu_);
    room.records = static_cast<int64_t>(records_.size());
    room.bytes = record_bytes_;
    if (const auto group = groups_.find(std::string(RecordGroupOf(object)));
        group != groups_.end()) {
      room.group_records = group->second.records;
      room.group_bytes = group->second.bytes;
    }
    if (const auto replaced = records_.find(object); replaced != records_.end()) {
      room.replaced_bytes = replaced->second.bytes;
      --room.records;
      room.bytes -= room.replaced_bytes;
      --room.group_records;
      room.group_bytes -= room.replaced_bytes;
    }
  }
  RETURN_IF_ERROR(CheckRecordRoom(name, bytes, room));
  RETURN_IF_ERROR(MakeRoom(for_records(), room.growth(bytes)));
  return room.growth(bytes);
}

// With one call, so that a record that is being replaced is the old or the new one, never some of both.
absl::StatusOr<std::string> ObjectStates::ReadRecordObject(std::string_view name,
                                                           std::string* version) {
  ASSIGN_OR_RETURN(
      const std::string bytes,
      for_records().Get(RecordObject(name), kRecordObjectBytesMax, nullptr, version, kRecordMagic));
  PiecesReader reader({std::as_bytes(std::span(bytes))});
  return ReadRecord(reader, name);
}

// Between the look and the put another worker may put a newer one: then what is there is looked at again.
absl::Status ObjectStates::PutRecordOnce(std::string_view name, const std::string& encoded,
                                         const RecordStays& stays, bool* raced) {
  std::string version;
  const absl::StatusOr<std::string> there = ReadRecordObject(name, &version);
  RETURN_IF_ERROR(CheckReplaceable(name, there, stays));
  PiecesReader bytes({std::as_bytes(std::span(encoded))});
  ASSIGN_OR_RETURN(const int64_t room, MakeRecordRoom(name, bytes.size()));
  ObjectStore& store = for_records();
  const std::string object = RecordObject(name);
  const absl::Status put = absl::IsNotFound(there.status()) || !version.empty()
                               ? store.PutIf(object, bytes, version, nullptr)
                               : store.Put(object, bytes, nullptr);
  absl::MutexLock lock(&mu_);
  being_put_ -= room;
  if (put.ok()) {
    const ObjectInfo info = {object, bytes.size(), clock_->Now()};
    Learn(info);
    if (put_meanwhile_) put_meanwhile_->push_back(info);
  }
  *raced = absl::IsAborted(put);
  return *raced ? Unavailable("%s", MessageOf(put)) : put;
}

absl::Status ObjectStates::PutRecord(std::string_view name, std::string_view content,
                                     const RecordStays& stays) {
  RETURN_IF_ERROR(CheckRecord(name, content.size()));
  const std::string encoded = EncodeRecord(name, content);
  absl::Status status;
  bool raced = true;
  int tries = 0;
  for (; tries < kPutsMax && raced; ++tries) {
    raced = false;
    status = PutRecordOnce(name, encoded, stays, &raced);
  }
  // What lost a race may be what was put here, when the answer to that was lost: so nobody may take this
  // record for one that was not written, unless another's was found in its place.
  const bool no_room = absl::IsResourceExhausted(status);
  const bool says_undone = no_room || absl::IsFailedPrecondition(status);
  if (tries > 1 && says_undone && !IsForeignRecord(status)) {
    status = Unavailable("%s; it may have been put before", MessageOf(status));
  }
  absl::MutexLock lock(&mu_);
  if (!status.ok()) {
    ++stats_.write_failures;
    stats_.records_refused += no_room ? 1 : 0;
    return status;
  }
  ++stats_.record_writes;
  return absl::OkStatus();
}

absl::StatusOr<std::string> ObjectStates::GetRecord(std::string_view name) {
  RETURN_IF_ERROR(CheckRecord(name, 0));
  const std::string object = RecordObject(name);
  absl::StatusOr<std::string> content = ReadRecordObject(name);
  if (absl::IsNotFound(content.status())) return NotFound("no record \"%s\"", name);
  if (!content.ok()) {
    Count(content.status(), object);
    return content;
  }
  absl::MutexLock lock(&mu_);
  ++stats_.record_reads;
  if (const auto known = records_.find(object); known != records_.end()) {
    known->second.used = clock_->Now();
  }
  return content;
}

}  // namespace deltamesh
