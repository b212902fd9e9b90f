#include "runtime/text/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <vector>

namespace deltamesh {
namespace {

// What parsing would cost, as far as it can grow faster than the text.
struct Cost {
  int depth = 0;
  int64_t key_pairs = 0;  // an ordered object compares each new key with all before it
  int64_t containers = 0, values = 0;
};

// By brackets, commas and colons outside strings. Need only be right for the part of the text that parses.
Cost CostOf(std::string_view text) {
  Cost cost;
  std::array<int64_t, kMaxJsonDepth + 1> keys{};  // so far, of the value open at each depth
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      cost.depth = std::max(cost.depth, ++depth);
      ++cost.containers;
      if (depth <= kMaxJsonDepth) keys[static_cast<size_t>(depth)] = 0;
    } else if (c == ']' || c == '}') {
      depth = std::max(depth - 1, 0);
    } else if (c == ',') {
      ++cost.values;
    } else if (c == ':' && depth <= kMaxJsonDepth) {
      cost.key_pairs += keys[static_cast<size_t>(depth)]++;
    }
  }
  return cost;
}

void AppendString(std::string_view text, std::string& out) {
  out.push_back('"');
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += absl::StrFormat("\\u%04x", static_cast<unsigned>(c));
        } else {
          out.push_back(c);
        }
    }
  }
  out.push_back('"');
}

// repr(float): the shortest digits that read back the same, plain between 1e-4 and 1e16.
void AppendFloat(double value, std::string& out) {
  if (std::isnan(value)) {
    out += "NaN";
    return;
  }
  if (std::isinf(value)) {
    out += value > 0 ? "Infinity" : "-Infinity";
    return;
  }
  char buffer[40];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string_view text(buffer, end.ptr - buffer);
  if (text.front() == '-') {
    out.push_back('-');
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  const int exponent = std::stoi(std::string(text.substr(e + 1)));
  std::string digits(text.substr(0, 1));
  if (e > 2) digits += text.substr(2, e - 2);
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out.push_back(digits[0]);
    if (count > 1) out.append(".").append(digits, 1);
    out += absl::StrFormat("e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    out.append("0.").append(-exponent - 1, '0').append(digits);
  } else if (count <= exponent + 1) {
    out.append(digits).append(exponent + 1 - count, '0').append(".0");
  } else {
    out.append(digits, 0, exponent + 1).append(".").append(digits, exponent + 1);
  }
}

struct Style {
  std::string_view comma;
  std::string_view colon;
  bool sorted;
};

void Append(const Json& value, const Style& style, std::string& out) {
  switch (value.type()) {
    case Json::value_t::object: {
      std::vector<Json::const_iterator> members;
      for (auto it = value.begin(); it != value.end(); ++it) members.push_back(it);
      if (style.sorted) {  // UTF-8 bytes sort as code points do
        std::sort(members.begin(), members.end(),
                  [](const auto& a, const auto& b) { return a.key() < b.key(); });
      }
      out.push_back('{');
      for (size_t i = 0; i < members.size(); ++i) {
        if (i > 0) out += style.comma;
        AppendString(members[i].key(), out);
        out += style.colon;
        Append(members[i].value(), style, out);
      }
      out.push_back('}');
      break;
    }
    case Json::value_t::array: {
      out.push_back('[');
      for (size_t i = 0; i < value.size(); ++i) {
        if (i > 0) out += style.comma;
        Append(value[i], style, out);
      }
      out.push_back(']');
      break;
    }
    case Json::value_t::string:
      AppendString(value.get_ref<const std::string&>(), out);
      break;
    case Json::value_t::boolean:
      out += value.get<bool>() ? "true" : "false";
      break;
    case Json::value_t::number_integer:
      out += std::to_string(value.get<int64_t>());
      break;
    case Json::value_t::number_unsigned:
      out += std::to_string(value.get<uint64_t>());
      break;
    case Json::value_t::number_float:
      AppendFloat(value.get<double>(), out);
      break;
    default:
      out += "null";
  }
}

std::string Dump(const Json& value, const Style& style) {
  std::string out;
  Append(value, style, out);
  return out;
}

// Where a parser stops that keeps nothing.
struct FaultFinder final : nlohmann::json_sax<Json> {
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string&, const Json::exception& e) override {
    read = position;
    out_of_range = dynamic_cast<const Json::out_of_range*>(&e) != nullptr;
    return false;
  }

  size_t read =
      0;  // bytes, with the end of what does not fit; more than there are: the end does not
  bool out_of_range = false;
};

