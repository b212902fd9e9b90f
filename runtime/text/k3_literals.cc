#include "runtime/text/k3_literals.h"

#include "runtime/text/json.h"

namespace deltamesh {
namespace {

constexpr std::string_view kHole = "%s";

struct Known {
  std::string_view key;
  bool hole;
};
constexpr Known kKnown[] = {{"tools", true},
                            {"tools_dynamic", true},
                            {"thinking_effort", true},
                            {"tool_choice_required", false},
                            {"tool_choice_none", false},
                            {"response_json_object", false},
                            {"response_json_schema", true}};

int CountHoles(std::string_view text) {
  int count = 0;
  for (size_t at = text.find(kHole); at != text.npos; at = text.find(kHole, at + kHole.size())) {
    ++count;
  }
  return count;
}

}  // namespace

absl::StatusOr<K3Literals> K3Literals::Load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "chat_literals.json";
  K3Literals literals;
  literals.file_ = path.string();
  if (!std::filesystem::exists(path)) return literals;
  ASSIGN_OR_RETURN(const Json json, ReadJsonFile(path));
  if (!json.is_object()) {
    return InvalidArgument("%s: top level is not an object; use {\"tools\": \"...%%s...\", ...}",
                           literals.file_);
  }
  for (const auto& [key, hole] : kKnown) {
    const auto it = json.find(std::string(key));
    if (it == json.end()) continue;
    if (!it->is_string()) {
      return InvalidArgument("%s: %s: is not a string; use the text of the published encoder",
                             literals.file_, key);
    }
    const auto text = it->get<std::string>();
    if (CountHoles(text) != (hole ? 1 : 0)) {
      return InvalidArgument("%s: %s: has %d holes (%%s), must have %d; correct the text",
                             literals.file_, key, CountHoles(text), hole ? 1 : 0);
    }
    literals.texts_.emplace(key, text);
  }
  return literals;
}

absl::StatusOr<std::string> K3Literals::Get(std::string_view key, std::string_view field) const {
  const auto it = texts_.find(key);
  if (it != texts_.end()) return it->second;
  return FailedPrecondition(
      "%s: needs the text \"%s\", which %s does not have; add it from the published "
      "encoding_k3.py, or do without %s",
      field, key, file_, field);
}

absl::StatusOr<std::string> K3Literals::Fill(std::string_view key, std::string_view value,
                                             std::string_view field) const {
  ASSIGN_OR_RETURN(std::string text, Get(key, field));
  text.replace(text.find(kHole), kHole.size(), value);
  return text;
}

}  // namespace deltamesh
