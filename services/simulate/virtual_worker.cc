#include "services/simulate/virtual_worker.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/cache/state_layout.h"
#include "services/common/protocol.h"

namespace deltamesh {
namespace {

constexpr size_t kFactsPerMessage = 4096;

absl::Time At(double second) { return absl::UnixEpoch() + absl::Seconds(second); }

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::span<const PrefixKey> Blocks(const Turn& turn, int64_t blocks) {
  return std::span(*turn.keys).first(static_cast<size_t>(blocks));
}

CutHints HintsOf(const Turn& turn, const mesh::CacheHints& hints) {
  return {.breakpoints = turn.breakpoints, .junction = static_cast<int64_t>(hints.junction())};
}

mesh::PrefixChanges::What WhatOf(PrefixChange::What what) {
  switch (what) {
    case PrefixChange::kBlockAdded:
      return mesh::PrefixChanges::LATENTS_ADDED;
    case PrefixChange::kBlockDropped:
      return mesh::PrefixChanges::LATENTS_DROPPED;
    case PrefixChange::kSnapshotAdded:
      return mesh::PrefixChanges::SNAPSHOT_ADDED;
    case PrefixChange::kSnapshotDropped:
      return mesh::PrefixChanges::SNAPSHOT_DROPPED;
  }
  return mesh::PrefixChanges::LATENTS_DROPPED;
}

}  // namespace

VirtualWorker::VirtualWorker(VirtualWorkerOptions options, const CachePolicy& policy,
                             const CacheBytes& bytes,
                             std::function<const Turn&(const std::string&)> turn_of)
    : options_(std::move(options)),
      bytes_(bytes),
      turn_of_(std::move(turn_of)),
      cache_(policy, bytes),
      scheduler_(options_.scheduler) {}

mesh::WorkerMessage VirtualWorker::Registration() const {
  mesh::WorkerMessage message;
  mesh::Register* r = message.mutable_register_();
  r->set_name(options_.name);
  r->set_role(options_.role);
  r->set_epoch(1);
  r->mutable_model()->set_digest("simulated");
  r->mutable_model()->set_state_layout(kStateLayoutVersion);
  r->mutable_model()->set_block_tokens(kBlockTokens);
  r->mutable_model()->set_tile_tokens(kTileTokens);
  r->mutable_model()->set_protocol(kMeshProtocol);
  r->mutable_model()->set_text_digest("simulated");
  r->set_transport_kind("simulated");
  r->set_state_fetch(true);
  mesh::Capacity* c = r->mutable_capacity();
  c->set_slabs(static_cast<uint64_t>(options_.slabs));
  c->set_latent_blocks(static_cast<uint64_t>(options_.blocks));
  c->set_context_tokens(static_cast<uint64_t>(options_.context_tokens));
  c->set_step_tokens(static_cast<uint64_t>(options_.scheduler.step_tokens_max));
  c->set_slab_bytes(static_cast<uint64_t>(bytes_.snapshot));
  c->set_block_bytes(static_cast<uint64_t>(bytes_.block));
  return message;
}

// ---- what routers say ----------------------------------------------------------------------------

void VirtualWorker::OnMessage(const mesh::RouterMessage& message, double now) {
  switch (message.body_case()) {
    case mesh::RouterMessage::kRegistered:
      TellPrefixes();
      break;
    case mesh::RouterMessage::kStartPrefill:
      StartPrefill(message.start_prefill(), now);
      break;
    case mesh::RouterMessage::kStartDecode:
      StartDecode(message.start_decode(), now);
      break;
    case mesh::RouterMessage::kCancel:
      Cancel(message.cancel().request_id());
      Dirty(now);
      break;
    default:
      break;
  }
}

void VirtualWorker::StartPrefill(const mesh::StartPrefill& message, double now) {
  const Turn& turn = turn_of_(message.request_id());
  const int64_t position = static_cast<int64_t>(message.landing().position());
  PolicyCache::Found found =
      cache_.Open(Blocks(turn, position / kBlockTokens), HintsOf(turn, message.cache()), At(now));
  Job job;
  job.request = message.request_id();
  job.attempt = message.attempt();
  job.position = job.restored = found.match.snapshot.value() * kBlockTokens;
  job.prompt_end = position;
  job.blocks = position / kBlockTokens;
  job.cuts = std::move(found.cuts);
  job.admitted = now;
  job.landing = message.landing();
  FetchOrRun(std::move(job), message.fetch(), now);
  Dirty(now);
}

void VirtualWorker::StartDecode(const mesh::StartDecode& message, double now) {
  const Turn& turn = turn_of_(message.request_id());
  const int64_t handoff = static_cast<int64_t>(message.handoff_tokens());
  const int64_t blocks = CeilDiv(message.prompt_size() + message.max_tokens(), kBlockTokens);
  Dirty(now);
  if (handoff > 0) {
    awaited_[message.request_id()] = {message.attempt(), handoff, blocks};
    blocks_used_ += blocks;
    const auto path = Blocks(turn, handoff / kBlockTokens);
    mesh::WorkerMessage granted;
    granted.mutable_landing_granted()->set_request_id(message.request_id());
    granted.mutable_landing_granted()->set_attempt(message.attempt());
    mesh::Landing* landing = granted.mutable_landing_granted()->mutable_landing();
    landing->set_receiver(options_.name);
    landing->set_position(message.handoff_tokens());
    landing->set_have_blocks(static_cast<uint64_t>(cache_.tree().Find(path).latents.value()));
    messages_.push_back(std::move(granted));
    return;
  }
  PolicyCache::Found found =
      cache_.Open(Blocks(turn, turn.prompt_blocks()), HintsOf(turn, message.cache()), At(now));
  Job job;
  job.request = message.request_id();
  job.attempt = message.attempt();
  job.position = job.restored = found.match.snapshot.value() * kBlockTokens;
  job.prompt_end = turn.prompt_tokens;
  job.blocks = blocks;
  job.cuts = std::move(found.cuts);
  job.admitted = now;
  FetchOrRun(std::move(job), message.fetch(), now);
}

void VirtualWorker::FetchOrRun(Job job, const mesh::FetchSource& source, double now) {
  const auto position = static_cast<int64_t>(source.position());
  if (position <= job.position) {
    if (position > 0) {
      mesh::WorkerMessage message;
      mesh::FetchResult* result = message.mutable_fetch_result();
      result->set_request_id(job.request);
      result->set_attempt(job.attempt);
      result->set_not_needed(true);
      messages_.push_back(std::move(message));
    }
    return RunOrFinish(std::move(job), now);
  }
  const auto path = Blocks(turn_of_(job.request), position / kBlockTokens);
  const int64_t missing =
      std::max<int64_t>(0, position / kBlockTokens - cache_.tree().Find(path).latents.value());
  fetches_.push_back({.request = job.request,
                      .source = source.worker(),
                      .receiver = options_.name,
                      .attempt = job.attempt,
                      .position = position,
                      .bytes = bytes_.snapshot + missing * bytes_.block});
  blocks_used_ += job.blocks;
  fetching_[job.request] = std::move(job);
}

void VirtualWorker::RunOrFinish(Job job, double now) {
  if (job.position == job.prompt_end) {
    FinishPrefill(job, now);
  } else {
    Run(std::move(job), now);
  }
}

void VirtualWorker::OnFetched(const VirtualFetch& fetch, bool held, double seconds,
                              double transfer_seconds, double now) {
  const auto found = fetching_.find(fetch.request);
  if (found == fetching_.end() || found->second.attempt != fetch.attempt) return;
  Job job = std::move(found->second);
  fetching_.erase(found);
  blocks_used_ -= job.blocks;
  Dirty(now);
  mesh::WorkerMessage message;
  mesh::FetchResult* result = message.mutable_fetch_result();
  result->set_request_id(fetch.request);
  result->set_attempt(fetch.attempt);
  result->set_source(fetch.source);
  result->set_seconds(seconds);
  result->set_reason(held ? "OK" : "NOT_HELD");
  result->set_code(held ? 0 : static_cast<int>(absl::StatusCode::kNotFound));
  if (held) {
    result->set_tokens(static_cast<uint64_t>(fetch.position));
    result->set_bytes(static_cast<uint64_t>(fetch.bytes));
    result->set_transfer_seconds(transfer_seconds);
  }
  messages_.push_back(std::move(message));
  if (!held && !job.landing) {  // it was chosen for that state only
    mesh::WorkerMessage back;
    back.mutable_failed()->set_request_id(fetch.request);
    back.mutable_failed()->set_attempt(fetch.attempt);
    back.mutable_failed()->set_code(static_cast<int>(absl::StatusCode::kAborted));
    messages_.push_back(std::move(back));
    return;
  }
  if (held) {
    const Turn& turn = turn_of_(fetch.request);
    const int64_t blocks = fetch.position / kBlockTokens;
    if (cache_.keeps_tails()) {
      cache_.Keep(Blocks(turn, blocks),
                  {.blocks = blocks, .kind = SnapshotKind::kPromptTail, .session = turn.session},
                  At(now));
    }
    std::erase_if(job.cuts, [blocks](const CutPoint& cut) { return cut.blocks <= blocks; });
    job.position = job.restored = fetch.position;
  }
  RunOrFinish(std::move(job), now);
  TellPrefixes();
}

bool VirtualWorker::Holds(const std::string& request, int64_t position) {
  const int64_t blocks = position / kBlockTokens;
  return cache_.tree().Find(Blocks(turn_of_(request), blocks)).snapshot.value() == blocks;
}

double VirtualWorker::LooksAround(double now) const {
  if (!step_) return now;
  return step_->began + step_->seconds * (std::floor((now - step_->began) / step_->seconds) + 1);
}

void VirtualWorker::OnHandoffArrived(const VirtualHandoff& handoff, double seconds, double now) {
  const auto found = awaited_.find(handoff.request);
  if (found == awaited_.end() || found->second.attempt != handoff.attempt) return;
  const Awaited awaited = found->second;
  awaited_.erase(found);
  blocks_used_ -= awaited.blocks;
  const Turn& turn = turn_of_(handoff.request);
  mesh::WorkerMessage message;
  message.mutable_handoff_result()->set_request_id(handoff.request);
  message.mutable_handoff_result()->set_attempt(handoff.attempt);
  message.mutable_handoff_result()->set_bytes(static_cast<uint64_t>(handoff.bytes));
  message.mutable_handoff_result()->set_seconds(seconds);
  messages_.push_back(std::move(message));
  if (cache_.keeps_tails()) {
    cache_.Keep(Blocks(turn, handoff.position / kBlockTokens),
                {.blocks = handoff.position / kBlockTokens,
                 .kind = SnapshotKind::kPromptTail,
                 .session = turn.session},
                At(now));
  }
  Job job;
  job.request = handoff.request;
  job.attempt = awaited.attempt;
  job.position = handoff.position;
  job.restored = handoff.restored;
  job.prompt_end = turn.prompt_tokens;
  job.blocks = awaited.blocks;
  job.admitted = now;
  Run(std::move(job), now);
  TellPrefixes();
  Dirty(now);
}

void VirtualWorker::Cancel(const std::string& request) {
  if (const auto found = awaited_.find(request); found != awaited_.end()) {
    blocks_used_ -= found->second.blocks;
    awaited_.erase(found);
  }
  if (const auto found = fetching_.find(request); found != fetching_.end()) {
    blocks_used_ -= found->second.blocks;
    fetching_.erase(found);
  }
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    if (it->second.request != request) {
      ++it;
      continue;
    }
    scheduler_.Remove(it->first);
    blocks_used_ -= it->second.blocks;
    it = jobs_.erase(it);
  }
}

