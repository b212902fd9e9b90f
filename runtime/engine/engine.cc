#include "runtime/engine/engine.h"

#include <algorithm>
#include <map>
#include <optional>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/sampling/sampler.h"
#include "runtime/scheduler/scheduler.h"

namespace deltamesh {
namespace {

absl::Status CheckAtLeastOne(const char* field, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return InvalidArgument("%s: %d; use at least 1", field, value);
}

}  // namespace

absl::Status CheckEngineOptions(const EngineOptions& o) {
  RETURN_IF_ERROR(CheckAtLeastOne("slabs", o.slabs));
  RETURN_IF_ERROR(CheckAtLeastOne("latent_blocks", o.latent_blocks));
  RETURN_IF_ERROR(CheckAtLeastOne("step_tokens_max", o.step_tokens_max));
  if (o.step_tokens_max > kForwardTokensMax) {
    return InvalidArgument("step_tokens_max: %d; a step computes at most %d tokens",
                           o.step_tokens_max, kForwardTokensMax);
  }
  RETURN_IF_ERROR(CheckAtLeastOne("chunk_tokens_max", o.chunk_tokens_max));
  RETURN_IF_ERROR(CheckAtLeastOne("running_max", o.running_max));
  if (o.running_max > o.step_tokens_max) {
    return InvalidArgument(
        "running_max: %d sequences, but step_tokens_max=%d: those that decode take a token each, "
        "which leaves prompts none; raise --step-tokens to %d or lower --running to %d",
        o.running_max, o.step_tokens_max, o.running_max, o.step_tokens_max);
  }
  if (o.context_tokens_max < 2) {
    return InvalidArgument(
        "context_tokens_max: %d; use at least 2 (a prompt token and an answer token)",
        o.context_tokens_max);
  }
  const int64_t blocks = (o.context_tokens_max + kBlockTokens - 1) / kBlockTokens;
  if (o.latent_blocks < blocks) {
    return InvalidArgument(
        "latent_blocks: %d, but one sequence of context_tokens_max=%d needs %d; raise the one or "
        "lower the other",
        o.latent_blocks, o.context_tokens_max, blocks);
  }
  return absl::OkStatus();
}

namespace {

// A sequence between Add and its end.
struct Sequence {
  SequenceSpec spec;  // spec.state has moved to `state`
  std::unique_ptr<SequenceState> state;
  std::vector<TokenId> answer;
  TokenCounts counts;  // kept when the penalties use it

  bool prefill() const { return spec.stop_at > 0; }
  int64_t prompt_end() const {
    return prefill() ? spec.stop_at : static_cast<int64_t>(spec.prompt.size());
  }
  bool at_cut() const {
    const int64_t position = state->position();
    if (spec.at_cut == nullptr || position % kBlockTokens != 0) return false;
    return std::binary_search(spec.cuts.begin(), spec.cuts.end(), position) ||
           (spec.cut_answer && position >= prompt_end());
  }
  int64_t length() const { return static_cast<int64_t>(spec.prompt.size() + answer.size()); }
};

}  // namespace

struct Engine::Impl {
  Impl(Model* m, ExpertBackend* e, ThreadPool* p, const EngineOptions& o, StatePools state_pools)
      : model(m),
        experts(e),
        pool(p),
        options(o),
        pools(std::move(state_pools)),
        scheduler({.step_tokens_max = o.step_tokens_max,
                   .chunk_tokens_max = o.chunk_tokens_max,
                   .running_max = o.running_max}) {}

  // One sequence's part of the running step.
  struct Part {
    SequenceId id;
    Sequence* sequence;
    int64_t tokens;
    bool samples;
    int64_t cut;  // after so many tokens, within; 0: none
  };

