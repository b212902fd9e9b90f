// A request as a span of its client's trace: what `deltamesh explain` says of it, as attributes.
#pragma once

#include "otlp/trace_export.pb.h"
#include "services/router/decision_log.h"

namespace deltamesh {

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

// Whether its client records the trace that it belongs to.
bool IsRecorded(const Decision& decision);

// The span of a request that has ended or was refused. Names: gen_ai.* as OpenTelemetry has them for token
// counts, deltamesh.* as the fields of the log line `request.explained`; what is not known is left out.
// Events: "placed" and "first_token". Costs are seconds, and there are none while no rate was measured.
otlp::Span SpanOf(const Decision& decision);

}  // namespace deltamesh
