#include "runtime/text/vocabulary.h"

#include <charconv>
#include <optional>

#include "absl/strings/escaping.h"

namespace deltamesh {
namespace {

constexpr int64_t kMostTokens = 4'000'000;

struct Line {
  std::string_view token;
  std::string_view rank;
};

bool IsBlank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

// Two fields separated by blanks, or nothing if there are not exactly two.
std::optional<Line> TwoFields(std::string_view line) {
  std::vector<std::string_view> fields;
  for (size_t i = 0; i < line.size();) {
    if (IsBlank(line[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < line.size() && !IsBlank(line[end])) ++end;
    fields.push_back(line.substr(i, end - i));
    i = end;
  }
  if (fields.size() != 2) return std::nullopt;
  return Line{fields[0], fields[1]};
}

bool AllBlank(std::string_view line) {
  for (const char c : line) {
    if (!IsBlank(c)) return false;
  }
  return true;
}

struct Entry {
  std::string bytes;
  int64_t line = 0;  // 0: the rank is not there
};

absl::Status ParseLine(std::string_view text, int64_t number, std::string_view name,
                       std::vector<Entry>& entries) {
  const std::optional<Line> line = TwoFields(text);
  if (!line) {
    return InvalidArgument(
        "%s:%d: expected \"base64 rank\"; copy the file again from the checkpoint", name, number);
  }
  std::string bytes;
  if (line->token.size() % 4 != 0 || !absl::Base64Unescape(ToAbsl(line->token), &bytes) ||
      bytes.empty()) {
    return InvalidArgument("%s:%d: \"%s\" is not base64; copy the file again from the checkpoint",
                           name, number, line->token.substr(0, 64));
  }
  int64_t rank = -1;
  const auto [end, error] =
      std::from_chars(line->rank.data(), line->rank.data() + line->rank.size(), rank);
  if (error != std::errc() || end != line->rank.data() + line->rank.size() || rank < 0 ||
      rank >= kMostTokens) {
    return InvalidArgument(
        "%s:%d: rank \"%s\" is not a number from 0 to %d; use dense ranks from 0", name, number,
        line->rank.substr(0, 32), kMostTokens - 1);
  }
  if (rank >= static_cast<int64_t>(entries.size())) entries.resize(rank + 1);
  Entry& entry = entries[rank];
  if (entry.line != 0) {
    return InvalidArgument("%s:%d: rank %d was given in line %d already; each rank must occur once",
                           name, number, rank, entry.line);
  }
  entry = {std::move(bytes), number};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Vocabulary> Vocabulary::Parse(std::string_view contents, std::string_view name) {
  std::vector<Entry> entries;
  int64_t number = 0;
  for (size_t at = 0; at < contents.size();) {
    const size_t end = std::min(contents.find('\n', at), contents.size());
    const std::string_view line = contents.substr(at, end - at);
    at = end + 1;
    ++number;
    if (AllBlank(line)) continue;
    RETURN_IF_ERROR(ParseLine(line, number, name, entries));
  }

  Vocabulary v;
  size_t total = 0;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    if (entries[rank].line == 0) {
      return InvalidArgument(
          "%s: rank %d is missing (%d is the highest); ranks must be dense from 0, copy the file "
          "again",
          name, rank, entries.size() - 1);
    }
    total += entries[rank].bytes.size();
  }
  v.bytes_.reserve(total);  // no reallocation below: keys point into it
  v.offsets_.reserve(entries.size() + 1);
  v.offsets_.push_back(0);
  v.ranks_.reserve(entries.size());
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    const std::string& bytes = entries[rank].bytes;
    v.bytes_.insert(v.bytes_.end(), bytes.begin(), bytes.end());
    v.offsets_.push_back(static_cast<uint32_t>(v.bytes_.size()));
    v.longest_ = std::max(v.longest_, bytes.size());
    const absl::string_view key(v.bytes_.data() + v.offsets_[rank], bytes.size());
    const auto [it, inserted] = v.ranks_.emplace(key, static_cast<TokenId>(rank));
    if (!inserted) {
      return InvalidArgument("%s:%d: token is the same as in line %d; each token must occur once",
                             name, entries[rank].line, entries[it->second].line);
    }
  }
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    if (v.Find({&byte, 1}) == kNone) {
      return InvalidArgument(
          "%s: no token is the single byte 0x%02x, so some text could not be encoded; "
          "copy the file again from the checkpoint",
          name, b);
    }
  }
  return v;
}

std::string_view Vocabulary::Bytes(TokenId rank) const {
  CHECK(rank >= 0 && rank < size(), "rank %d of %d", rank, size());
  return {bytes_.data() + offsets_[rank], offsets_[rank + 1] - offsets_[rank]};
}

}  // namespace deltamesh
