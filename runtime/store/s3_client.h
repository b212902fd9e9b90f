// An S3-compatible bucket over HTTP, with path-style URLs and signed requests (AWS signature version 4).
//
// Every call has a deadline, is tried a bounded number of times and can be cancelled. A server that does not
// answer is left alone for a while that doubles up to a bound; calls in that time fail at once with
// UNAVAILABLE, so nobody waits for it. Connections are kept between calls.
//
// NOT_FOUND says that the bucket is there and lacks the object, or has another one than was listed; a bucket
// that is not there is UNAVAILABLE, and so is a page that a proxy gives in place of an answer.
//
// Not thread-safe.
#pragma once

#include <curl/curl.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/base/clock.h"
#include "runtime/store/object_store.h"
#include "runtime/store/s3_answer.h"

namespace deltamesh {

struct S3Options {
  std::string server;  // http(s)://host:port
  std::string bucket;
  std::string prefix;  // of every name; empty, or with '/' at its end
  std::string region = "us-east-1";
  std::string access_key, secret_key, session_token;

  absl::Duration connect_max = absl::Seconds(3);
  absl::Duration call_max = absl::Seconds(20);      // of one try, and
  int64_t bytes_per_second_min = int64_t{4} << 20;  // so much more time for its bytes
  int tries = 3;
  absl::Duration retry_after = absl::Milliseconds(200);  // doubled for the next try
  absl::Duration down_min = absl::Seconds(1), down_max = absl::Minutes(1);
  int64_t page_objects = 1000;                  // of one page of a listing
  int64_t object_bytes_max = int64_t{5} << 30;  // what S3 takes in one piece
};

// From http(s)://host:port/bucket[/prefix] and the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
// AWS_SESSION_TOKEN, AWS_REGION. `variable` gives the value of one; empty when it is not set.
absl::StatusOr<S3Options> ParseS3(std::string_view url,
                                  const std::function<std::string(const char*)>& variable);

class S3Client final : public ObjectStore {
 public:
  // `clock` must outlive it.
  static absl::StatusOr<std::unique_ptr<S3Client>> Create(S3Options options, const Clock* clock);
  ~S3Client() override;

  int64_t object_bytes_max() const override { return options_.object_bytes_max; }
  absl::Status Put(const std::string& name, ByteReader& body,
                   const CancelCheck& cancelled) override;
  absl::Status PutIf(const std::string& name, ByteReader& body, const std::string& version,
                     const CancelCheck& cancelled) override;
  absl::StatusOr<std::string> Get(const std::string& name, int64_t bytes_max,
                                  const CancelCheck& cancelled, std::string* version = nullptr,
                                  std::string_view magic = {}) override;
  absl::StatusOr<std::unique_ptr<ByteReader>> Open(const std::string& name, int64_t bytes,
                                                   const CancelCheck& cancelled) override;
  absl::StatusOr<std::vector<ObjectInfo>> List(const std::string& prefix, int64_t most,
                                               const CancelCheck& cancelled) override;
  absl::Status Remove(const std::string& name) override;

  // Tries that were answered badly or not at all.
  uint64_t failed_tries() const { return failed_tries_; }

 private:
  class Reader;
  struct Call;

  S3Client(S3Options options, const Clock* clock, CURL* curl)
      : options_(std::move(options)), clock_(clock), curl_(curl) {}
  absl::Status PutWhen(const std::string& name, ByteReader& body, std::string condition,
                       const CancelCheck& cancelled);
  // Retries; the reply of the last try. NOT_FOUND and other refusals come as a status.
  absl::StatusOr<S3Answer> Do(Call& call, const CancelCheck& cancelled);
  // Sets the handle up for a call; the headers must live until it ends.
  using Headers = std::unique_ptr<curl_slist, void (*)(curl_slist*)>;
  Headers Prepare(Call& call);
  absl::StatusOr<S3Answer> Try(Call& call, const CancelCheck& cancelled);
  // What an answer of 404 says.
  absl::Status NotThere(const Call& call, const std::string& text) const;
  S3Answer AnswerTo(Call& call) const;
  std::string UrlOf(const std::string& name) const;

  const S3Options options_;
  const Clock* const clock_;
  CURL* const curl_;
  absl::Time down_until_ = absl::InfinitePast();
  absl::Duration down_ = absl::ZeroDuration();
  std::string down_why_;  // the last failure, as a message
  uint64_t failed_tries_ = 0;
};

}  // namespace deltamesh
