// Which trace a request belongs to, as its client says it in an HTTP header or gRPC metadata (of Generate)
// named "traceparent": W3C Trace Context, https://www.w3.org/TR/trace-context/.
//
// What is ill-formed is no trace, and no error: a client's tracing must not cost it its answer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace deltamesh {

inline constexpr char kTraceParent[] = "traceparent";
// Of an answer, with the span of the request at the router: Trace Context, level 2.
inline constexpr char kTraceResponse[] = "traceresponse";

struct TraceContext {
  std::string trace_id;   // 32 hex digits; empty: no trace
  std::string parent_id;  // the client's span, 16 hex digits
  std::string span_id;    // the request's own, the same
  uint8_t flags = 0;      // 1: the client records

  bool empty() const { return trace_id.empty(); }
};

// The client's part of a header; empty when it is none of this specification.
TraceContext ParseTraceParent(std::string_view header);
// A span's name of a drawn number.
std::string SpanId(uint64_t drawn);
// The value of kTraceResponse; empty without a trace.
std::string TraceResponse(const TraceContext& trace);

}  // namespace deltamesh
