#include "runtime/store/s3_client.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr size_t kTextMax = size_t{16}
                            << 20;  // of an answer that is text: a page of a listing, an error
constexpr size_t kPageMax = size_t{64} << 10;  // of one in place of a range

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '-' || c == '_' || c == '.' || c == '~';
    out += plain ? std::string(1, c) : absl::StrFormat("%%%02X", static_cast<unsigned char>(c));
  }
  return out;
}

// An address without what could be a password in it: for messages.
std::string WithoutUser(std::string_view url) {
  const size_t scheme = url.find("://");
  const size_t host = scheme == std::string_view::npos ? 0 : scheme + 3;
  const size_t user_end = url.rfind('@', url.find('/', host));
  if (user_end == std::string_view::npos || user_end < host) return std::string(url);
  return std::string(url.substr(0, host)) + std::string(url.substr(user_end + 1));
}

}  // namespace

absl::StatusOr<S3Options> ParseS3(std::string_view url,
                                  const std::function<std::string(const char*)>& variable) {
  const auto bad = [&](const char* what) {
    return InvalidArgument(
        "--store-s3: \"%s\" %s; use http://host:port/bucket or .../bucket/prefix", WithoutUser(url),
        what);
  };
  S3Options options;
  const size_t scheme = url.find("://");
  if (scheme == std::string_view::npos ||
      (!url.starts_with("http://") && !url.starts_with("https://"))) {
    return bad("does not begin with http:// or https://");
  }
  const size_t host_end = url.find('/', scheme + 3);
  if (host_end == std::string_view::npos || host_end == scheme + 3) return bad("names no bucket");
  options.server = url.substr(0, host_end);
  if (options.server.find('@') != std::string::npos)
    return bad("came with a user or password, which belong in the environment");
  std::string_view rest = url.substr(host_end + 1);
  const size_t bucket_end = std::min(rest.find('/'), rest.size());
  options.bucket = rest.substr(0, bucket_end);
  if (options.bucket.empty()) return bad("names no bucket");
  rest.remove_prefix(std::min(bucket_end + 1, rest.size()));
  // Servers that keep objects as files, and proxies, take such parts for another folder's name.
  std::string path = options.bucket + (rest.empty() ? "" : "/") + std::string(rest);
  if (path.ends_with('/')) path.pop_back();
  for (const auto& part : absl::StrSplit(path, '/')) {
    if (part.empty() || part == "." || part == "..") {
      return bad("has a part that is empty, '.' or '..' in its path");
    }
  }
  options.prefix = rest;
  if (!options.prefix.empty() && !options.prefix.ends_with('/')) options.prefix += '/';
  for (const char c : options.bucket + options.prefix) {
    if (!isalnum(static_cast<unsigned char>(c)) &&
        std::string_view("-_./").find(c) == std::string_view::npos) {
      return bad("has other than letters, digits, '-', '_', '.' and '/' in its path");
    }
  }
  options.access_key = variable("AWS_ACCESS_KEY_ID");
  options.secret_key = variable("AWS_SECRET_ACCESS_KEY");
  options.session_token = variable("AWS_SESSION_TOKEN");
  if (const std::string region = variable("AWS_REGION"); !region.empty()) options.region = region;
  if (options.access_key.empty() || options.secret_key.empty()) {
    return FailedPrecondition(
        "--store-s3: %s needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
        "environment; set them",
        url);
  }
  return options;
}

// ---- one call ------------------------------------------------------------------------------------

struct S3Client::Call : S3Asked {
  std::string url;
  ByteReader* body = nullptr;                       // of a PUT
  int64_t range_end = -1;                           // excluded
  std::span<const std::span<std::byte>> into = {};  // where a range goes; else the answer is text
  size_t text_max = kTextMax;                       // bytes of it

  // While it runs.
  int64_t sent = 0;
  absl::Status body_status;
  size_t piece = 0, offset = 0;
  int64_t received = 0;
  bool text_full = false;
  bool odd = false;  // what came was not the server's
  std::string text;
  const CancelCheck* cancelled = nullptr;
  CURL* curl = nullptr;

  void Begin() {
    sent = received = 0;
    piece = offset = 0;
    text_full = odd = false;
    text.clear();
    body_status = absl::OkStatus();
  }
};

