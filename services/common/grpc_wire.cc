#include "services/common/grpc_wire.h"

#include <limits>

#include "runtime/base/status.h"

namespace deltamesh {

GrpcPrefix ReadGrpcPrefix(const char* at) {
  const auto byte = [at](int i) {
    return static_cast<uint32_t>(static_cast<unsigned char>(at[i]));
  };
  return {byte(0) != 0, byte(1) << 24 | byte(2) << 16 | byte(3) << 8 | byte(4)};
}

std::string GrpcMessage(const google::protobuf::MessageLite& message) {
  const size_t bytes = message.ByteSizeLong();
  CHECK(bytes <= static_cast<size_t>(std::numeric_limits<int32_t>::max()),
        "a message of ours has %d bytes", bytes);
  std::string out(kGrpcPrefixBytes + bytes, '\0');
  for (int i = 0; i < 4; ++i)
    out[static_cast<size_t>(i) + 1] = static_cast<char>(bytes >> (24 - 8 * i));
  message.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(&out[kGrpcPrefixBytes]));
  return out;
}

std::optional<std::chrono::nanoseconds> ReadGrpcTimeout(std::string_view text) {
  if (text.size() < 2 || text.size() > 9) return std::nullopt;
  int64_t value = 0;
  for (const char c : text.substr(0, text.size() - 1)) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  switch (text.back()) {
    case 'H':
      // 99,999,999 hours are more than nanoseconds can count.
      return std::chrono::hours(std::min<int64_t>(value, 24 * 365 * 100));
    case 'M':
      return std::chrono::minutes(value);
    case 'S':
      return std::chrono::seconds(value);
    case 'm':
      return std::chrono::milliseconds(value);
    case 'u':
      return std::chrono::microseconds(value);
    case 'n':
      return std::chrono::nanoseconds(value);
    default:
      return std::nullopt;
  }
}

std::string WriteGrpcMessage(std::string_view text) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= 0x20 && u <= 0x7e && c != '%') {
      out += c;
    } else {
      out += {'%', kDigits[u >> 4], kDigits[u & 15]};
    }
  }
  return out;
}

}  // namespace deltamesh
