#include "services/cli/byte_text.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int kBytes = 256;
// What Kimi-Linear's chat format needs, in the order of its published ids.
constexpr const char* kSpecials[] = {"[BOS]",
                                     "[EOS]",
                                     "<|im_end|>",
                                     "<|im_user|>",
                                     "<|im_assistant|>",
                                     "<|im_system|>",
                                     "<|im_middle|>",
                                     "<|tool_calls_section_begin|>",
                                     "<|tool_call_begin|>",
                                     "<|tool_call_argument_begin|>",
                                     "<|tool_call_end|>",
                                     "<|tool_calls_section_end|>"};

}  // namespace

absl::Status WriteByteText(const std::string& folder) {
  std::ofstream ranks(folder + "/tiktoken.model");
  for (int byte = 0; byte < kBytes; ++byte) {
    const char one = static_cast<char>(byte);
    ranks << absl::Base64Escape(absl::string_view(&one, 1)) << " " << byte << "\n";
  }
  nlohmann::ordered_json config = {{"added_tokens_decoder", nlohmann::ordered_json::object()}};
  for (size_t i = 0; i < std::size(kSpecials); ++i) {
    config["added_tokens_decoder"][std::to_string(kBytes + i)] = {{"content", kSpecials[i]},
                                                                  {"special", true}};
  }
  std::ofstream specials(folder + "/tokenizer_config.json");
  specials << config.dump(1) << "\n";
  ranks.close();
  specials.close();
  if (ranks && specials) return absl::OkStatus();
  return Unavailable("%s: cannot write text files there; free some space", folder);
}

absl::StatusOr<std::string> NamedOrRandomModel(const std::string& named,
                                               std::unique_ptr<ScratchFolder>* scratch) {
  if (!named.empty()) return named;
  ASSIGN_OR_RETURN(*scratch, ScratchFolder::Create());
  const std::string folder = (*scratch)->path() + "/model";
  RETURN_IF_ERROR(WriteRandomModel({.vocab = kByteTextVocab}, 1, folder));
  RETURN_IF_ERROR(WriteByteText(folder));
  return folder;
}

}  // namespace deltamesh
