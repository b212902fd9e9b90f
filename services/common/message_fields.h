// How many fields a message has on the wire, before it is parsed: a field of two bytes may take a hundred
// times as much once it is an object.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstdint>

namespace deltamesh {

// Most fields of a request, those of messages within it included; packed lists count once.
inline constexpr int64_t kRequestFieldsMax = int64_t{1} << 20;

// Whether there are at most `most` of them. Where the bytes are no such message only what comes before
// counts: parsing them fails as well.
bool HasFewFields(google::protobuf::io::ZeroCopyInputStream* bytes,
                  const google::protobuf::Descriptor* type, int64_t most = kRequestFieldsMax);

}  // namespace deltamesh
