#include "services/common/trace_context.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/str_format.h"

namespace deltamesh {
namespace {

// version "-" trace-id "-" parent-id "-" flags
constexpr size_t kVersionEnd = 2, kTraceEnd = 35, kParentEnd = 52, kFlagsEnd = 55;

// Capitals are none: the specification asks for small letters.
bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsId(std::string_view text) { return IsHex(text) && text.find_first_not_of('0') != text.npos; }

}  // namespace

TraceContext ParseTraceParent(std::string_view header) {
  if (header.size() < kFlagsEnd) return {};
  for (const size_t dash : {kVersionEnd, kTraceEnd, kParentEnd}) {
    if (header[dash] != '-') return {};
  }
  const std::string_view version = header.substr(0, kVersionEnd);
  const std::string_view trace = header.substr(kVersionEnd + 1, kTraceEnd - kVersionEnd - 1);
  const std::string_view parent = header.substr(kTraceEnd + 1, kParentEnd - kTraceEnd - 1);
  const std::string_view flags = header.substr(kParentEnd + 1, kFlagsEnd - kParentEnd - 1);
  if (!IsHex(version) || version == "ff" || !IsHex(flags) || !IsId(trace) || !IsId(parent)) {
    return {};
  }
  // Later versions may add fields, this one has none.
  const bool longer = header.size() > kFlagsEnd;
  if (longer && (version == "00" || header[kFlagsEnd] != '-')) return {};
  TraceContext out;
  out.trace_id = trace;
  out.parent_id = parent;
  std::from_chars(flags.data(), flags.data() + flags.size(), out.flags, 16);
  return out;
}

std::string SpanId(uint64_t drawn) { return absl::StrFormat("%016x", drawn == 0 ? 1 : drawn); }

std::string TraceResponse(const TraceContext& trace) {
  if (trace.empty()) return "";
  return absl::StrFormat("00-%s-%s-%02x", trace.trace_id, trace.span_id, trace.flags);
}

}  // namespace deltamesh