  absl::Status Check(const SequenceSpec& spec) const;
  int64_t Positions(const SequenceSpec& spec) const;
  std::vector<Part> Plan(StepReport& report);
  std::unique_ptr<SequenceState> StateForCut(std::span<const Part> parts) const;
  absl::Status Forward(std::span<const Part> parts, SequenceState* copy);
  void AtCuts(const Part& part, std::unique_ptr<SequenceState> copy) const;
  std::optional<SequenceOutput> Conclude(const Part& part, const float* logits);
  SequenceOutput SampleNext(const Part& part, const float* logits);
  void Remove(SequenceId id) {
    scheduler.Remove(id);
    sequences.erase(id);
  }

  Model* const model;
  ExpertBackend* const experts;
  ThreadPool* const pool;
  const EngineOptions options;
  const StatePools pools;
  Scheduler scheduler;
  Sampler sampler;
  std::map<SequenceId, Sequence> sequences;
  uint64_t next_id = 1;
  std::vector<float> logits;  // [sampling parts of the step, vocab]; grows to the largest step
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(Model* model, ExpertBackend* experts,
                                                       ThreadPool* pool,
                                                       const EngineOptions& options) {
  RETURN_IF_ERROR(CheckEngineOptions(options));
  ASSIGN_OR_RETURN(StatePools pools,
                   StatePools::Create(model->state_layout(), options.slabs, options.latent_blocks));
  return std::unique_ptr<Engine>(
      new Engine(std::make_unique<Impl>(model, experts, pool, options, std::move(pools))));
}

absl::Status Engine::Impl::Check(const SequenceSpec& spec) const {
  const int64_t prompt = static_cast<int64_t>(spec.prompt.size());
  const int64_t vocab = model->config().vocab;
  if (prompt == 0) return InvalidArgument("prompt: no tokens; give at least one");
  for (int64_t i = 0; i < prompt; ++i) {
    const TokenId t = spec.prompt[static_cast<size_t>(i)];
    if (t < 0 || t >= vocab) {
      return InvalidArgument("prompt: token %d at %d is outside the vocabulary of %d", t, i, vocab);
    }
  }
  if (spec.stop_at < 0 || spec.stop_at > prompt) {
    return InvalidArgument("stop_at: %d is outside the prompt of %d tokens", spec.stop_at, prompt);
  }
  const bool prefill = spec.stop_at > 0;
  const int64_t least = prefill ? spec.stop_at : prompt + 1;  // an answer has at least one token
  if (least > options.context_tokens_max) {
    return InvalidArgument("prompt: %d tokens%s; at most %d fit the context", prompt,
                           prefill ? "" : " and an answer", options.context_tokens_max);
  }
  if (!prefill) {
    RETURN_IF_ERROR(CheckAtLeastOne("max_tokens", spec.max_tokens));
    RETURN_IF_ERROR(ValidateSampling(spec.sampling, vocab));
  }
  if (spec.state != nullptr) {
    CHECK(spec.state->layout() == pools.layout, "a state of another layout");
    const int64_t end = prefill ? spec.stop_at : prompt;
    if (spec.state->position() >= end) {
      return InvalidArgument("state: position %d leaves nothing to compute before %d",
                             spec.state->position(), end);
    }
  }
  int64_t above = spec.state == nullptr ? 0 : spec.state->position();
  for (const int64_t cut : spec.cuts) {
    CHECK(cut % kBlockTokens == 0 && cut > above && cut <= (prefill ? spec.stop_at : prompt),
          "a cut at %d after %d", cut, above);
    above = cut;
  }
  return absl::OkStatus();
}

// Positions whose state the sequence may come to hold. The last token of an answer is never fed.
int64_t Engine::Impl::Positions(const SequenceSpec& spec) const {
  if (spec.stop_at > 0) return spec.stop_at;
  const int64_t room = options.context_tokens_max - static_cast<int64_t>(spec.prompt.size());
  return static_cast<int64_t>(spec.prompt.size()) + std::min(spec.max_tokens, room) - 1;
}

absl::StatusOr<SequenceId> Engine::Add(SequenceSpec spec) {
  RETURN_IF_ERROR(impl_->Check(spec));
  Sequence sequence;
  sequence.state = std::move(spec.state);
  if (sequence.state == nullptr) {
    ASSIGN_OR_RETURN(sequence.state, SequenceState::Create(impl_->pools));
  }
  const int64_t position = sequence.state->position();
  RETURN_IF_ERROR(sequence.state->Reserve(impl_->Positions(spec) - position));

  sequence.spec = std::move(spec);
  if (UsesTokenCounts(sequence.spec.sampling)) sequence.counts.AddPrompt(sequence.spec.prompt);
  impl_->experts->Note(sequence.spec.request);
  const SequenceId id{impl_->next_id++};
  impl_->scheduler.Add(id, position, sequence.prompt_end(), !sequence.prefill(),
                       sequence.spec.cuts);
  impl_->sequences.emplace(id, std::move(sequence));
  return id;
}

void Engine::Remove(SequenceId id) { impl_->Remove(id); }

const SequenceState* Engine::state(SequenceId id) const {
  const auto found = impl_->sequences.find(id);
  return found == impl_->sequences.end() ? nullptr : found->second.state.get();
}

bool Engine::HasWork() const { return impl_->scheduler.HasWork(); }

StepReport Engine::Step() {
  StepReport report;
  const std::vector<Impl::Part> parts = impl_->Plan(report);
  if (parts.empty()) return report;
  std::unique_ptr<SequenceState> copy = impl_->StateForCut(parts);

  if (const absl::Status status = impl_->Forward(parts, copy.get()); !status.ok()) {
    for (const Impl::Part& part : parts) {
      LogWarning("engine.step_failed",
                 {{"request", part.sequence->spec.request}, {"error", status.ToString()}});
      report.outputs.push_back({.id = part.id, .tokens = {}, .error = status});
      impl_->Remove(part.id);
    }
    return report;
  }

  const float* logits = impl_->logits.data();
  for (const Impl::Part& part : parts) {
    impl_->AtCuts(part, part.cut > 0 ? std::move(copy) : nullptr);
    if (std::optional<SequenceOutput> output = impl_->Conclude(part, logits)) {
      const bool gone = !output->error.ok() || (output->finish != FinishKind::kRunning &&
                                                output->finish != FinishKind::kPrefilled);
      report.outputs.push_back(*std::move(output));
      if (gone) impl_->Remove(part.id);
    }
    if (part.samples) logits += impl_->model->config().vocab;
  }
  return report;
}

// For the cut that a piece passes; null when none does. Slabs are taken on this thread only, so the one that
// was free for the plan still is.
std::unique_ptr<SequenceState> Engine::Impl::StateForCut(std::span<const Part> parts) const {
  if (std::none_of(parts.begin(), parts.end(), [](const Part& p) { return p.cut > 0; })) {
    return nullptr;
  }
  absl::StatusOr<std::unique_ptr<SequenceState>> copy = SequenceState::CreateUnset(pools);
  CHECK(copy.ok(), "a cut is passed, and %s", copy.status().ToString());
  return *std::move(copy);
}

// Calls for a cut that was passed within the step, then for one where the sequence stands now.
void Engine::Impl::AtCuts(const Part& part, std::unique_ptr<SequenceState> copy) const {
  const Sequence& s = *part.sequence;
  if (copy != nullptr && s.spec.at_cut != nullptr) {
    const int64_t position = s.state->position() - part.tokens + part.cut;
    const auto blocks = s.state->blocks().begin();
    copy->Place(position, {blocks, blocks + position / kBlockTokens});
    s.spec.at_cut(*copy);
  }
  copy.reset();
  if (s.at_cut()) s.spec.at_cut(*s.state);
}

std::vector<Engine::Impl::Part> Engine::Impl::Plan(StepReport& report) {
  std::vector<Part> parts;
  for (const PlannedChunk& chunk : scheduler.Plan(pools.slabs->free_slots() > 0)) {
    Sequence& s = sequences.at(chunk.id);
    const int64_t end = s.state->position() + chunk.tokens;
    parts.push_back({.id = chunk.id,
                     .sequence = &s,
                     .tokens = chunk.tokens,
                     .samples = !s.prefill() && end >= s.prompt_end(),
                     .cut = chunk.cut});
    report.tokens += chunk.tokens;
    if (s.answer.empty()) report.prompt_tokens += chunk.tokens;
    ++report.sequences;
  }
  return parts;
}

absl::Status Engine::Impl::Forward(std::span<const Part> parts, SequenceState* copy) {
  const int64_t vocab = model->config().vocab;
  const int64_t samples =
      std::count_if(parts.begin(), parts.end(), [](const Part& p) { return p.samples; });
  if (static_cast<int64_t>(logits.size()) < samples * vocab) {
    logits.resize(static_cast<size_t>(samples * vocab));
  }

  std::vector<SequenceChunk> chunks;
  float* out = logits.data();
  for (const Part& part : parts) {
    Sequence& s = *part.sequence;
    const int64_t position = s.state->position();
    SequenceChunk chunk;
    chunk.state = s.state.get();
    chunk.tokens = s.answer.empty() ? std::span<const TokenId>(s.spec.prompt)
                                          .subspan(static_cast<size_t>(position),
                                                   static_cast<size_t>(part.tokens))
                                    : std::span<const TokenId>(s.answer).last(1);
    if (part.cut > 0) {
      chunk.copy = copy;
      chunk.copy_after = part.cut;
    }
    if (part.samples) {
      chunk.logits = 1;
      chunk.out = out;
      out += vocab;
    }
    if (s.spec.layer_final != nullptr && s.prefill() && position + part.tokens == s.spec.stop_at) {
      chunk.layer_done = [&s](int64_t layer) { s.spec.layer_final(layer, *s.state); };
    }
    chunks.push_back(std::move(chunk));
  }
  return model->Forward(chunks, *experts, *pool);
}

std::optional<SequenceOutput> Engine::Impl::Conclude(const Part& part, const float* part_logits) {
  const Sequence& s = *part.sequence;
  if (part.samples) return SampleNext(part, part_logits);
  if (s.prefill() && s.state->position() == s.spec.stop_at) {
    SequenceOutput output;
    output.id = part.id;
    output.finish = FinishKind::kPrefilled;
    return output;
  }
  return std::nullopt;
}

SequenceOutput Engine::Impl::SampleNext(const Part& part, const float* part_logits) {
  Sequence& s = *part.sequence;
  SequenceOutput output;
  output.id = part.id;
  output.first_index = static_cast<int64_t>(s.answer.size());
  absl::StatusOr<TokenSample> sample =
      sampler.Sample({part_logits, static_cast<size_t>(model->config().vocab)}, s.spec.sampling,
                     s.counts, s.length());
  if (!sample.ok()) {
    LogError("engine.bad_logits",
             {{"request", s.spec.request}, {"error", sample.status().ToString()}});
    output.error = sample.status();
    return output;
  }
  s.answer.push_back(sample->token);
  if (UsesTokenCounts(s.spec.sampling)) s.counts.AddAnswer(sample->token);

  const std::vector<TokenId>& stops = s.spec.stop_tokens;
  if (std::find(stops.begin(), stops.end(), sample->token) != stops.end()) {
    output.finish = FinishKind::kStopToken;
  } else if (static_cast<int64_t>(s.answer.size()) >= s.spec.max_tokens) {
    output.finish = FinishKind::kMaxTokens;
  } else if (s.length() >= options.context_tokens_max) {
    output.finish = FinishKind::kContextLimit;
  }
  output.tokens.push_back(
      {.token = sample->token, .logprob = sample->logprob, .top = std::move(sample->top)});
  return output;
}

const StatePools& Engine::pools() const { return impl_->pools; }
const EngineOptions& Engine::options() const { return impl_->options; }
int64_t Engine::running() const { return impl_->scheduler.running(); }
int64_t Engine::waiting() const { return impl_->scheduler.waiting(); }
int64_t Engine::waiting_tokens() const { return impl_->scheduler.waiting_tokens(); }

}  // namespace deltamesh