namespace {

template <typename Call>
size_t SendBody(char* to, size_t size, size_t count, void* user) {
  auto& call = *static_cast<Call*>(user);
  const int64_t left = call.body->size() - call.sent;
  const auto n = static_cast<size_t>(std::min<int64_t>(left, static_cast<int64_t>(size * count)));
  if (n == 0) return 0;
  call.body_status = call.body->ReadOne(call.sent, {reinterpret_cast<std::byte*>(to), n});
  if (!call.body_status.ok()) return CURL_READFUNC_ABORT;
  call.sent += static_cast<int64_t>(n);
  return n;
}

// From the beginning again, when the connection was lost and the request is repeated on another.
template <typename Call>
int SeekBody(void* user, curl_off_t offset, int origin) {
  if (origin != SEEK_SET) return CURL_SEEKFUNC_CANTSEEK;
  static_cast<Call*>(user)->sent = offset;
  return CURL_SEEKFUNC_OK;
}

template <typename Call>
size_t Receive(char* from, size_t size, size_t count, void* user) {
  auto& call = *static_cast<Call*>(user);
  size_t left = size * count;
  long code = 0;
  curl_easy_getinfo(call.curl, CURLINFO_RESPONSE_CODE, &code);
  if (call.into.empty() || code != 206) {
    call.text_full = call.text.size() + left > (code / 100 == 2 ? call.text_max : kTextMax);
    if (call.text_full) return 0;
    call.text.append(from, left);
    return size * count;
  }
  while (left > 0) {
    while (call.piece < call.into.size() && call.offset == call.into[call.piece].size()) {
      ++call.piece;
      call.offset = 0;
    }
    if (call.piece == call.into.size()) return 0;  // more than the range asked for
    const std::span<std::byte> to = call.into[call.piece].subspan(call.offset);
    const size_t n = std::min(left, to.size());
    std::memcpy(to.data(), from, n);
    from += n;
    left -= n;
    call.offset += n;
    call.received += static_cast<int64_t>(n);
  }
  return size * count;
}

template <typename Call>
int Progress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  const auto& call = *static_cast<Call*>(user);
  return call.cancelled != nullptr && *call.cancelled && (*call.cancelled)() ? 1 : 0;
}

// It reads as if nothing had been done: callers go by that.
bool SaysUndone(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsResourceExhausted(status) ||
         absl::IsInvalidArgument(status);
}

// libcurl wants to be set up once per process.
bool SetUpCurl() {
  static const bool done = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
  return done;
}

}  // namespace

absl::StatusOr<std::unique_ptr<S3Client>> S3Client::Create(S3Options options, const Clock* clock) {
  CURL* const curl = SetUpCurl() ? curl_easy_init() : nullptr;
  if (curl == nullptr) return Internal("libcurl could not be set up");
  return std::unique_ptr<S3Client>(new S3Client(std::move(options), clock, curl));
}

S3Client::~S3Client() { curl_easy_cleanup(curl_); }

std::string S3Client::UrlOf(const std::string& name) const {
  return absl::StrFormat("%s/%s/%s%s", options_.server, options_.bucket, options_.prefix, name);
}

