#include "services/router/request_span.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

namespace deltamesh {
namespace {

constexpr uint8_t kRecorded = 1;       // of TraceContext.flags
constexpr size_t kCandidatesTold = 8;  // the cheapest

class Attributes {
 public:
  explicit Attributes(otlp::Span* span) : span_(span) {}

  void Add(const char* key, std::string_view value) {
    if (!value.empty()) New(key)->set_string_value(std::string(value));
  }
  void Add(const char* key, bool value) { New(key)->set_bool_value(value); }
  void Add(const char* key, int64_t value) { New(key)->set_int_value(value); }
  void Add(const char* key, double value) { New(key)->set_double_value(value); }
  otlp::ArrayValue* AddArray(const char* key) { return New(key)->mutable_array_value(); }

 private:
  otlp::AnyValue* New(const char* key) {
    otlp::KeyValue* attribute = span_->add_attributes();
    attribute->set_key(key);
    return attribute->mutable_value();
  }
  otlp::Span* const span_;
};

// "prefill-0>decode-1 0.0312", the place and its estimated seconds.
std::string Text(const DecisionCandidate& c, bool measured) {
  std::string text = c.prefill.empty() ? c.decode : c.prefill + ">" + c.decode;
  if (!c.fetch_from.empty()) text = c.fetch_from + "=>" + text;
  if (measured) absl::StrAppendFormat(&text, " %.4g", c.cost.total());
  return c.room ? text : text + " (no room)";
}

void AddMatch(const Decision& d, Attributes& to) {
  to.Add("deltamesh.latent_tokens", d.latent_tokens);
  to.Add("deltamesh.snapshot_tokens", d.snapshot_tokens);
  to.Add("deltamesh.warm_tokens", d.warm_tokens);
  to.Add("deltamesh.object_store_tokens", d.object_tokens);
  to.Add("deltamesh.latents_at", std::string_view(d.latents_at));
  to.Add("deltamesh.snapshot_at", std::string_view(d.snapshot_at));
}

void AddChoice(const Decision& d, Attributes& to) {
  if (d.placements == 0) return;
  const DecisionCandidate& chosen = d.candidates[d.chosen];
  to.Add("deltamesh.prefill", std::string_view(chosen.prefill));
  to.Add("deltamesh.decode", std::string_view(chosen.decode));
  to.Add("deltamesh.compute_tokens", chosen.compute_tokens);
  to.Add("deltamesh.move_bytes", chosen.move_bytes);
  to.Add("deltamesh.read_from", std::string_view(ReadFromName(chosen.read_from)));
  to.Add("deltamesh.read_bytes", chosen.read_bytes);
  if (d.measured) {
    to.Add("deltamesh.estimated_seconds", chosen.cost.total());
    to.Add("deltamesh.queue_seconds", chosen.cost.queue);
    to.Add("deltamesh.move_seconds", chosen.cost.move);
    to.Add("deltamesh.compute_seconds", chosen.cost.compute);
    to.Add("deltamesh.stall_seconds", chosen.cost.stall);
  }
  otlp::ArrayValue* candidates = to.AddArray("deltamesh.candidates");
  for (size_t i = 0; i < std::min(d.candidate_count, kCandidatesTold); ++i) {
    candidates->add_values()->set_string_value(Text(d.candidates[i], d.measured));
  }
  const int64_t told = candidates->values_size();
  to.Add("deltamesh.candidates_left_out",
         d.candidates_left_out + static_cast<int64_t>(d.candidate_count) - told);
}

void AddOutcome(const Decision& d, Attributes& to) {
  to.Add("deltamesh.waited_seconds", d.waited_seconds);
  to.Add("deltamesh.placements", d.placements);
  to.Add("deltamesh.restored_tokens", d.restored_tokens);
  if (d.ttft_seconds >= 0) to.Add("deltamesh.ttft_seconds", d.ttft_seconds);
  if (d.handoff_bytes > 0) {
    to.Add("deltamesh.handoff_bytes", d.handoff_bytes);
    to.Add("deltamesh.handoff_seconds", d.handoff_seconds);
  }
  if (d.handoffs_refused > 0) to.Add("deltamesh.handoffs_refused", d.handoffs_refused);
  if (!d.fetched_from.empty()) {
    to.Add("deltamesh.fetched_from", std::string_view(d.fetched_from));
    to.Add("deltamesh.fetched_tokens", d.fetched_tokens);
    to.Add("deltamesh.fetched_bytes", d.fetched_bytes);
    to.Add("deltamesh.fetch_seconds", d.fetch_seconds);
  }
  to.Add("deltamesh.fetch_refusal", std::string_view(d.fetch_refusal));
}

}  // namespace

bool IsRecorded(const Decision& decision) {
  return !decision.trace.empty() && (decision.trace.flags & kRecorded) != 0;
}

otlp::Span SpanOf(const Decision& d) {
  otlp::Span span;
  span.set_trace_id(absl::HexStringToBytes(d.trace.trace_id));
  span.set_span_id(absl::HexStringToBytes(d.trace.span_id));
  span.set_parent_span_id(absl::HexStringToBytes(d.trace.parent_id));
  span.set_flags(d.trace.flags);
  span.set_name("deltamesh.request");
  span.set_kind(otlp::Span::SPAN_KIND_SERVER);
  const auto nanos = [&d](double seconds) {
    return static_cast<uint64_t>(
        absl::ToUnixNanos(d.submitted + absl::Seconds(std::max(seconds, 0.0))));
  };
  span.set_start_time_unix_nano(nanos(0));
  span.set_end_time_unix_nano(nanos(d.seconds));
  const auto event = [&](const char* name, double seconds) {
    otlp::Span::Event* e = span.add_events();
    e->set_name(name);
    e->set_time_unix_nano(nanos(seconds));
  };
  if (d.placements > 0) event("placed", d.waited_seconds);
  if (d.ttft_seconds >= 0) event("first_token", d.ttft_seconds);

  Attributes to(&span);
  to.Add("deltamesh.request", std::string_view(d.request_id));
  to.Add("deltamesh.reason", std::string_view(DecisionReasonName(d.reason)));
  to.Add("deltamesh.measured", d.measured);
  to.Add("gen_ai.usage.input_tokens", d.prompt_tokens);
  to.Add("gen_ai.usage.output_tokens", d.completion_tokens);
  AddMatch(d, to);
  AddChoice(d, to);
  AddOutcome(d, to);
  if (d.code != absl::StatusCode::kOk) {
    to.Add("error.type", std::string_view(absl::StatusCodeToString(d.code)));
    span.mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
    span.mutable_status()->set_message(d.message);
  }
  return span;
}

}  // namespace deltamesh
