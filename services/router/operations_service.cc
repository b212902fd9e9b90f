#include "services/router/operations_service.h"

#include <algorithm>
#include <string>
#include <vector>

#include "deltamesh/v1/operations.grpc.pb.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "services/router/grpc_translation.h"

namespace deltamesh {
namespace {

constexpr uint32_t kLastDefault = 10;

void FillEstimate(const DecisionCandidate& c, v1::PlacementCandidate* out) {
  if (!c.cost.measured) return out->set_relative_cost(c.cost.total());
  out->set_queue_seconds(c.cost.queue);
  out->set_move_seconds(c.cost.move);
  out->set_fetch_seconds(c.fetch_seconds);
  out->set_read_seconds(c.read_seconds);
  out->set_compute_seconds(c.cost.compute);
  out->set_stall_seconds(c.cost.stall);
}

void FillCandidate(const DecisionCandidate& c, bool chosen, v1::PlacementCandidate* out) {
  out->set_prefill(c.prefill);
  out->set_decode(c.decode);
  out->set_cached_tokens(static_cast<uint64_t>(c.cached_tokens));
  out->set_compute_tokens(static_cast<uint64_t>(c.compute_tokens));
  out->set_move_bytes(static_cast<uint64_t>(c.move_bytes));
  FillEstimate(c, out);
  out->set_fetch_from(c.fetch_from);
  out->set_fetch_tokens(static_cast<uint64_t>(c.fetch_tokens));
  out->set_fetch_bytes(static_cast<uint64_t>(c.fetch_bytes));
  out->set_fetch_cold(c.fetch_cold);
  out->set_read_bytes(static_cast<uint64_t>(c.read_bytes));
  out->set_read_from(ReadFromName(c.read_from));
  out->set_room(c.room);
  out->set_chosen(chosen);
}

absl::Status Answer(const RouterCore& core, const v1::ExplainRequest& request,
                    v1::ExplainResponse* response) {
  const size_t most =
      std::min(request.last() == 0 ? kLastDefault : request.last(), OperationsService::kLastMax);
  const std::string& id = request.request_id();
  const std::string& trace = request.trace_id();
  if (!id.empty() && !trace.empty()) {
    return InvalidArgument("trace_id: with request_id; ask for one of them");
  }
  const DecisionLog& log = core.decisions();
  const auto found = !trace.empty() ? log.FindTrace(trace, most)
                     : id.empty()   ? log.Last(most)
                                    : log.Find(id, most);
  if (found.empty() && !(id.empty() && trace.empty())) {
    return NotFound("%s: \"%s\" is not among the last %d requests of this router%s",
                    trace.empty() ? "request_id" : "trace_id",
                    SafeMessage((trace.empty() ? id : trace).substr(0, 200)),
                    core.options().decisions_max,
                    trace.empty() ? "" : "; clients send it in their header traceparent");
  }
  for (const Decision* decision : found) FillExplanation(*decision, response->add_requests());
  return absl::OkStatus();
}

}  // namespace

void FillExplanation(const Decision& d, v1::RequestExplanation* out) {
  const auto count = [](int64_t n) { return static_cast<uint64_t>(n); };
  out->set_request_id(d.request_id);
  out->set_submitted_unix_ms(absl::ToUnixMillis(d.submitted));
  out->set_prompt_tokens(count(d.prompt_tokens));
  out->set_cost_tokens(count(d.cost_tokens));
  out->set_looked_up(d.named);
  out->set_latent_tokens(count(d.latent_tokens));
  out->set_latents_at(d.latents_at);
  out->set_snapshot_tokens(count(d.snapshot_tokens));
  out->set_snapshot_at(d.snapshot_at);
  out->set_snapshot_cold(d.snapshot_cold);
  out->set_warm_tokens(count(d.warm_tokens));
  out->set_object_store_tokens(count(d.object_tokens));
  out->set_placements(static_cast<uint32_t>(d.placements));
  out->set_waited_seconds(d.waited_seconds);
  for (size_t i = 0; i < d.candidate_count; ++i) {
    FillCandidate(d.candidates[i], i == d.chosen, out->add_candidates());
  }
  out->set_candidates_left_out(static_cast<uint32_t>(d.candidates_left_out));
  out->set_reason(DecisionReasonName(d.reason));
  out->set_trace_id(d.trace.trace_id);
  out->set_parent_span_id(d.trace.parent_id);
  out->set_span_id(d.trace.span_id);
  out->set_measured(d.measured);
  out->set_refused(d.reason == DecisionReason::kTurnedAway);
  out->set_handoffs_refused(static_cast<uint32_t>(d.handoffs_refused));
  out->set_handoff_bytes(count(d.handoff_bytes));
  out->set_handoff_seconds(d.handoff_seconds);
  out->set_fetched_from(d.fetched_from);
  out->set_fetched_tokens(count(d.fetched_tokens));
  out->set_fetched_bytes(count(d.fetched_bytes));
  out->set_fetch_seconds(d.fetch_seconds);
  out->set_fetch_refusal(SafeMessage(d.fetch_refusal));
  out->set_fetches_unknown(static_cast<uint32_t>(d.fetches_open.size()));
  out->set_restored_tokens(count(d.restored_tokens));
  out->set_completion_tokens(count(d.completion_tokens));
  if (d.ttft_seconds >= 0) out->set_ttft_seconds(d.ttft_seconds);
  if (d.seconds < 0) return;
  out->set_seconds(d.seconds);
  out->set_status(absl::StatusCodeToString(d.code));
  out->set_message(SafeMessage(d.message));
}

std::string_view OperationsService::name() const { return v1::Operations::service_full_name(); }

std::shared_ptr<GrpcCall::Events> OperationsService::Take(std::string_view method,
                                                          const std::shared_ptr<GrpcCall>& call) {
  if (method != "Explain") return nullptr;
  return std::make_shared<OneRequest>(call, [this, call](const grpc::ByteBuffer& bytes) {
    absl::StatusOr<v1::ExplainRequest> request = ParseSmallRequest<v1::ExplainRequest>(bytes);
    if (!request.ok()) return Refuse(*call, request.status());
    router_->Ask([call, request = *std::move(request)](const RouterCore* core) {
      v1::ExplainResponse response;
      const absl::Status status = core == nullptr ? Unavailable("the router is stopping or busy")
                                                  : Answer(*core, request, &response);
      if (!status.ok()) return Refuse(*call, status);
      call->Reply(response);
    });
  });
}

}  // namespace deltamesh