S3Client::Headers S3Client::Prepare(Call& call) {
  curl_easy_reset(curl_);
  const auto set = [this](CURLoption option, auto value) {
    curl_easy_setopt(curl_, option, value);
  };
  set(CURLOPT_URL, call.url.c_str());
  set(CURLOPT_PATH_AS_IS, 1L);
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  const std::string sign = absl::StrFormat("aws:amz:%s:s3", options_.region);
  set(CURLOPT_AWS_SIGV4, sign.c_str());
  set(CURLOPT_USERNAME, options_.access_key.c_str());
  set(CURLOPT_PASSWORD, options_.secret_key.c_str());
  int64_t bytes = 0;
  // What is sent carries checksums of its own, so its hash is left out of the signature.
  curl_slist* headers = curl_slist_append(nullptr, "x-amz-content-sha256: UNSIGNED-PAYLOAD");
  set(CURLOPT_EXPECT_100_TIMEOUT_MS, 200L);
  if (!options_.session_token.empty()) {
    headers =
        curl_slist_append(headers, ("x-amz-security-token: " + options_.session_token).c_str());
  }
  if (!call.condition.empty()) headers = curl_slist_append(headers, call.condition.c_str());
  switch (call.method) {
    case Call::kGet:
      if (call.range_begin >= 0) {
        const std::string range = absl::StrFormat("%d-%d", call.range_begin, call.range_end - 1);
        bytes = call.range_end - call.range_begin;
        set(CURLOPT_RANGE, range.c_str());
      }
      break;
    case Call::kPut:
      bytes = call.body->size();
      headers = curl_slist_append(headers, "Content-Type: application/octet-stream");
      set(CURLOPT_UPLOAD, 1L);
      set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(bytes));
      set(CURLOPT_READFUNCTION, &SendBody<Call>);
      set(CURLOPT_READDATA, &call);
      set(CURLOPT_SEEKFUNCTION, &SeekBody<Call>);
      set(CURLOPT_SEEKDATA, &call);
      break;
    case Call::kDelete:
      set(CURLOPT_CUSTOMREQUEST, "DELETE");
      break;
  }
  set(CURLOPT_HTTPHEADER, headers);
  set(CURLOPT_WRITEFUNCTION, &Receive<Call>);
  set(CURLOPT_WRITEDATA, &call);
  set(CURLOPT_XFERINFOFUNCTION, &Progress<Call>);
  set(CURLOPT_XFERINFODATA, &call);
  set(CURLOPT_NOPROGRESS, 0L);
  set(CURLOPT_CONNECTTIMEOUT_MS,
      static_cast<long>(absl::ToInt64Milliseconds(options_.connect_max)));
  const absl::Duration limit =
      options_.call_max + absl::Seconds(static_cast<double>(bytes) /
                                        static_cast<double>(options_.bytes_per_second_min));
  set(CURLOPT_TIMEOUT_MS, static_cast<long>(absl::ToInt64Milliseconds(limit)));
  return Headers(headers, &curl_slist_free_all);
}

// Whoever hears NOT_FOUND begins a conversation anew, so it takes a server that says that it has no such
// object: a bucket that is gone and a proxy's page are answered with 404, too. From some servers no reason
// comes with the answer to a DELETE. What a condition names and is gone by now was replaced, in a way.
absl::Status S3Client::NotThere(const Call& call, const std::string& text) const {
  const S3Reason why(text);
  const bool may_lack_reason = call.method == Call::kDelete;
  if (call.of_object && (why.code == "NoSuchKey" || (may_lack_reason && text.empty()))) {
    if (call.method != Call::kPut) return NotFound("%s: %s", call.doing, why.code);
    if (!call.condition.empty()) return Aborted("%s: answer 404, %s", call.doing, why.code);
  }
  return Unavailable(
      "%s: answer 404, %s, which is not that of a bucket that lacks an object; check that the "
      "bucket of --store-s3 is there: %s/%s",
      call.doing, why.told, options_.server, options_.bucket);
}

absl::StatusOr<S3Answer> S3Client::Try(Call& call, const CancelCheck& cancelled) {
  call.Begin();
  call.cancelled = &cancelled;
  call.curl = curl_;
  const Headers headers = Prepare(call);
  const CURLcode code = curl_easy_perform(curl_);
  if (code == CURLE_ABORTED_BY_CALLBACK) {
    if (!call.body_status.ok()) return call.body_status;
    return Cancelled("%s: nobody waits for it", call.doing);
  }
  if (code != CURLE_OK && !call.text_full) {
    return Unavailable("%s: %s", call.doing, curl_easy_strerror(code));
  }
  const S3Answer reply = AnswerTo(call);
  if (reply.code == 404) return NotThere(call, reply.text);
  if (reply.code / 100 != 2) return S3Refusal(call, reply);
  if (const std::string odd = NotOfS3(call, reply); !odd.empty()) {
    call.odd = true;
    const bool object = call.method == Call::kGet && call.of_object && call.range_begin < 0;
    return Unavailable(
        "%s: a proxy or captive page answered in place of the object store: answer %d, %s; look at "
        "--store-s3's endpoint, %s%s",
        call.doing, reply.code, odd, options_.server,
        object ? ", or remove the object if it was put by other means" : "");
  }
  if (call.text_full) {
    return ResourceExhausted("%s: more than %d bytes came", call.doing, call.text_max);
  }
  return reply;
}