// ---- steps ---------------------------------------------------------------------------------------

void VirtualWorker::Run(Job job, double now) {
  const SequenceId id{next_sequence_++};
  std::vector<int64_t> cuts;
  for (const CutPoint& cut : job.cuts) cuts.push_back(cut.blocks * kBlockTokens);
  scheduler_.Add(id, job.position, job.prompt_end, !job.landing.has_value(), std::move(cuts));
  blocks_used_ += job.blocks;
  jobs_.emplace(id, std::move(job));
  Interrupt(now);
  if (!step_) BeginStep(now);
}

// Of steps alike, those after the one that runs now are not taken: somebody has come.
void VirtualWorker::Interrupt(double now) {
  if (!step_ || step_->count <= 1) return;
  const double passed = std::floor((now - step_->began) / step_->seconds);
  step_->count = std::min(step_->count, static_cast<int64_t>(passed) + 1);
}

void VirtualWorker::BeginStep(double now) {
  if (!scheduler_.HasWork()) {
    rate_.Idle();
    prompt_rate_.Idle();
    return;
  }
  rate_.StepBegins(At(now));
  prompt_rate_.StepBegins(At(now));
  Step step;
  step.began = now;
  int64_t prompt = 0, decoding = 0;
  if (scheduler_.waiting_tokens() > 0) {
    step.chunks = scheduler_.Plan(SlabsFree() > 0);
    step.count = 1;
    for (const PlannedChunk& chunk : step.chunks) {
      const auto found = jobs_.find(chunk.id);
      CHECK(found != jobs_.end(), "sequence %d", chunk.id.value);
      if (Decoding(found->second)) {
        ++decoding;
      } else {
        prompt += chunk.tokens;
      }
    }
  } else {
    // Nobody has a prompt left, so steps are alike until the first answer ends.
    decoding = static_cast<int64_t>(jobs_.size());
    step.count = INT64_MAX;
    for (const auto& [id, job] : jobs_) {
      step.count = std::min(step.count, turn_of_(job.request).output_tokens - job.generated);
    }
  }
  step.seconds = options_.rates.step_seconds +
                 static_cast<double>(prompt) / options_.rates.prompt_tokens_per_second +
                 static_cast<double>(decoding) * options_.rates.token_seconds;
  const SchedulerOptions& o = options_.scheduler;
  const bool large = prompt * 2 >= std::min(o.step_tokens_max, o.chunk_tokens_max);
  rate_.StepEnded(prompt + decoding);
  prompt_rate_.StepEnded(large ? prompt + decoding : 0);
  computed_tokens_ += prompt;
  step_ = std::move(step);
}