// What is wrong with a text that is not JSON, and at which byte of it, the first being byte 0.
std::string FaultOf(std::string_view text) {
  FaultFinder fault;
  Json::sax_parse(text, &fault);
  if (fault.out_of_range) {
    return absl::StrFormat("the number that ends before byte %d is too large for a double",
                           fault.read);
  }
  if (fault.read > text.size()) {
    return absl::StrFormat("it ends at byte %d, before its value does", text.size());
  }
  const size_t at = std::max<size_t>(fault.read, 1) - 1;
  const auto byte = static_cast<uint8_t>(text[at]);
  if (byte > 0x20 && byte < 0x7f) {
    return absl::StrFormat("what ends with '%c' at byte %d does not belong there", text[at], at);
  }
  const bool control = byte < 0x20;
  return absl::StrFormat("the byte 0x%02x at byte %d does not belong there%s", byte, at,
                         control ? "; within a string it is written as an escape" : "");
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view name) {
  const Cost cost = CostOf(text);
  if (cost.depth > kMaxJsonDepth) {
    return InvalidArgument("%s: JSON is nested %d deep; use at most %d levels", name, cost.depth,
                           kMaxJsonDepth);
  }
  if (cost.key_pairs > kMaxJsonKeyPairs) {
    return InvalidArgument("%s: JSON has objects of too many keys; use at most %d in one object",
                           name, kMaxJsonObjectKeys);
  }
  if (cost.containers > kMaxJsonContainers || cost.values > kMaxJsonValues) {
    return InvalidArgument(
        "%s: JSON has %d objects and arrays and %d values; use at most %d and %d", name,
        cost.containers, cost.values, kMaxJsonContainers, kMaxJsonValues);
  }
  try {
    return Json::parse(text);
  } catch (const Json::exception&) {
    // Its own text is for who wrote the library, and quotes what was read last, whatever bytes those are.
    return InvalidArgument("%s: not valid JSON: %s; correct it", name, FaultOf(text));
  }
}

absl::StatusOr<std::string> ReadTextFile(const std::filesystem::path& path, int64_t most) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    return NotFound("%s: no such file; copy it from the published checkpoint", path.string());
  }
  if (!std::filesystem::is_regular_file(status)) {
    return InvalidArgument("%s: not a regular file; copy it from the published checkpoint",
                           path.string());
  }
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error || size > most) {
    return InvalidArgument("%s: %d bytes, at most %d are read; is this the right file?",
                           path.string(), size, most);
  }
  std::string contents(size, '\0');
  std::ifstream in(path, std::ios::binary);
  if (!in.read(contents.data(), size)) {
    return InvalidArgument("%s: cannot be read; check its permissions", path.string());
  }
  return contents;
}

absl::StatusOr<Json> ReadJsonFile(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxConfigFileBytes));
  return ParseJson(text, path.string());
}

std::string PythonJson(const Json& value) { return Dump(value, {", ", ": ", false}); }
std::string CompactJson(const Json& value) { return Dump(value, {",", ":", false}); }
std::string SortedCompactJson(const Json& value) { return Dump(value, {",", ":", true}); }

std::string JsonString(std::string_view text) {
  std::string out;
  AppendString(text, out);
  return out;
}

}  // namespace deltamesh