S3Answer S3Client::AnswerTo(Call& call) const {
  S3Answer answer;
  curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &answer.code);
  answer.text = std::move(call.text);
  const auto header = [this](const char* name) -> std::string {
    curl_header* found = nullptr;
    const bool there = curl_easy_header(curl_, name, 0, CURLH_HEADER, -1, &found) == CURLHE_OK;
    return there ? found->value : "";
  };
  answer.etag = header("ETag");
  answer.type = header("Content-Type");
  answer.encoding = header("Content-Encoding");
  answer.range = header("Content-Range");
  answer.request_id = header("x-amz-request-id");
  long version = 0;
  curl_easy_getinfo(curl_, CURLINFO_HTTP_VERSION, &version);
  answer.framed = version >= CURL_HTTP_VERSION_2_0 || !header("Content-Length").empty() ||
                  absl::EqualsIgnoreCase(header("Transfer-Encoding"), "chunked");
  return answer;
}

absl::StatusOr<S3Answer> S3Client::Do(Call& call, const CancelCheck& cancelled) {
  if (clock_->Now() < down_until_) {
    return Unavailable("%s: the object store is asked again in %s; before: %s", call.doing,
                       absl::FormatDuration(down_until_ - clock_->Now()), down_why_);
  }
  absl::Duration wait = options_.retry_after;
  absl::StatusOr<S3Answer> reply;
  bool unanswered = false;  // a try that may have been carried out all the same
  for (int attempt = 1;; ++attempt) {
    reply = Try(call, cancelled);
    if (!absl::IsUnavailable(reply.status())) break;
    ++failed_tries_;
    unanswered = true;
    if (attempt >= options_.tries) break;
    for (absl::Duration slept; slept < wait; slept += absl::Milliseconds(20)) {
      if (cancelled && cancelled()) return Cancelled("%s: nobody waits for it", call.doing);
      absl::SleepFor(absl::Milliseconds(20));
    }
    wait *= 2;
  }
  // One odd object says nothing of the others.
  const bool of_one = call.odd && call.method == Call::kGet && call.of_object;
  if (absl::IsUnavailable(reply.status()) && !of_one) {
    down_ = std::clamp(down_ * 2, options_.down_min, options_.down_max);
    down_until_ = clock_->Now() + down_;
    down_why_ = MessageOf(reply.status());
  } else if (!absl::IsCancelled(reply.status()) && !of_one) {
    down_ = absl::ZeroDuration();
  }
  // The server answered, so it is not down.
  if (unanswered && call.method == Call::kPut && SaysUndone(reply.status())) {
    return Unavailable("%s; an earlier try may have been carried out", MessageOf(reply.status()));
  }
  return reply;
}

// ---- what it does --------------------------------------------------------------------------------

class S3Client::Reader final : public ByteReader {
 public:
  Reader(S3Client* client, std::string name, int64_t size, CancelCheck cancelled)
      : client_(client), name_(std::move(name)), size_(size), cancelled_(std::move(cancelled)) {}
  int64_t size() const override { return size_; }

  absl::Status Read(int64_t offset, std::span<const std::span<std::byte>> pieces) override {
    int64_t bytes = 0;
    for (const auto& piece : pieces) bytes += static_cast<int64_t>(piece.size());
    if (bytes == 0) return absl::OkStatus();
    if (offset + bytes > size_) {
      return absl::OutOfRangeError(absl::StrFormat("%d bytes at %d of %d", bytes, offset, size_));
    }
    Call call;
    call.method = Call::kGet;
    call.url = client_->UrlOf(name_);
    call.doing = "get " + name_;
    call.range_begin = offset;
    call.range_end = offset + bytes;
    call.into = pieces;
    call.text_max = kPageMax;
    ASSIGN_OR_RETURN(const S3Answer reply, client_->Do(call, cancelled_));
    // Its listing is out of date, so nothing is known of it: least of all that it is damaged.
    const int64_t total = S3RangeTotal(reply);
    if (total >= 0 && total != size_) {
      return NotFound("get %s: it has %d bytes and was listed with %d; it was put anew", name_,
                      total, size_);
    }
    if (etag_.empty()) etag_ = reply.etag;
    if (!reply.etag.empty() && reply.etag != etag_) {
      return NotFound("get %s: it was put anew while it was read", name_);
    }
    if (call.received != bytes) {
      return Unavailable("get %s: %d bytes of %d came", name_, call.received, bytes);
    }
    return absl::OkStatus();
  }

