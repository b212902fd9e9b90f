#include "services/cli/explain.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "deltamesh/v1/operations.grpc.pb.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "services/cli/terminal_text.h"
#include "services/common/flag_range.h"

namespace deltamesh {
namespace {

std::string Seconds(double s) {
  return s < 1 ? absl::StrFormat("%.1f ms", s * 1e3) : absl::StrFormat("%.2f s", s);
}

std::string Bytes(uint64_t bytes) {
  const auto b = static_cast<double>(bytes);
  if (b < 1024) return absl::StrFormat("%d B", bytes);
  if (b < 1024 * 1024) return absl::StrFormat("%.1f KiB", b / 1024);
  return absl::StrFormat("%.1f MiB", b / 1024 / 1024);
}

std::string Found(const v1::RequestExplanation& r) {
  if (!r.looked_up()) return "not looked up";
  const std::string snapshot =
      r.snapshot_tokens() == 0
          ? "no snapshot"
          : absl::StrFormat("snapshot at %d (%s%s)", r.snapshot_tokens(), r.snapshot_at(),
                            r.snapshot_cold() ? "'s disk" : "");
  const std::string warm = !r.snapshot_cold() ? ""
                           : r.warm_tokens() == 0
                               ? ", none in memory"
                               : absl::StrFormat(", in memory at %d", r.warm_tokens());
  const std::string objects =
      r.object_store_tokens() == 0
          ? ""
          : absl::StrFormat(", in the object store at %d", r.object_store_tokens());
  if (r.latent_tokens() == 0) return "no latents, " + snapshot + objects;
  return absl::StrFormat("latents to %d (%s), %s%s%s", r.latent_tokens(), r.latents_at(), snapshot,
                         warm, objects);
}

std::string Fetch(const v1::PlacementCandidate& c) {
  if (c.fetch_from().empty()) return "";
  return absl::StrFormat(", %d of them fetched from %s%s: %s%s", c.fetch_tokens(), c.fetch_from(),
                         c.fetch_cold() ? "'s disk" : "", Bytes(c.fetch_bytes()),
                         c.has_fetch_seconds() ? " in " + Seconds(c.fetch_seconds()) : "");
}

std::string Read(const v1::PlacementCandidate& c) {
  if (c.read_bytes() == 0) return "";
  return absl::StrFormat(", %s of it read from %s %s%s", Bytes(c.read_bytes()),
                         c.read_from() == "disk" ? "its" : "the", c.read_from(),
                         c.has_read_seconds() ? " in " + Seconds(c.read_seconds()) : "");
}

// Nobody has measured a rate: who has less to do is known, and not how long it takes.
std::string RelativeLine(const v1::PlacementCandidate& c, const std::string& who) {
  const std::string cost =
      c.room() ? absl::StrFormat("not measured yet: %.0f tokens of work", c.relative_cost())
               : "no room";
  return absl::StrFormat("  %s %-32s %s, its own %d (%d cached%s%s), %s to move\n",
                         c.chosen() ? "*" : " ", who, cost, c.compute_tokens(), c.cached_tokens(),
                         Read(c), Fetch(c), Bytes(c.move_bytes() + c.fetch_bytes()));
}

std::string Line(const v1::PlacementCandidate& c) {
  const std::string who =
      c.prefill().empty() ? c.decode() + " alone" : c.prefill() + " -> " + c.decode();
  if (c.has_relative_cost()) return RelativeLine(c, who);
  const std::string total =
      c.room()
          ? Seconds(c.queue_seconds() + c.move_seconds() + c.compute_seconds() + c.stall_seconds())
          : "no room";
  const std::string stall =
      c.stall_seconds() > 0 ? " + others wait " + Seconds(c.stall_seconds()) : "";
  return absl::StrFormat(
      "  %s %-32s %10s = queue %s + move %s (%s) + compute %s (%d tokens, %d cached%s%s)%s\n",
      c.chosen() ? "*" : " ", who, total, Seconds(c.queue_seconds()), Seconds(c.move_seconds()),
      Bytes(c.move_bytes() + c.fetch_bytes()), Seconds(c.compute_seconds()), c.compute_tokens(),
      c.cached_tokens(), Read(c), Fetch(c), stall);
}

std::string Trace(const v1::RequestExplanation& r) {
  if (r.trace_id().empty()) return "";
  return absl::StrFormat("  trace %s, span %s of %s\n", r.trace_id(), r.span_id(),
                         r.parent_span_id());
}

std::string Outcome(const v1::RequestExplanation& r) {
  std::string out;
  if (r.has_ttft_seconds()) out += "first token after " + Seconds(r.ttft_seconds()) + ", ";
  out += absl::StrFormat("%d tokens restored", r.restored_tokens());
  if (r.fetched_tokens() > 0) {
    out += absl::StrFormat(", %d of them fetched from %s: %s in %s", r.fetched_tokens(),
                           r.fetched_from(), Bytes(r.fetched_bytes()), Seconds(r.fetch_seconds()));
  }
  if (!r.fetch_refusal().empty()) {
    out += absl::StrFormat(", not fetched from %s (%s)", r.fetched_from(), r.fetch_refusal());
  }
  if (r.fetches_unknown() > 0) {
    out += absl::StrFormat(", what came of %d fetch%s is not known%s", r.fetches_unknown(),
                           r.fetches_unknown() == 1 ? "" : "es", r.has_seconds() ? "" : " yet");
  }
  if (r.handoff_bytes() > 0) {
    out += absl::StrFormat(", %s handed over in %s", Bytes(r.handoff_bytes()),
                           Seconds(r.handoff_seconds()));
  }
  if (r.handoffs_refused() > 0) {
    out += absl::StrFormat(", %d hand-offs refused", r.handoffs_refused());
  }
  if (!r.has_seconds()) return out + ", still there";
  out += absl::StrFormat(", %s with %d tokens after %s", r.status(), r.completion_tokens(),
                         Seconds(r.seconds()));
  return r.message().empty() ? out : out + ": " + r.message();
}

// Clients name requests, and messages quote what they sent; workers are named by whoever starts them.
void MakeShowable(v1::RequestExplanation* r) {
  const auto show = [](std::string* text) { *text = ForTerminal(*text); };
  for (std::string* text : {r->mutable_request_id(), r->mutable_trace_id(), r->mutable_span_id(),
                            r->mutable_parent_span_id(), r->mutable_reason(), r->mutable_status(),
                            r->mutable_message(), r->mutable_latents_at(), r->mutable_snapshot_at(),
                            r->mutable_fetched_from(), r->mutable_fetch_refusal()}) {
    show(text);
  }
  for (v1::PlacementCandidate& c : *r->mutable_candidates()) {
    for (std::string* text :
         {c.mutable_prefill(), c.mutable_decode(), c.mutable_fetch_from(), c.mutable_read_from()}) {
      show(text);
    }
  }
}

}  // namespace

std::string DescribeRequest(v1::RequestExplanation r) {
  MakeShowable(&r);
  std::string out = absl::StrFormat(
      "%s  %s\n%s", r.request_id(),
      absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixMillis(r.submitted_unix_ms()),
                       absl::UTCTimeZone()),
      Trace(r));
  if (r.refused()) {
    return out + absl::StrFormat("  %s, %s: %s\n", r.reason(), r.status(), r.message());
  }
  out += absl::StrFormat("  prompt %d tokens, cost %d; %s\n", r.prompt_tokens(), r.cost_tokens(),
                         Found(r));
  if (r.placements() > 0) {
    out += absl::StrFormat("  placed %d time%s after %s in the queue, %s%s:\n", r.placements(),
                           r.placements() == 1 ? "" : "s", Seconds(r.waited_seconds()), r.reason(),
                           r.candidates_left_out() == 0
                               ? ""
                               : absl::StrFormat(" (%d more not shown)", r.candidates_left_out()));
  } else {
    out += absl::StrFormat("  %s\n", r.reason());
  }
  for (const v1::PlacementCandidate& c : r.candidates()) out += Line(c);
  return out + "  then: " + Outcome(r) + "\n";
}

