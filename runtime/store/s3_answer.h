// What an S3 server's answer says, as the call that it answers has to take it; and what shows that it is not
// the server's at all. Pure functions: s3_client.h does the calls.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/store/object_store.h"

namespace deltamesh {

// What of a call decides what its answer means.
struct S3Asked {
  enum Method { kGet, kPut, kDelete } method = kGet;
  bool of_object = true;        // else of the bucket
  int64_t range_begin = -1;     // of a GET; -1: all of it
  std::string condition;        // of a PUT: a header
  std::string_view magic = {};  // what a whole object should begin with
  std::string doing;            // for messages
};

struct S3Answer {
  long code = 0;
  std::string text;                                     // but for the bytes of a range
  std::string etag, type, encoding, range, request_id;  // headers
  // It told its length, or where its pieces end: else nobody would notice that it was cut.
  bool framed = false;
};

// Why a server refused, in its words, made safe to show: a code that programs may go by, and what it says to
// people.
struct S3Reason {
  explicit S3Reason(const std::string& text);
  template <typename... Codes>
  bool IsOneOf(const Codes&... codes) const {
    return ((code == codes) || ...);
  }
  std::string code, told;  // "no reason" where it gives none
};

// Of an answer that is neither 2xx nor 404.
absl::Status S3Refusal(const S3Asked& asked, const S3Answer& answer);

// What shows that an answer of 2xx is not the server's; empty when nothing does.
std::string NotOfS3(const S3Asked& asked, const S3Answer& answer);

// Bytes of the whole object that the answer to a range is of; -1: not told.
int64_t S3RangeTotal(const S3Answer& answer);

struct S3Page {
  std::vector<ObjectInfo> objects;
  std::string next;  // token of the next page; empty: there is none
};
// UNAVAILABLE: it is no listing. FAILED_PRECONDITION: a page that cannot be gone on from.
absl::StatusOr<S3Page> ParseS3Page(const std::string& text, const std::string& doing);

}  // namespace deltamesh