void VirtualWorker::EndStep(double now) {
  const Step step = *std::exchange(step_, std::nullopt);
  busy_seconds_ += step.seconds * static_cast<double>(step.count);
  if (step.count > 1) {  // the rate is that of one of them
    rate_.Idle();
    prompt_rate_.Idle();
  }
  if (!step.chunks.empty()) {
    for (const PlannedChunk& chunk : step.chunks) Progress(chunk.id, chunk.tokens, now);
  } else {
    std::vector<SequenceId> all;
    for (const auto& [id, job] : jobs_) {
      if (Decoding(job) && job.generated > 0) all.push_back(id);
    }
    for (const SequenceId id : all) Progress(id, step.count, now);
  }
  TellPrefixes();
  Dirty(now);
  BeginStep(now);
}

void VirtualWorker::Progress(SequenceId id, int64_t tokens, double now) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;  // cancelled meanwhile
  Job& job = found->second;
  if (Decoding(job)) return Generated(job, tokens, now);
  const int64_t before = std::exchange(job.position, job.position + tokens);
  const Turn& turn = turn_of_(job.request);
  for (const CutPoint& cut : job.cuts) {
    const int64_t at = cut.blocks * kBlockTokens;
    if (at <= before || at > job.position) continue;
    cache_.Keep(Blocks(turn, cut.blocks),
                {.blocks = cut.blocks, .kind = cut.kind, .session = turn.session}, At(now));
  }
  if (!Decoding(job)) return;
  if (!job.landing) return Generated(job, 1, now);  // the prompt's end gives the first token
  FinishPrefill(job, now);
  scheduler_.Remove(id);
  blocks_used_ -= job.blocks;
  jobs_.erase(found);
}

