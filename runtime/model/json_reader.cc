#include "runtime/model/json_reader.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

using nlohmann::json;

// Deeper than any published file, and far from what a walk over a value would need to exhaust the stack.
constexpr int kDepthMax = 64;

// Long values are cut in messages.
std::string Shown(const json& value) {
  constexpr size_t kShownMax = 60;
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kShownMax) text = text.substr(0, kShownMax) + "...";
  return text;
}

const json& EmptyObject() {
  static const json* const empty = new json(json::object());
  return *empty;
}

}  // namespace

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return NotFound("%s: cannot be opened; the model folder must contain it", path);
  const int64_t size = in.tellg();
  if (size < 0 || size == std::numeric_limits<int64_t>::max()) {
    return InvalidArgument("%s: is not a regular file", path);
  }
  if (size > bytes_max) {
    return ResourceExhausted("%s: %d bytes are more than the %d expected of such a file", path,
                             size, bytes_max);
  }
  std::string text(static_cast<size_t>(size), '\0');
  in.seekg(0);
  if (!in.read(text.data(), size)) return DataLoss("%s: reading %d bytes failed", path, size);
  return text;
}

absl::StatusOr<json> ParseStrictJson(std::string_view text, std::string_view where) {
  std::vector<std::set<std::string>> keys;
  std::string twice;
  bool deep = false;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    deep |= depth > kDepthMax;
    if (deep) return false;  // nothing more is built
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && twice.empty()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return true;
  };
  try {
    json value = json::parse(text.begin(), text.end(), watch);
    if (deep) {
      return InvalidArgument("%s: JSON is nested more than %d deep; fetch the file again", where,
                             kDepthMax);
    }
    if (!twice.empty()) return InvalidArgument("%s: key \"%s\" occurs twice", where, twice);
    return value;
  } catch (const json::parse_error& e) {
    return InvalidArgument("%s: not valid JSON at byte %d of %d; fetch the file again", where,
                           std::min(e.byte, text.size()), text.size());
  } catch (const json::exception&) {
    return InvalidArgument(
        "%s: not valid JSON: a number is too large for a double; fetch the file again", where);
  }
}

JsonReader::JsonReader(const json& object, std::string where, std::string prefix)
    : object_(object), where_(std::move(where)), prefix_(std::move(prefix)) {
  if (!object.is_object()) {
    Fail(InvalidArgument("%s: %s is not a JSON object", where_,
                         prefix_.empty() ? "the file" : prefix_));
  }
}

void JsonReader::Fail(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

void JsonReader::FailKey(std::string_view key, std::string_view problem) {
  Fail(InvalidArgument("%s: %s%s: %s", where_, prefix_, key, problem));
}

const json* JsonReader::Find(std::string_view key) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(std::string(key));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

const json* JsonReader::Required(std::string_view key) {
  const json* value = Find(key);
  if (value == nullptr) FailKey(key, "is missing; a Kimi-Linear or Kimi K3 configuration has it");
  return value;
}

std::optional<int64_t> JsonReader::ToInt(std::string_view key, const json& value, int64_t low,
                                         int64_t high) {
  if (!value.is_number_integer()) {
    FailKey(key, absl::StrFormat("%s is not an integer", Shown(value)));
    return std::nullopt;
  }
  const bool too_big = value.is_number_unsigned() &&
                       value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
  if (too_big || value.get<int64_t>() < low || value.get<int64_t>() > high) {
    FailKey(key, absl::StrFormat("%s is outside [%d, %d]", Shown(value), low, high));
    return std::nullopt;
  }
  return value.get<int64_t>();
}

int64_t JsonReader::Int(std::string_view key, int64_t low, int64_t high) {
  const json* value = Required(key);
  return value == nullptr ? low : ToInt(key, *value, low, high).value_or(low);
}

int64_t JsonReader::IntOr(std::string_view key, int64_t fallback, int64_t low, int64_t high) {
  const json* value = Find(key);
  return value == nullptr ? fallback : ToInt(key, *value, low, high).value_or(fallback);
}

double JsonReader::NumberOr(std::string_view key, double fallback, double low, double high) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) {
    FailKey(key, absl::StrFormat("%s is not a number", Shown(*value)));
    return fallback;
  }
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) {
    FailKey(key, absl::StrFormat("%s is outside [%g, %g]", Shown(*value), low, high));
    return fallback;
  }
  return number;
}

double JsonReader::Number(std::string_view key, double low, double high) {
  return Required(key) == nullptr ? low : NumberOr(key, low, low, high);
}

bool JsonReader::BoolOr(std::string_view key, bool fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    FailKey(key, absl::StrFormat("%s is neither true nor false", Shown(*value)));
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonReader::StringOr(std::string_view key, std::string_view fallback) {
  const json* value = Find(key);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) {
    FailKey(key, absl::StrFormat("%s is not a string", Shown(*value)));
    return std::string(fallback);
  }
  return value->get<std::string>();
}

std::string JsonReader::String(std::string_view key) {
  return Required(key) == nullptr ? std::string() : StringOr(key, "");
}

std::vector<int64_t> JsonReader::Ints(std::string_view key, int64_t low, int64_t high) {
  const json* value = Required(key);
  if (value == nullptr) return {};
  if (!value->is_array()) {
    FailKey(key, absl::StrFormat("%s is not a list", Shown(*value)));
    return {};
  }
  std::vector<int64_t> list;
  for (const json& item : *value) {
    const std::optional<int64_t> number = ToInt(key, item, low, high);
    if (!number.has_value()) return {};
    list.push_back(*number);
  }
  return list;
}

const json& JsonReader::Object(std::string_view key) {
  const json* value = Required(key);
  if (value == nullptr) return EmptyObject();
  if (!value->is_object()) {
    FailKey(key, absl::StrFormat("%s is not an object", Shown(*value)));
    return EmptyObject();
  }
  return *value;
}

}  // namespace deltamesh
