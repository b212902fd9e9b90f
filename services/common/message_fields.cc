#include "services/common/message_fields.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

namespace deltamesh {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;

constexpr int kDepthMax = 100;  // as protobuf's own parsers

class Counter {
 public:
  Counter(google::protobuf::io::ZeroCopyInputStream* bytes, int64_t most)
      : in_(bytes), most_(most) {}

  // Of a message up to the stream's limit; false when it ends here: too many, or no such message.
  bool Count(const Descriptor* type, int depth) {
    while (const uint32_t tag = in_.ReadTag()) {
      if (++count_ > most_) return false;
      const FieldDescriptor* field =
          type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      const bool within =
          field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE &&
          WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
      if (within ? !CountWithin(field->message_type(), depth - 1)
                 : !WireFormatLite::SkipField(&in_, tag)) {
        return false;
      }
    }
    return true;
  }
  bool few() const { return count_ <= most_; }

 private:
  bool CountWithin(const Descriptor* type, int depth) {
    int length = 0;
    if (depth == 0 || !in_.ReadVarintSizeAsInt(&length)) return false;
    const auto limit = in_.PushLimit(length);
    if (!Count(type, depth) || in_.BytesUntilLimit() != 0) return false;
    in_.PopLimit(limit);
    return true;
  }

  google::protobuf::io::CodedInputStream in_;
  const int64_t most_;
  int64_t count_ = 0;
};

}  // namespace

bool HasFewFields(google::protobuf::io::ZeroCopyInputStream* bytes, const Descriptor* type,
                  int64_t most) {
  Counter counter(bytes, most);
  counter.Count(type, kDepthMax);
  return counter.few();
}

}  // namespace deltamesh
