// The fixed sentences of K3's chat format, which the operator supplies in chat_literals.json.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/status.h"

namespace deltamesh {

// Immutable and thread-safe once loaded.
class K3Literals {
 public:
  // A missing file or key is an error only for requests that need it; a malformed one is an error now.
  static absl::StatusOr<K3Literals> Load(const std::filesystem::path& folder);

  // The literal `key` with `value` in its hole. `field` is the request's field that needs it.
  absl::StatusOr<std::string> Fill(std::string_view key, std::string_view value,
                                   std::string_view field) const;
  // A literal without a hole.
  absl::StatusOr<std::string> Get(std::string_view key, std::string_view field) const;

 private:
  std::string file_;
  std::map<std::string, std::string, std::less<>> texts_;
};

}  // namespace deltamesh
