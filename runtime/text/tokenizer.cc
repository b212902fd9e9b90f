#include "runtime/text/tokenizer.h"

#include <algorithm>
#include <charconv>

#include "runtime/text/json.h"
#include "runtime/text/utf8.h"

namespace deltamesh {
namespace {

constexpr int64_t kMaxVocabularyFileBytes = 256 << 20;

absl::Status CheckUtf8(std::string_view text) {
  if (const auto at = FirstInvalidUtf8(text)) {
    return InvalidArgument("text: byte %d (0x%02x) is not UTF-8; send well-formed UTF-8", *at,
                           static_cast<unsigned char>(text[*at]));
  }
  return absl::OkStatus();
}

// "eos_token_id" of one configuration: absent and null give nothing.
absl::StatusOr<std::vector<TokenId>> EosIds(const Json& config, const std::string& file,
                                            int64_t vocab_size) {
  std::vector<TokenId> ids;
  const auto it = config.find("eos_token_id");
  if (it == config.end() || it->is_null()) return ids;
  const Json list = it->is_array() ? *it : Json::array({*it});
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab_size) {
      return InvalidArgument(
          "%s: eos_token_id: %s is not a token id from 0 to %d; correct it to match tiktoken.model",
          file, id.dump(), vocab_size - 1);
    }
    ids.push_back(id.get<TokenId>());
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

absl::Status NeedObject(const Json& value, const std::string& file) {
  if (value.is_object()) return absl::OkStatus();
  return InvalidArgument("%s: top level is not an object; copy the file again from the checkpoint",
                         file);
}

}  // namespace

// What one call needs beyond the immutable tables.
struct Tokenizer::Work {
  explicit Work(const Tokenizer& t) : scratch(t.splitter_.NewScratch()), encoder(t.vocabulary_) {}
  Splitter::ScratchPtr scratch;
  BytePairEncoder encoder;
  std::vector<std::string_view> pieces;
};

Tokenizer::Tokenizer(Vocabulary vocabulary, Splitter splitter)
    : vocabulary_(std::move(vocabulary)), splitter_(std::move(splitter)) {}

absl::StatusOr<std::unique_ptr<const Tokenizer>> Tokenizer::Load(
    const std::filesystem::path& folder) {
  const std::filesystem::path model = folder / "tiktoken.model";
  ASSIGN_OR_RETURN(const std::string contents, ReadTextFile(model, kMaxVocabularyFileBytes));
  ASSIGN_OR_RETURN(Vocabulary vocabulary, Vocabulary::Parse(contents, model.string()));
  ASSIGN_OR_RETURN(Splitter splitter, Splitter::Create());
  std::unique_ptr<Tokenizer> t(new Tokenizer(std::move(vocabulary), std::move(splitter)));
  RETURN_IF_ERROR(t->NameSpecials(folder / "tokenizer_config.json"));
  RETURN_IF_ERROR(t->ReadConfigs(folder));
  return std::unique_ptr<const Tokenizer>(std::move(t));
}

absl::Status Tokenizer::NameSpecials(const std::filesystem::path& path) {
  const std::string file = path.string();
  ASSIGN_OR_RETURN(const Json config, ReadJsonFile(path));
  RETURN_IF_ERROR(NeedObject(config, file));
  const auto added = config.find("added_tokens_decoder");
  if (added == config.end() || !added->is_object()) {
    return InvalidArgument(
        "%s: added_tokens_decoder: missing or not an object; copy the file again from the "
        "checkpoint",
        file);
  }
  const int64_t base = vocabulary_.size();
  special_names_.assign(kReservedTokens, "");
  for (const auto& [key, value] : added->items()) {
    int64_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < base ||
        id >= base + kReservedTokens) {
      return InvalidArgument(
          "%s: added_tokens_decoder: \"%s\" is not one of the reserved ids %d to %d that follow "
          "tiktoken.model; use the two files of one checkpoint",
          file, key, base, base + kReservedTokens - 1);
    }
    const auto content = value.is_object() ? value.find("content") : value.end();
    if (!value.is_object() || content == value.end() || !content->is_string() ||
        content->get_ref<const std::string&>().empty()) {
      return InvalidArgument(
          "%s: added_tokens_decoder[\"%s\"].content: missing, empty or not a string; name the "
          "token",
          file, key);
    }
    special_names_[id - base] = content->get<std::string>();
  }
  for (int64_t k = 0; k < kReservedTokens; ++k) {
    std::string& name = special_names_[k];
    const auto id = static_cast<TokenId>(base + k);
    if (name.empty()) name = absl::StrFormat("<|reserved_token_%d|>", id);
    const auto [it, inserted] = special_ids_.emplace(name, id);
    if (!inserted) {
      return InvalidArgument(
          "%s: added_tokens_decoder: ids %d and %d are both named \"%s\"; names must differ", file,
          it->second, id, name);
    }
    special_by_first_byte_[static_cast<unsigned char>(name[0])].push_back(id);
  }
  for (auto& ids : special_by_first_byte_) {
    std::stable_sort(ids.begin(), ids.end(), [&](TokenId a, TokenId b) {
      return special_names_[a - base].size() > special_names_[b - base].size();
    });
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::ReadConfigs(const std::filesystem::path& folder) {
  const std::filesystem::path config_path = folder / "config.json";
  ASSIGN_OR_RETURN(const Json top, ReadJsonFile(config_path));
  RETURN_IF_ERROR(NeedObject(top, config_path.string()));
  const auto nested = top.find("text_config");
  const Json& config = nested != top.end() && nested->is_object() ? *nested : top;

  const auto vocab = config.find("vocab_size");
  if (vocab != config.end() &&
      (!vocab->is_number_integer() || vocab->get<int64_t>() < vocab_size())) {
    return InvalidArgument(
        "%s: vocab_size: %s is too small for the %d tokens of tiktoken.model and the reserved ids; "
        "use the files of one checkpoint",
        config_path.string(), vocab->dump(), vocab_size());
  }
  const std::filesystem::path generation_path = folder / "generation_config.json";
  if (std::filesystem::exists(generation_path)) {
    ASSIGN_OR_RETURN(const Json generation, ReadJsonFile(generation_path));
    RETURN_IF_ERROR(NeedObject(generation, generation_path.string()));
    ASSIGN_OR_RETURN(eos_ids_, EosIds(generation, generation_path.string(), vocab_size()));
  }
  if (eos_ids_.empty()) {
    ASSIGN_OR_RETURN(eos_ids_, EosIds(config, config_path.string(), vocab_size()));
  }
  if (eos_ids_.empty()) {
    return InvalidArgument(
        "%s: eos_token_id: missing here and in generation_config.json, so no answer would end; "
        "add the id of the end-of-turn token",
        config_path.string());
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::AppendOrdinary(std::string_view text, Work& work,
                                       std::vector<TokenId>& out) const {
  for (const std::string_view part : CutGiantText(text)) {
    work.pieces.clear();
    RETURN_IF_ERROR(splitter_.Split(part, *work.scratch, work.pieces));
    for (const std::string_view piece : work.pieces) work.encoder.Encode(piece, out);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::AppendSpecial(std::string_view text, Work& work,
                                      std::vector<TokenId>& out) const {
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    // The leftmost name, and the longest where several start.
    TokenId hit = Vocabulary::kNone;
    for (const TokenId id : special_by_first_byte_[static_cast<unsigned char>(text[at])]) {
      if (text.substr(at).starts_with(TokenBytes(id))) {
        hit = id;
        break;
      }
    }
    if (hit == Vocabulary::kNone) {
      ++at;
      continue;
    }
    RETURN_IF_ERROR(AppendOrdinary(text.substr(begin, at - begin), work, out));
    out.push_back(hit);
    at += TokenBytes(hit).size();
    begin = at;
  }
  return AppendOrdinary(text.substr(begin), work, out);
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::EncodeOrdinary(std::string_view text) const {
  RETURN_IF_ERROR(CheckUtf8(text));
  std::vector<TokenId> out;
  Work work(*this);
  RETURN_IF_ERROR(AppendOrdinary(text, work, out));
  return out;
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::EncodeSegments(
    std::span<const Segment> segments) const {
  for (size_t i = 0; i < segments.size(); ++i) {
    if (const absl::Status s = CheckUtf8(segments[i].text); !s.ok()) {
      return Annotate(s, absl::StrFormat("segment %d", i));
    }
  }
  std::vector<TokenId> out;
  Work work(*this);
  for (const Segment& s : segments) {
    RETURN_IF_ERROR(s.special ? AppendSpecial(s.text, work, out)
                              : AppendOrdinary(s.text, work, out));
  }
  return out;
}

absl::StatusOr<std::vector<std::string_view>> Tokenizer::SplitText(std::string_view text) const {
  RETURN_IF_ERROR(CheckUtf8(text));
  std::vector<std::string_view> pieces;
  const Splitter::ScratchPtr scratch = splitter_.NewScratch();
  for (const std::string_view part : CutGiantText(text)) {
    RETURN_IF_ERROR(splitter_.Split(part, *scratch, pieces));
  }
  return pieces;
}

std::string_view Tokenizer::TokenBytes(TokenId id) const {
  if (id < 0 || id >= vocab_size()) return {};
  if (id < vocabulary_.size()) return vocabulary_.Bytes(id);
  return special_names_[id - vocabulary_.size()];
}

std::string Tokenizer::Decode(std::span<const TokenId> ids) const {
  std::string bytes;
  for (const TokenId id : ids) bytes += TokenBytes(id);
  return DecodeUtf8(bytes);
}

std::optional<TokenId> Tokenizer::SpecialId(std::string_view name) const {
  const auto it = special_ids_.find(ToAbsl(name));
  if (it == special_ids_.end()) return std::nullopt;
  return it->second;
}

bool Tokenizer::is_eos(TokenId id) const {
  return std::binary_search(eos_ids_.begin(), eos_ids_.end(), id);
}

}  // namespace deltamesh
