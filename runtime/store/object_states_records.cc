// The records of ObjectStates: conversations, which nothing here removes.
#include <utility>

#include "runtime/base/status.h"
#include "runtime/store/object_states.h"
#include "runtime/store/record_file.h"

namespace deltamesh {
namespace {

constexpr int64_t kRecordObjectBytesMax = kRecordBytesMax + kRecordNameMax + 1024;

std::string RecordObject(std::string_view name) {
  return std::string(kRecordObjects) + RecordFileName(name);
}

}  // namespace

absl::Status ObjectStates::MakeRecordRoom(const std::string& object, int64_t bytes) {
  {
    absl::MutexLock lock(&mu_);
    if (static_cast<int64_t>(records_.size()) >= options_.records_max &&
        !records_.contains(object)) {
      return ResourceExhausted(
          "%s: the bucket holds %d records, all it may; they are conversations and none is removed "
          "for "
          "it: remove the objects of those that are over",
          object, records_.size());
    }
  }
  return MakeRoom(bytes, {});
}

// With one call, so that a record that is being replaced is the old or the new one, never some of both.
absl::StatusOr<std::string> ObjectStates::ReadRecordObject(std::string_view name) {
  ASSIGN_OR_RETURN(const std::string bytes,
                   store_->Get(RecordObject(name), kRecordObjectBytesMax, nullptr));
  PiecesReader reader({std::as_bytes(std::span(bytes))});
  return ReadRecord(reader, name);
}

absl::Status ObjectStates::PutRecord(std::string_view name, std::string_view content,
                                     const RecordStays& stays) {
  RETURN_IF_ERROR(CheckRecord(name, content.size()));
  const std::string object = RecordObject(name), encoded = EncodeRecord(name, content);
  const auto put = [&]() -> absl::Status {
    PiecesReader bytes({std::as_bytes(std::span(encoded))});
    RETURN_IF_ERROR(CheckReplaceable(name, ReadRecordObject(name), stays));
    RETURN_IF_ERROR(MakeRecordRoom(object, bytes.size()));
    return store_->Put(object, bytes, nullptr);
  };
  const absl::Status status = put();
  absl::MutexLock lock(&mu_);
  if (!status.ok()) {
    ++stats_.write_failures;
    return status;
  }
  ++stats_.record_writes;
  Learn({object, static_cast<int64_t>(encoded.size()), clock_->Now()});
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