void VirtualWorker::FinishPrefill(Job& job, double now) {
  mesh::WorkerMessage message;
  mesh::PrefillFinished* finished = message.mutable_prefill_finished();
  finished->set_request_id(job.request);
  finished->set_attempt(job.attempt);
  finished->set_seconds(now - job.admitted);
  messages_.push_back(std::move(message));
  const int64_t missing = std::max<int64_t>(
      0, job.prompt_end / kBlockTokens - static_cast<int64_t>(job.landing->have_blocks()));
  handoffs_.push_back({.request = job.request,
                       .receiver = job.landing->receiver(),
                       .attempt = job.attempt,
                       .position = job.prompt_end,
                       .restored = job.restored,
                       .bytes = bytes_.snapshot + missing * bytes_.block,
                       .latent_bytes = missing * bytes_.block,
                       .compute_seconds = now - job.admitted});
}

void VirtualWorker::Generated(Job& job, int64_t tokens, double now) {
  const Turn& turn = turn_of_(job.request);
  job.generated += tokens;
  const bool ended = job.generated >= turn.output_tokens;
  if (job.generated > tokens && !ended)
    return;  // the client is told of the first token and of the rest
  mesh::WorkerMessage message;
  mesh::SequenceOutput* output = message.mutable_outputs()->add_sequences();
  output->set_request_id(job.request);
  output->set_attempt(job.attempt);
  output->set_cached_tokens(static_cast<uint64_t>(job.restored));
  const int64_t told = job.generated > tokens ? 1 : 0;
  output->set_first_index(static_cast<uint64_t>(told));
  for (int64_t i = told; i < job.generated; ++i) output->add_tokens(0);
  if (ended) output->set_end(mesh::SequenceOutput::STOP_TOKEN);
  messages_.push_back(std::move(message));
  if (!ended) return;
  if (cache_.keeps_ends() && turn.answer_blocks() > 0) {
    cache_.Keep(
        Blocks(turn, turn.answer_blocks()),
        {.blocks = turn.answer_blocks(), .kind = SnapshotKind::kAnswerEnd, .session = turn.session},
        At(now));
  }
  for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
    if (&it->second != &job) continue;
    scheduler_.Remove(it->first);
    blocks_used_ -= job.blocks;
    jobs_.erase(it);
    return;
  }
}

