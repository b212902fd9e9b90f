#include "services/cli/generate.h"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "runtime/base/checkpoint_marks.h"
#include "runtime/base/clock.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/base/thread_pool.h"
#include "runtime/engine/engine.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/model.h"
#include "runtime/sampling/sampler.h"
#include "runtime/text/chat.h"
#include "runtime/text/text_stream.h"
#include "runtime/text/tokenizer.h"
#include "services/cli/load_progress.h"
#include "services/cli/shipped_model.h"

namespace deltamesh {
namespace {

absl::Status CheckFlags(const GenerateOptions& o) {
  const int inputs = o.prompt.has_value() + o.chat.has_value() + !o.tokens.empty();
  if (inputs != 1) {
    return InvalidArgument("--prompt, --chat, --tokens: %d given; give exactly one", inputs);
  }
  if (o.max_tokens < 1) return InvalidArgument("--max-tokens: %d; use at least 1", o.max_tokens);
  if (o.threads < 0) return InvalidArgument("--threads: %d; use at least 1", o.threads);
  if (o.context_tokens < 2)
    return InvalidArgument("--context: %d; use at least 2", o.context_tokens);
  return absl::OkStatus();
}

// Prints an answer as it grows. With a chat format, reasoning, content and tool calls are told apart.
class Printer {
 public:
  static absl::StatusOr<std::unique_ptr<Printer>> Create(const GenerateOptions& options,
                                                         const Tokenizer& tokenizer,
                                                         std::unique_ptr<AnswerParser> parser,
                                                         std::ostream& out) {
    ASSIGN_OR_RETURN(TextStream text, TextStream::Create(tokenizer, {.stops = options.stops}));
    ASSIGN_OR_RETURN(StopFilter filter, StopFilter::Create(options.stops));
    return std::unique_ptr<Printer>(new Printer(std::move(text), std::move(filter),
                                                std::move(parser), options.show_tokens, out));
  }

  void Push(TokenId token) {
    if (show_tokens_) {
      out_ << (first_ ? "" : ",") << token << std::flush;
      first_ = false;
    }
    if (parser_ != nullptr) {
      Show(parser_->Push({&token, 1}));
    } else {
      Write(text_.Push({&token, 1}));
    }
  }

  void Finish() {
    if (parser_ != nullptr) {
      Show(parser_->Finish());
      Write(filter_.Finish());
    } else {
      Write(text_.Finish());
    }
    out_ << std::endl;
  }

  // A stop string was met.
  bool stopped() const { return parser_ != nullptr ? filter_.stopped() : text_.stopped(); }

 private:
  Printer(TextStream text, StopFilter filter, std::unique_ptr<AnswerParser> parser,
          bool show_tokens, std::ostream& out)
      : text_(std::move(text)),
        filter_(std::move(filter)),
        parser_(std::move(parser)),
        show_tokens_(show_tokens),
        out_(out) {}

  void Show(const AnswerDelta& delta) {
    if (!delta.reasoning.empty()) {
      if (!reasoning_) Write("[thinking] ");
      reasoning_ = true;
      Write(delta.reasoning);
    }
    if (!delta.content.empty()) {
      if (reasoning_) Write("\n[answer] ");
      reasoning_ = false;
      Write(filter_.Push(delta.content));
    }
    for (const AnswerToolCall& call : delta.tool_calls) {
      Write("\n[tool call] " + call.name + " " + call.arguments);
    }
  }

  void Write(const std::string& text) {
    if (!show_tokens_) out_ << text << std::flush;
  }