 private:
  S3Client* const client_;
  const std::string name_;
  const int64_t size_;
  const CancelCheck cancelled_;
  std::string etag_;  // of its first answer; empty where the server gives none
};

absl::Status S3Client::Put(const std::string& name, ByteReader& body,
                           const CancelCheck& cancelled) {
  return PutWhen(name, body, "", cancelled);
}

absl::Status S3Client::PutIf(const std::string& name, ByteReader& body, const std::string& version,
                             const CancelCheck& cancelled) {
  const absl::Status status =
      PutWhen(name, body, version.empty() ? "If-None-Match: *" : "If-Match: " + version, cancelled);
  // Servers of before such conditions say so, or ignore them.
  return absl::IsUnimplemented(status) ? PutWhen(name, body, "", cancelled) : status;
}

absl::Status S3Client::PutWhen(const std::string& name, ByteReader& body, std::string condition,
                               const CancelCheck& cancelled) {
  if (body.size() > options_.object_bytes_max) {
    return ResourceExhausted("put %s: %d bytes; an object has at most %d", name, body.size(),
                             options_.object_bytes_max);
  }
  Call call;
  call.method = Call::kPut;
  call.url = UrlOf(name);
  call.doing = "put " + name;
  call.body = &body;
  call.condition = std::move(condition);
  return Do(call, cancelled).status();
}

absl::StatusOr<std::string> S3Client::Get(const std::string& name, int64_t bytes_max,
                                          const CancelCheck& cancelled, std::string* version,
                                          std::string_view magic) {
  Call call;
  call.method = Call::kGet;
  call.url = UrlOf(name);
  call.doing = "get " + name;
  call.text_max = static_cast<size_t>(bytes_max);
  call.magic = magic;
  ASSIGN_OR_RETURN(S3Answer reply, Do(call, cancelled));
  if (version != nullptr) *version = reply.etag;
  return std::move(reply.text);
}

absl::StatusOr<std::unique_ptr<ByteReader>> S3Client::Open(const std::string& name, int64_t bytes,
                                                           const CancelCheck& cancelled) {
  return std::make_unique<Reader>(this, name, bytes, cancelled);
}

absl::StatusOr<std::vector<ObjectInfo>> S3Client::List(const std::string& prefix, int64_t most,
                                                       const CancelCheck& cancelled) {
  std::vector<ObjectInfo> out;
  std::string token;
  for (;;) {
    Call call;
    call.doing = "list " + prefix;
    call.of_object = false;
    // Sorted by name, as the signature wants it.
    call.url = absl::StrFormat("%s/%s?", options_.server, options_.bucket);
    if (!token.empty()) call.url += "continuation-token=" + Escaped(token) + "&";
    call.url += absl::StrFormat("list-type=2&max-keys=%d&prefix=%s", options_.page_objects,
                                Escaped(options_.prefix + prefix));
    ASSIGN_OR_RETURN(const S3Answer reply, Do(call, cancelled));
    ASSIGN_OR_RETURN(S3Page page, ParseS3Page(reply.text, call.doing));
    for (ObjectInfo& info : page.objects) {
      if (!info.name.starts_with(options_.prefix)) continue;
      info.name.erase(0, options_.prefix.size());
      out.push_back(std::move(info));
      if (static_cast<int64_t>(out.size()) > most) {
        return ResourceExhausted("list %s: more than %d objects", prefix, most);
      }
    }
    if (page.next.empty()) return out;
    if (page.next == token) {
      return FailedPrecondition("list %s: a page says that it comes next after itself", prefix);
    }
    token = std::move(page.next);
  }
}

absl::Status S3Client::Remove(const std::string& name) {
  Call call;
  call.method = Call::kDelete;
  call.url = UrlOf(name);
  call.doing = "remove " + name;
  const absl::Status status = Do(call, nullptr).status();
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

}  // namespace deltamesh