void AddExplainFlags(CLI::App* app, ExplainOptions* o) {
  // An unset variable of a script must not ask for another request, the last one.
  const CLI::Validator given([](const std::string& id) { return id.empty() ? "is empty" : ""; },
                             "");
  app->add_option("request", o->request_id,
                  "the request: its X-Request-Id, or the client's name of it (default: the last)")
      ->check(given);
  app->add_option("--trace", o->trace_id,
                  "instead of a request: the trace, as 32 hex digits of its clients' traceparent")
      ->check(given);
  app->add_option("--router", o->router, "host:port of the router's gRPC port")
      ->envname("DELTAMESH_ROUTER")
      ->capture_default_str();
  app->add_option("--last", o->last, "without a request: this many requests, the newest first")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app->add_flag("--json", o->json, "one JSON object a line, as in operations.proto");
  app->add_option("--seconds", o->seconds, "longest wait for the answer")
      ->check(NumberIn(1e-3, 1e6, "seconds"))
      ->capture_default_str();
}

namespace {

absl::Status Check(const ExplainOptions& options) {
  if (!options.request_id.empty() && !options.trace_id.empty()) {
    return InvalidArgument("--trace: with a request; ask for one of them");
  }
  // So are all that routers take and give.
  for (const auto& [what, id] :
       {std::pair{"the request", &options.request_id}, std::pair{"--trace", &options.trace_id}}) {
    const auto odd = std::find_if(id->begin(), id->end(),
                                  [](unsigned char c) { return c <= 0x20 || c >= 0x7F; });
    if (odd == id->end()) continue;
    return InvalidArgument(
        "%s: \"%s\" holds a blank, or a byte that is not printable ASCII, after %d; no id does",
        what, SafeMessage(*id, 200), odd - id->begin());
  }
  return absl::OkStatus();
}

absl::Status StatusOf(const grpc::Status& status, const std::string& router) {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return Unavailable(
        "--router: no router answers at %s (%s); give the host:port of a running one's gRPC port, "
        "or start one with `deltamesh serve`",
        router, status.error_message());
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace

absl::Status RunExplain(const ExplainOptions& options, std::ostream& out) {
  RETURN_IF_ERROR(Check(options));
  const auto stub = v1::Operations::NewStub(
      grpc::CreateChannel(options.router, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(options.seconds)));
  v1::ExplainRequest request;
  request.set_request_id(options.request_id);
  request.set_trace_id(options.trace_id);
  request.set_last(options.last);
  v1::ExplainResponse response;
  const grpc::Status status = stub->Explain(&context, request, &response);
  if (!status.ok()) return StatusOf(status, options.router);
  google::protobuf::util::JsonPrintOptions print;
  print.preserve_proto_field_names = true;
  print.always_print_primitive_fields = true;
  for (const v1::RequestExplanation& r : response.requests()) {
    std::string line;
    if (!options.json) {
      out << DescribeRequest(r);
    } else if (google::protobuf::util::MessageToJsonString(r, &line, print).ok()) {
      out << line << "\n";
    }
  }
  out << std::flush;
  return absl::OkStatus();
}

}  // namespace deltamesh
