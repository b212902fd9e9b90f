// JSON files of a checkpoint folder, read strictly: one error naming file, key, value and remedy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace deltamesh {

// The whole file. NOT_FOUND when it is not there, RESOURCE_EXHAUSTED beyond `bytes_max`.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max);

// Parses one JSON value; refuses bad UTF-8 and keys that occur twice in an object. `where` starts
// messages.
absl::StatusOr<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view where);

// Reads keys of one object. The first problem is kept, later reads then return the fallback, so
// callers read everything and ask status() once. `object` must outlive the reader.
class JsonReader {
 public:
  // `where` is the file, `prefix` the path to the object with a trailing dot ("text_config.").
  JsonReader(const nlohmann::json& object, std::string where, std::string prefix);

  const absl::Status& status() const { return status_; }
  // Keeps `status` unless there is one already.
  void Fail(const absl::Status& status);
  // Records "WHERE: PREFIXkey: problem".
  void FailKey(std::string_view key, std::string_view problem);

  // Absent and null are the same.
  bool Has(std::string_view key) const { return Find(key) != nullptr; }
  const nlohmann::json* Find(std::string_view key) const;

  int64_t Int(std::string_view key, int64_t low, int64_t high);  // required
  int64_t IntOr(std::string_view key, int64_t fallback, int64_t low, int64_t high);
  double Number(std::string_view key, double low, double high);  // required
  double NumberOr(std::string_view key, double fallback, double low, double high);
  bool BoolOr(std::string_view key, bool fallback);
  std::string String(std::string_view key);  // required
  std::string StringOr(std::string_view key, std::string_view fallback);
  std::vector<int64_t> Ints(std::string_view key, int64_t low, int64_t high);  // required list
  // A required nested object; an empty one after a failure.
  const nlohmann::json& Object(std::string_view key);

 private:
  const nlohmann::json* Required(std::string_view key);
  std::optional<int64_t> ToInt(std::string_view key, const nlohmann::json& value, int64_t low,
                               int64_t high);

  const nlohmann::json& object_;
  std::string where_;
  std::string prefix_;
  absl::Status status_;
};

}  // namespace deltamesh
