// Why stored bytes were not used. A refusal's message begins with its name, so that it reaches logs and
// metrics from wherever it was found.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "runtime/base/status.h"

namespace deltamesh {

enum class StoreRefusal : uint8_t {
  kTruncated,      // ends before its content does, or goes on after it
  kBadMagic,       // no file of ours
  kBadVersion,     // of another format; whoever reads that one may use it
  kBadHeader,      // the header's checksum
  kBadContent,     // the content's checksum
  kWrongName,      // holds another prefix or record than its name says
  kForeignModel,   // of another model; whoever serves that one may use it
  kForeignLayout,  // of another layout of state
  kWrongPath,      // its blocks are not those of the prompt
};
inline constexpr int kStoreRefusals = 9;

inline constexpr std::array<std::string_view, kStoreRefusals> kStoreRefusalNames = {
    "truncated",  "bad_magic",     "bad_version",    "bad_header", "bad_content",
    "wrong_name", "foreign_model", "foreign_layout", "wrong_path"};

inline std::string_view StoreRefusalName(StoreRefusal reason) {
  return kStoreRefusalNames[static_cast<size_t>(reason)];
}

template <typename... Args>
absl::Status Refused(StoreRefusal reason, const absl::FormatSpec<Args...>& format,
                     const Args&... args) {
  return DataLoss("%s: %s", StoreRefusalName(reason), absl::StrFormat(format, args...));
}

inline std::optional<StoreRefusal> RefusalOf(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return std::nullopt;
  const std::string_view message = ToStd(status.message());
  const std::string_view name = message.substr(0, message.find(':'));
  for (size_t i = 0; i < kStoreRefusalNames.size(); ++i) {
    if (kStoreRefusalNames[i] == name) return static_cast<StoreRefusal>(i);
  }
  return std::nullopt;
}

// Files of another model, layout or format are not ours to remove; a state that is refused otherwise is worth
// nothing to anyone.
inline bool IsForeign(StoreRefusal reason) {
  return reason == StoreRefusal::kForeignModel || reason == StoreRefusal::kForeignLayout ||
         reason == StoreRefusal::kBadVersion;
}

}  // namespace deltamesh