// ---- time and what routers hear ------------------------------------------------------------------

std::optional<double> VirtualWorker::NextAt() const {
  std::optional<double> at = heartbeat_at_;
  if (step_) {
    const double end = step_->began + step_->seconds * static_cast<double>(step_->count);
    at = at ? std::min(*at, end) : end;
  }
  return at;
}

void VirtualWorker::Advance(double now) {
  if (step_ && step_->began + step_->seconds * static_cast<double>(step_->count) <= now) {
    EndStep(now);
  }
  if (heartbeat_at_ && *heartbeat_at_ <= now) {
    heartbeat_at_.reset();
    heartbeat_last_ = now;
    messages_.push_back(Heartbeat());
  }
}

// A heartbeat that says nothing new is not sent; a real worker's is, and changes nothing.
void VirtualWorker::Dirty(double now) {
  if (!heartbeat_at_) {
    heartbeat_at_ = std::max(now, heartbeat_last_ + options_.heartbeat_seconds);
  }
}

int64_t VirtualWorker::SlabsFree() const {
  const auto taken = static_cast<int64_t>(jobs_.size() + awaited_.size() + fetching_.size());
  return std::max<int64_t>(0, options_.slabs - taken);
}

mesh::WorkerMessage VirtualWorker::Heartbeat() const {
  mesh::WorkerMessage message;
  mesh::Heartbeat* load = message.mutable_heartbeat();
  load->set_slabs_free(static_cast<uint64_t>(SlabsFree()));
  load->set_latent_blocks_free(
      static_cast<uint64_t>(std::max<int64_t>(0, options_.blocks - blocks_used_)));
  load->set_running(static_cast<uint64_t>(scheduler_.running()));
  load->set_waiting(static_cast<uint64_t>(scheduler_.waiting()) + awaited_.size() +
                    fetching_.size());
  load->set_waiting_tokens(static_cast<uint64_t>(scheduler_.waiting_tokens()));
  load->set_tokens_per_second(rate_.value());
  load->set_prompt_tokens_per_second(prompt_rate_.value());
  return message;
}

void VirtualWorker::TellPrefixes() {
  const std::vector<PrefixChange> changes = cache_.tree().TakeChanges();
  for (size_t i = 0; i < changes.size() || prefixes_told_ == 0; i += kFactsPerMessage) {
    mesh::WorkerMessage message;
    mesh::PrefixChanges* out = message.mutable_prefixes();
    out->set_sequence(prefixes_told_++);
    out->set_complete(true);
    for (size_t j = i; j < std::min(changes.size(), i + kFactsPerMessage); ++j) {
      out->add_keys(changes[j].key.index());
      out->mutable_changes()->push_back(static_cast<char>(WhatOf(changes[j].what)));
      snapshots_taken_ += changes[j].what == PrefixChange::kSnapshotAdded;
    }
    messages_.push_back(std::move(message));
  }
}

std::vector<mesh::WorkerMessage> VirtualWorker::TakeMessages() {
  return std::exchange(messages_, {});
}

}  // namespace deltamesh