  TextStream text_;
  StopFilter filter_;
  std::unique_ptr<AnswerParser> parser_;  // null: plain text
  const bool show_tokens_;
  std::ostream& out_;
  bool first_ = true;
  bool reasoning_ = false;  // within a thinking block
};

// The prompt's ids, and what tells the answer's parts apart where there are parts.
struct Input {
  std::vector<TokenId> tokens;
  std::unique_ptr<AnswerParser> parser;
};

absl::StatusOr<Input> ReadInput(const GenerateOptions& o, const Tokenizer& tokenizer) {
  Input input;
  input.tokens = o.tokens;
  if (o.prompt.has_value()) {
    ASSIGN_OR_RETURN(input.tokens, tokenizer.EncodeOrdinary(*o.prompt));
    if (input.tokens.empty()) return InvalidArgument("--prompt: it is empty; give some text");
  }
  if (o.chat.has_value()) {
    ASSIGN_OR_RETURN(const auto format, ChatFormat::Load(o.model, tokenizer));
    ChatRequest request;
    request.messages.emplace_back();
    request.messages.back().role = "user";
    request.messages.back().content = *o.chat;
    ASSIGN_OR_RETURN(const std::vector<Segment> segments, format->Render(request));
    ASSIGN_OR_RETURN(input.tokens, tokenizer.EncodeSegments(segments));
    input.parser = format->NewParser(request);
  }
  return input;
}

// "id=value" entries, ids ascending.
absl::StatusOr<std::vector<std::pair<TokenId, float>>> ParseLogitBias(
    const std::vector<std::string>& entries) {
  std::vector<std::pair<TokenId, float>> bias;
  for (const std::string& entry : entries) {
    TokenId id = 0;
    float value = 0;
    const char* const end = entry.data() + entry.size();
    const auto [at, id_error] = std::from_chars(entry.data(), end, id);
    const char* const number = at == end ? end : at + 1;
    const auto [last, error] = std::from_chars(number, end, value);
    if (id_error != std::errc() || at == end || *at != '=' || error != std::errc() || last != end) {
      return InvalidArgument("--logit-bias: \"%s\" is not id=value, as in 42=-1.5", entry);
    }
    bias.emplace_back(id, value);
  }
  std::sort(bias.begin(), bias.end());
  for (size_t i = 1; i < bias.size(); ++i) {
    if (bias[i].first == bias[i - 1].first) {
      return InvalidArgument("--logit-bias: token %d has two values; give one", bias[i].first);
    }
  }
  return bias;
}

absl::Status CheckStopTokens(const std::vector<TokenId>& ids, int64_t vocab) {
  for (const TokenId id : ids) {
    if (id < 0 || id >= vocab) {
      return InvalidArgument("--stop-token: %d; this model has ids 0 to %d", id, vocab - 1);
    }
  }
  return absl::OkStatus();
}

std::string DescribeScores(const TokenOutput& token) {
  std::string line = absl::StrFormat("token %d logprob %.6f, best", token.token, token.logprob);
  for (const auto& [id, logprob] : token.top) line += absl::StrFormat(" %d=%.6f", id, logprob);
  return line + "\n";
}

const char* Name(FinishKind kind, bool stop_string) {
  if (stop_string) return "stop string";
  switch (kind) {
    case FinishKind::kStopToken:
      return "end or stop token";
    case FinishKind::kMaxTokens:
      return "--max-tokens";
    case FinishKind::kContextLimit:
      return "context limit";
    default:
      return "?";
  }
}

// Runs one sequence to its end.
absl::Status Stream(Engine& engine, SequenceSpec spec, Printer& printer, std::ostream& notes) {
  const bool scores = spec.sampling.logprobs >= 0;
  std::string score_lines;  // after the answer, which they would tear apart
  const SystemClock clock;
  const int64_t prompt_tokens = static_cast<int64_t>(spec.prompt.size());
  ASSIGN_OR_RETURN(const SequenceId id, engine.Add(std::move(spec)));
  const absl::Time start = clock.Now();
  absl::Time first = start;
  int64_t tokens = 0;
  FinishKind finish = FinishKind::kRunning;
  while (finish == FinishKind::kRunning && !printer.stopped() && engine.HasWork()) {
    for (const SequenceOutput& output : engine.Step().outputs) {
      RETURN_IF_ERROR(output.error);
      if (tokens == 0) first = clock.Now();
      finish = output.finish;
      for (const TokenOutput& token : output.tokens) {
        ++tokens;
        if (scores) score_lines += DescribeScores(token);
        // The end token belongs to the format, not to the answer's text.
        if (finish != FinishKind::kStopToken) printer.Push(token.token);
      }
    }
  }
  engine.Remove(id);
  printer.Finish();
  notes << score_lines;
  const double prompt_seconds = absl::ToDoubleSeconds(first - start);
  const double answer_seconds = absl::ToDoubleSeconds(clock.Now() - first);
  notes << absl::StrFormat(
      "\nprompt %d tokens, %.1f tokens/s; answer %d tokens, %.1f tokens/s; ended by %s\n",
      prompt_tokens, prompt_seconds > 0 ? static_cast<double>(prompt_tokens) / prompt_seconds : 0.0,
      tokens, answer_seconds > 0 ? static_cast<double>(tokens - 1) / answer_seconds : 0.0,
      Name(finish, printer.stopped()));
  return absl::OkStatus();
}

}  // namespace

void AddGenerateFlags(CLI::App* app, GenerateOptions* o) {
  app->add_option("--model", o->model,
                  "checkpoint folder (default: the one that comes with deltamesh)")
      ->envname("DELTAMESH_MODEL");
  app->add_option("--prompt", o->prompt, "text to continue");
  app->add_option("--chat", o->chat, "a user's message, rendered with the model's chat format");
  app->add_option("--tokens", o->tokens, "token ids to continue: 1,2,3")->delimiter(',');
  app->add_option("--max-tokens", o->max_tokens, "longest answer")->capture_default_str();
  SamplingParams& s = o->sampling;
  app->add_option("--temperature", s.temperature, "0 is greedy")->capture_default_str();
  app->add_option("--top-p", s.top_p, "keep the likeliest tokens up to this probability")
      ->capture_default_str();
  app->add_option("--top-k", s.top_k, "keep this many tokens; 0: all")->capture_default_str();
  app->add_option("--min-p", s.min_p, "keep tokens at least this likely, relative to the best")
      ->capture_default_str();
  app->add_option("--repetition-penalty", s.repetition_penalty, "over prompt and answer; 1: none")
      ->capture_default_str();
  app->add_option("--presence-penalty", s.presence_penalty, "over the answer")
      ->capture_default_str();
  app->add_option("--frequency-penalty", s.frequency_penalty, "over the answer")
      ->capture_default_str();
  app->add_option("--logit-bias", o->logit_bias, "id=value, added to a logit; may be repeated")
      ->delimiter(',');
  app->add_option("--logprobs", s.logprobs,
                  "also print each token's log-probability and this many alternatives")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--seed", o->seed, "the same seed gives the same answer (default: drawn)");
  app->add_option("--stop", o->stops, "end before this text; may be repeated")
      ->allow_extra_args(false);
  app->add_option("--stop-token", o->stop_tokens, "end after this token id; may be repeated")
      ->delimiter(',');
  app->add_flag("--ignore-eos", o->ignore_eos, "go on after the model's end tokens");
  app->add_flag("--show-tokens", o->show_tokens, "print token ids instead of text");
  app->add_option("--threads", o->threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  AddToolLoadFlags(app, &o->weights, &o->activations, &o->packed_dir);
  app->add_option("--context", o->context_tokens, "most tokens of prompt and answer")
      ->capture_default_str();
}

absl::Status RunGenerate(const GenerateOptions& options, std::ostream& out, std::ostream& notes) {
  RETURN_IF_ERROR(CheckFlags(options));
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(options.model));
  SamplingParams sampling = options.sampling;
  ASSIGN_OR_RETURN(sampling.logit_bias, ParseLogitBias(options.logit_bias));
  RETURN_IF_ERROR(ValidateSampling(sampling, config.vocab));
  RETURN_IF_ERROR(CheckStopTokens(options.stop_tokens, config.vocab));
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(options.model));
  ASSIGN_OR_RETURN(Input input, ReadInput(options, *tokenizer));
  ASSIGN_OR_RETURN(const auto printer,
                   Printer::Create(options, *tokenizer, std::move(input.parser), out));

  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load,
                   ToolLoadOptions(options.model, options.threads, options.weights,
                                   options.activations, options.packed_dir, &clock, &notes));
  ASSIGN_OR_RETURN(const auto model, Model::Load(options.model, load));
  if (HasRandomWeights(options.model)) {
    notes << "note: this checkpoint has random weights, so the answer is noise\n";
  }

  EngineOptions bounds;
  bounds.slabs = 1;
  bounds.running_max = 1;
  bounds.context_tokens_max = options.context_tokens;
  if (config.context_tokens > 0) {
    bounds.context_tokens_max = std::min(options.context_tokens, config.context_tokens);
  }
  bounds.latent_blocks = (bounds.context_tokens_max + kBlockTokens - 1) / kBlockTokens;
  ThreadPool pool(load.threads);
  LocalExperts experts(&model->experts(), &pool);
  ASSIGN_OR_RETURN(const auto engine, Engine::Create(model.get(), &experts, &pool, bounds));

  SequenceSpec spec;
  spec.request = "generate";
  spec.prompt = std::move(input.tokens);
  spec.sampling = sampling;
  spec.sampling.seed = options.seed.has_value() ? *options.seed : SystemEntropy().Next();
  spec.max_tokens = options.max_tokens;
  if (!options.ignore_eos) spec.stop_tokens = tokenizer->eos_ids();
  spec.stop_tokens.insert(spec.stop_tokens.end(), options.stop_tokens.begin(),
                          options.stop_tokens.end());
  if (options.sampling.temperature > 0 && !options.seed.has_value()) {
    notes << "seed " << spec.sampling.seed << "\n";
  }
  return Stream(*engine, std::move(spec), *printer, notes);
}

absl::Status RunGenerate(GenerateOptions options) {
  if (options.model.empty()) {
    ASSIGN_OR_RETURN(options.model, ShippedModel());
  }
  return RunGenerate(options, std::cout, std::cerr);
}

}  // namespace deltamesh
