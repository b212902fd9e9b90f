// JSON at the edges of the text layer: bounded parsing, and printing byte for byte as Python does.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "nlohmann/json.hpp"
#include "runtime/base/status.h"

namespace deltamesh {

// Objects keep the order in which their keys were given, as Python's dict does.
using Json = nlohmann::ordered_json;

// Deeper nesting is refused before parsing, so that no walk over a value can exhaust the stack.
inline constexpr int kMaxJsonDepth = 128;
// An object of this many keys is taken, or several that cost as much together: each key of an ordered object
// is compared with all before it, so that larger ones could keep a thread busy for hours.
inline constexpr int64_t kMaxJsonObjectKeys = 16384;
inline constexpr int64_t kMaxJsonKeyPairs = kMaxJsonObjectKeys * (kMaxJsonObjectKeys - 1) / 2;
// Values take many times their text's bytes: objects and arrays, and all values together (but one for each of
// those).
inline constexpr int64_t kMaxJsonContainers = int64_t{1} << 18;
inline constexpr int64_t kMaxJsonValues = int64_t{1} << 22;
inline constexpr int64_t kMaxConfigFileBytes = 64 << 20;

// `name` is what errors call the text (a file or a field).
absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view name);

// The bytes of a file; NOT_FOUND or INVALID_ARGUMENT (larger than `most`, not a file) name it.
absl::StatusOr<std::string> ReadTextFile(const std::filesystem::path& path, int64_t most);
absl::StatusOr<Json> ReadJsonFile(const std::filesystem::path& path);

// json.dumps(value, ensure_ascii=False): ", " and ": " as separators, floats by repr. Integers
// beyond 64 bits were already turned into floats by the parser and print as such.
std::string PythonJson(const Json& value);
// json.dumps(value, ensure_ascii=False, separators=(",", ":")).
std::string CompactJson(const Json& value);
// The same with the keys of every object sorted by code point.
std::string SortedCompactJson(const Json& value);

// A JSON string literal for `text`, not ASCII-escaped.
std::string JsonString(std::string_view text);

}  // namespace deltamesh
