// What gRPC and HTTP share: a whole request is checked and turned into tokens here, before any work.
//
// Every error names the field as clients spell it, the value and the remedy: "temperature: 3 is ...".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "deltamesh/v1/inference.pb.h"
#include "runtime/base/random.h"
#include "runtime/text/chat.h"
#include "runtime/text/tokenizer.h"
#include "services/router/answer.h"
#include "services/router/router_core.h"

namespace deltamesh {

struct FrontOptions {
  std::filesystem::path model;        // checkpoint folder; only its text parts are read
  std::string model_name;             // as clients name it; empty: the folder's name
  int64_t text_bytes_max = 16 << 20;  // of a prompt, before tokenising
  int64_t logit_bias_max = 1024;      // entries
  int64_t stop_token_ids_max = 64;
  int64_t logprobs_max = 20;
};

using PromptInput = std::variant<std::monostate, ChatRequest, std::string, std::vector<TokenId>>;

// A place in a chat up to which other chats are likely to be the same.
struct ChatMark {
  size_t message = 0;                // in this message,
  size_t bytes = std::string::npos;  // after so many bytes of its content; npos: at its end
};

// A request as either protocol gives it, unchecked.
struct GenerateSpec {
  std::string model;       // empty: the only one
  std::string request_id;  // the client's own; empty: it gave none
  RequestId drawn_id;  // MakeRequestId's, where somebody heard of it already; empty: one is drawn
  TraceContext trace;
  PromptInput input;
  v1::SamplingOptions sampling;
  std::optional<int64_t> logprobs;
  int64_t max_tokens = 0;  // 0: up to the context limit
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  v1::CacheOptions cache;
  // Of a chat that begins a conversation: more of cache.breakpoints, and bounded with these.
  std::vector<ChatMark> marks;
  // `cache.session` only tells requests that belong together; no session of that name is kept. Its numbers
  // are others than those of sessions.
  bool affinity_only = false;
  bool append = false;         // to the session that `cache` names
  int64_t session_tokens = 0;  // with append: what it must have; 0: any
  absl::Time deadline = absl::InfiniteFuture();
};

// A turn of which only what is new was sent.
struct Append {
  std::string name;  // the session's, for errors
  int64_t session_tokens = 0;
  const ChatFormat* chat = nullptr;  // the input is messages; not owned
  const Tokenizer* tokenizer = nullptr;
};

// Checked, tokenised, ready to be placed; with `append` after Join.
struct PreparedRequest {
  // Makes the prompt of the session's tokens and what was sent: cheap. Once.
  absl::Status Join(const std::vector<TokenId>& session);

  ClientRequest request;  // its id is drawn, and begins with the client's own if there is one
  std::string client_id;  // what the client hears; several requests may have the same
  std::unique_ptr<AnswerStream> answer;
  std::optional<Append> append;
};

// Immutable and thread-safe once loaded, as far as `entropy` is.
class Front {
 public:
  // `entropy` draws seeds and request ids; it must outlive the front.
  static absl::StatusOr<std::unique_ptr<const Front>> Load(FrontOptions options, Entropy* entropy);

  // INVALID_ARGUMENT when the input is so large that no split into tokens fits `context_tokens` (0: not
  // known). Cheap, for inputs that are costly to tokenise.
  absl::Status CheckSize(const PromptInput& input, int64_t context_tokens) const;
  absl::StatusOr<PreparedRequest> Prepare(GenerateSpec spec) const;
  // With `more` the messages of a chat follow a conversation. Token ids are taken out of the input.
  absl::StatusOr<std::vector<TokenId>> Tokenize(const std::string& model, PromptInput&& input,
                                                bool more = false) const;
  // Checks the names of a session and its tenant, as in `cache`.
  static absl::StatusOr<SessionId> NameSession(const char* field, const std::string& session,
                                               const std::string& salt);
  // NOT_FOUND unless `model` is empty or the one served.
  absl::Status CheckModel(const std::string& model) const;

  // Name, family, vocabulary size and whether the weights are random; the rest is the mesh's to know.
  const v1::ModelInfo& model_info() const { return info_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const FrontOptions& options() const { return options_; }
  // Begins with the client's own name for it, unless that is none that Prepare would take.
  RequestId MakeRequestId(const std::string& client_id) const;
  // The trace that a client's traceparent names, with a span of the request's own; empty when it names none.
  TraceContext StartTrace(std::string_view traceparent) const;

 private:
  Front(FrontOptions options, Entropy* entropy) : options_(std::move(options)), entropy_(entropy) {}
  absl::StatusOr<mesh::Sampling> CheckSampling(const v1::SamplingOptions& in,
                                               const std::optional<int64_t>& logprobs) const;
  static absl::Status CheckAppend(const GenerateSpec& spec);
  absl::Status CheckTokens(const char* field, const std::vector<TokenId>& ids) const;
  // Leading tokens that the prompt shares with that of another chat.
  int64_t SharedTokens(const ChatRequest& other, const std::vector<TokenId>& prompt) const;
  int64_t SystemTokens(const ChatRequest& chat, const std::vector<TokenId>& prompt) const;
  // Leading tokens up to each mark that is in the chat, the shallowest first.
  std::vector<int64_t> TokensUpTo(std::vector<ChatMark> marks, const ChatRequest& chat,
                                  const std::vector<TokenId>& prompt) const;
  int64_t TextBytesMax(int64_t context_tokens) const;

  const FrontOptions options_;
  Entropy* const entropy_;
  v1::ModelInfo info_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  int64_t token_bytes_max_ = 1;  // the longest text of one token
  std::unique_ptr<const ChatFormat> chat_;
};

// A chat from its protocol form. JSON strings in it are parsed; errors name their field.
absl::StatusOr<ChatRequest> ChatFromProto(const v1::ChatInput& chat);

}  // namespace deltamesh
