// gRPC's words in HTTP/2 (its "PROTOCOL-HTTP2"): pure functions.
#pragma once

#include <google/protobuf/message_lite.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deltamesh {

// Before each message: a byte that says whether it is compressed, four with its length.
inline constexpr size_t kGrpcPrefixBytes = 5;

struct GrpcPrefix {
  bool compressed = false;
  uint32_t bytes = 0;
};
// `at` has kGrpcPrefixBytes.
GrpcPrefix ReadGrpcPrefix(const char* at);
// With its prefix; never compressed.
std::string GrpcMessage(const google::protobuf::MessageLite& message);

// The header "grpc-timeout": at most eight digits and a unit. Nothing when it is malformed.
std::optional<std::chrono::nanoseconds> ReadGrpcTimeout(std::string_view text);
// The header "grpc-message": what is not printable ASCII, and '%', percent-encoded.
std::string WriteGrpcMessage(std::string_view text);

}  // namespace deltamesh
