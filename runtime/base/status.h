// Status helpers: two macros to pass errors on, one maker per canonical code, and CHECK.
//
// Use a Status for anything a peer, a client, a file or a full pool can cause. Use CHECK for what only
// our own code can cause; it stays on in release builds and stops the process.
//
//   RESOURCE_EXHAUSTED  queue, block pool or slab pool full      (retry elsewhere or later)
//   INVALID_ARGUMENT    malformed request, prompt too long
//   FAILED_PRECONDITION stale epoch, wrong model, wrong layout   (refresh, then retry)
//   UNAVAILABLE         peer gone, draining, no worker for role  (retry elsewhere)
//   NOT_FOUND           lease expired, block evicted             (prefill again)
//   ABORTED             preempted or lost a race                 (retry from the higher step)
//   DATA_LOSS           checksum mismatch                        (drop, count, prefill again)
//   DEADLINE_EXCEEDED / CANCELLED   deadline passed / client left
//   UNIMPLEMENTED       feature absent in this build
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"

namespace deltamesh {

// Abseil packages may be built with a string_view of their own; these convert.
inline absl::string_view ToAbsl(std::string_view s) { return {s.data(), s.size()}; }
inline std::string_view ToStd(absl::string_view s) { return {s.data(), s.size()}; }
inline std::string MessageOf(const absl::Status& s) { return std::string(s.message()); }

// InvalidArgument("top_k: %d is negative; use 0 for no limit", k) and so on.
#define DELTAMESH_STATUS_MAKER(Name, kCode)                                         \
  template <typename... Args>                                                       \
  absl::Status Name(const absl::FormatSpec<Args...>& format, const Args&... args) { \
    return absl::Status(absl::StatusCode::kCode, absl::StrFormat(format, args...)); \
  }
DELTAMESH_STATUS_MAKER(InvalidArgument, kInvalidArgument)
DELTAMESH_STATUS_MAKER(ResourceExhausted, kResourceExhausted)
DELTAMESH_STATUS_MAKER(FailedPrecondition, kFailedPrecondition)
DELTAMESH_STATUS_MAKER(Unavailable, kUnavailable)
DELTAMESH_STATUS_MAKER(NotFound, kNotFound)
DELTAMESH_STATUS_MAKER(Aborted, kAborted)
DELTAMESH_STATUS_MAKER(DataLoss, kDataLoss)
DELTAMESH_STATUS_MAKER(DeadlineExceeded, kDeadlineExceeded)
DELTAMESH_STATUS_MAKER(Cancelled, kCancelled)
DELTAMESH_STATUS_MAKER(Unimplemented, kUnimplemented)
DELTAMESH_STATUS_MAKER(Internal, kInternal)
#undef DELTAMESH_STATUS_MAKER

// The same code with "prefix: " in front of the message. OK stays OK.
absl::Status Annotate(const absl::Status& status, std::string_view prefix);

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& detail);

}  // namespace deltamesh

// CHECK(cond) or CHECK(cond, "format %d", value).
#define CHECK(condition, ...)                                                                    \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::deltamesh::CheckFailed(__FILE__, __LINE__, #condition, absl::StrFormat("" __VA_ARGS__)); \
  } while (false)

#define CHECK_OK(expr)                                             \
  do {                                                             \
    const ::absl::Status dm_check_status = (expr);                 \
    CHECK(dm_check_status.ok(), "%s", dm_check_status.ToString()); \
  } while (false)

#define RETURN_IF_ERROR(expr)          \
  do {                                 \
    ::absl::Status dm_status = (expr); \
    if (!dm_status.ok()) [[unlikely]]  \
      return dm_status;                \
  } while (false)

#define DM_CONCAT_(a, b) a##b
#define DM_CONCAT(a, b) DM_CONCAT_(a, b)
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_(DM_CONCAT(dm_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                      \
  if (!tmp.ok()) [[unlikely]]             \
    return tmp.status();                  \
  lhs = *std::move(tmp)
