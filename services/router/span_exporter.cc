#include "services/router/span_exporter.h"

#include <grpcpp/grpcpp.h>
#include <prometheus/counter.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr char kName[] = "deltamesh_spans_total";
constexpr char kHelp[] =
    "Spans of requests whose clients record them, by what became of them at the collector.";

// As OTLP has it, what may go well the next time.
bool WorthARetry(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsAborted(status) || absl::IsCancelled(status) || absl::IsResourceExhausted(status);
}

void AddText(google::protobuf::RepeatedPtrField<otlp::KeyValue>* to, const char* key,
             const std::string& value) {
  otlp::KeyValue* attribute = to->Add();
  attribute->set_key(key);
  attribute->mutable_value()->set_string_value(value);
}

}  // namespace

SpanExporter::SpanExporter(SpanExporterOptions options, Metrics* metrics)
    : options_(std::move(options)),
      stub_(options_.endpoint.empty()
                ? nullptr
                : otlp::TraceService::NewStub(
                      grpc::CreateChannel(options_.endpoint, grpc::InsecureChannelCredentials()))),
      exported_(metrics->Counter(kName, kHelp, {{"result", "exported"}})),
      dropped_(metrics->Counter(kName, kHelp, {{"result", "dropped"}})),
      failed_(metrics->Counter(kName, kHelp, {{"result", "failed"}})) {
  if (stub_ != nullptr) thread_ = std::thread([this] { Loop(); });
}

SpanExporter::~SpanExporter() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void SpanExporter::Add(const Decision& decision) {
  if (stub_ == nullptr || !IsRecorded(decision)) return;
  otlp::Span span = SpanOf(decision);
  absl::MutexLock lock(&mu_);
  if (waiting_.size() >= options_.queue_max) return dropped_.Increment();
  waiting_.push_back(std::move(span));
}

void SpanExporter::Loop() {
  absl::Time give_up = absl::InfiniteFuture();
  for (;;) {
    Spans batch;
    bool last = false;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &SpanExporter::Any));
      mu_.AwaitWithTimeout(absl::Condition(this, &SpanExporter::Full), options_.fill);
      last = stop_;
      const auto count = static_cast<ptrdiff_t>(std::min(waiting_.size(), options_.batch_max));
      batch.assign(std::make_move_iterator(waiting_.begin()),
                   std::make_move_iterator(waiting_.begin() + count));
      waiting_.erase(waiting_.begin(), waiting_.begin() + count);
    }
    if (batch.empty()) return;
    if (last) give_up = std::min(give_up, absl::Now() + options_.call_max);
    int64_t rejected = 0;
    const size_t count = batch.size();
    const absl::Status sent = Send(std::move(batch), last, give_up, &rejected);
    Count(count, sent, rejected);
  }
}

absl::Status SpanExporter::Send(Spans spans, bool last, absl::Time give_up, int64_t* rejected) {
  otlp::ExportTraceServiceRequest request;
  otlp::ResourceSpans* of = request.add_resource_spans();
  AddText(of->mutable_resource()->mutable_attributes(), "service.name", "deltamesh-router");
  AddText(of->mutable_resource()->mutable_attributes(), "service.instance.id", options_.router);
  otlp::ScopeSpans* scope = of->add_scope_spans();
  scope->mutable_scope()->set_name("deltamesh");
  for (otlp::Span& span : spans) *scope->add_spans() = std::move(span);
  absl::Status status;
  absl::Duration pause = options_.retry_after;
  for (int tries = 1;; ++tries, pause *= 2) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(std::min(give_up, absl::Now() + options_.call_max)));
    otlp::ExportTraceServiceResponse response;
    const grpc::Status called = stub_->Export(&context, request, &response);
    status =
        absl::Status(static_cast<absl::StatusCode>(called.error_code()), called.error_message());
    *rejected = response.partial_success().rejected_spans();
    if (status.ok() || last || tries == kTriesMax || !WorthARetry(status)) return status;
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &SpanExporter::Stopping), pause);
    if (stop_) return status;
  }
}

void SpanExporter::Count(size_t spans, const absl::Status& sent, int64_t rejected) {
  const double count = static_cast<double>(spans);
  const double refused = sent.ok() ? std::clamp(static_cast<double>(rejected), 0.0, count) : count;
  exported_.Increment(count - refused);
  failed_.Increment(refused);
  if (std::exchange(failing_, !sent.ok()) == !sent.ok()) return;
  if (sent.ok()) {
    LogInfo("spans.exported", {{"endpoint", options_.endpoint}, {"spans", spans}});
  } else {
    LogWarning("spans.not_exported",
               {{"endpoint", options_.endpoint},
                {"spans", spans},
                {"error", sent.ToString()},
                {"remedy", "start a collector there, or drop --trace-endpoint"}});
  }
}

}  // namespace deltamesh
