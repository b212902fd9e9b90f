#include "runtime/store/s3_answer.h"

#include <algorithm>
#include <boost/property_tree/ptree.hpp>
#include <boost/property_tree/xml_parser.hpp>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int kDepthMax = 16;                    // of elements: the parser recurses
constexpr size_t kReasonMax = size_t{16} << 10;  // of a text that is looked at for a reason
constexpr size_t kSaidMax = 200, kCodeMax = 64;  // of what a server says

bool IsPlain(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
}

// Where the tag that begins at `at`, behind its '<', has its '>'; npos when it is written in a way that no
// server does. `empty`: it has no end tag.
size_t TagEnd(std::string_view xml, size_t at, bool* empty) {
  size_t end = at;
  while (end < xml.size() && (IsPlain(xml[end]) || xml[end] == ':')) ++end;
  if (end == at) return std::string_view::npos;
  for (; end < xml.size() && xml[end] != '>'; ++end) {
    const char c = xml[end];
    if (c == '"' || c == '\'') {
      if (xml[end - 1] != '=') return std::string_view::npos;
      end = xml.find(c, end + 1);
      if (end == std::string_view::npos) return end;
    } else if (!IsPlain(c) && std::string_view(" \t\r\n:=/").find(c) == std::string_view::npos) {
      return std::string_view::npos;
    }
  }
  if (end >= xml.size()) return std::string_view::npos;
  *empty = xml[end - 1] == '/';
  return end;
}

// Elements lie in few others. Comments and the like, and quotes where none belong, could hide some from this
// and not from the parser; no server's answer has any.
bool IsShallow(std::string_view xml) {
  int depth = 0;
  for (size_t at = 0; (at = xml.find('<', at)) != std::string_view::npos;) {
    const std::string_view rest = xml.substr(++at);
    bool empty = false;
    if (rest.starts_with('?')) {
      at = xml.find("?>", at + 1);
    } else if (rest.starts_with('/')) {
      --depth;
      at = xml.find('>', at);
    } else {
      at = TagEnd(xml, at, &empty);
      depth += empty ? 0 : 1;
    }
    if (at == std::string_view::npos || depth < 0 || depth > kDepthMax) return false;
  }
  return true;
}

// The text of an XML answer; an empty tree when it is none, or none that a server would give.
boost::property_tree::ptree Xml(const std::string& text) {
  boost::property_tree::ptree tree;
  if (!IsShallow(text)) return tree;
  try {
    std::istringstream in(text);
    boost::property_tree::read_xml(in, tree);
  } catch (const boost::property_tree::xml_parser_error&) {
    tree.clear();
  }
  return tree;
}

// What a server, or who answered in its place, says: for logs and terminals, which obey control characters.
std::string Shown(std::string text, size_t most) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool wide = c == 0xC2 && next >= 0x80 && next <= 0x9F;  // U+0080 to U+009F
    if (wide) text[i + 1] = ' ';
    if (wide || c < 0x20 || c == 0x7F) text[i] = ' ';
  }
  return text.empty() ? text : SafeMessage(text, most);
}

bool WorthARetry(long code) {
  return code == 408 || code == 429 || code == 500 || code == 502 || code == 503 || code == 504;
}

// Nothing can be put at that name, whoever tries: a server that keeps objects as files has a folder there, or
// a file where the name has a folder.
bool IsOfTheName(const S3Reason& why) {
  return why.IsOneOf("ObjectParentIsFile", "ExistingObjectIsDirectory", "ObjectExistsAsDirectory",
                     "XMinioObjectExistsAsDirectory", "XMinioParentIsObject");
}

std::string MediaType(std::string_view type) {
  return absl::AsciiStrToLower(absl::StripAsciiWhitespace(ToAbsl(type.substr(0, type.find(';')))));
}

// What pages, error texts and listings have, and no object that was put here.
bool IsOfAText(std::string_view type) {
  const std::string media = MediaType(type);
  return media == "text/html" || media == "application/xhtml+xml" || media == "text/xml" ||
         media == "application/xml" || media == "application/json";
}

// Where the range begins that was answered: "bytes 0-9/10". -1: it does not say.
int64_t RangeBegin(std::string_view header) {
  int64_t begin = -1;
  if (!header.starts_with("bytes ")) return -1;
  header.remove_prefix(6);
  return absl::SimpleAtoi(ToAbsl(header.substr(0, header.find('-'))), &begin) ? begin : -1;
}

}  // namespace

S3Reason::S3Reason(const std::string& text) {
  const bool is_one = text.size() <= kReasonMax && text.find("<Error") != std::string::npos;
  const auto tree = is_one ? Xml(text) : boost::property_tree::ptree();
  // Whole or not at all: what is left of an odd one could be another.
  code = tree.get("Error.Code", "");
  if (code.empty() || code.size() > kCodeMax || !std::all_of(code.begin(), code.end(), IsPlain)) {
    code = "no reason";
  }
  const std::string said = Shown(tree.get("Error.Message", ""), kSaidMax);
  told = said.empty() ? code : absl::StrFormat("%s (%s)", code, said);
}

// A code says more than a status: keys, tokens and regions that are wrong are 400 to some, and a race that
// was lost has many names.
absl::Status S3Refusal(const S3Asked& asked, const S3Answer& answer) {
  const S3Reason why(answer.text);
  const long code = answer.code;
  if (why.IsOneOf("RequestTimeTooSkewed", "RequestExpired")) {
    return FailedPrecondition("%s: %s; set the clock of this machine", asked.doing, why.told);
  }
  if (why.IsOneOf("QuotaExceeded", "XMinioAdminBucketQuotaExceeded")) {
    return ResourceExhausted("%s: %s; raise the quota of the bucket or of its user", asked.doing,
                             why.told);
  }
  if (code == 401 || code == 403 ||
      why.IsOneOf("AuthorizationHeaderMalformed", "ExpiredToken", "InvalidToken",
                  "InvalidAccessKeyId")) {
    return FailedPrecondition(
        "%s: %s; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION",
        asked.doing, why.told);
  }
  const bool conflict =
      code == 409 && !IsOfTheName(why) &&
      (!asked.condition.empty() || why.IsOneOf("ConditionalRequestConflict", "OperationAborted"));
  if (code == 412 || conflict) {
    return Aborted("%s: answer %d, %s", asked.doing, code, why.told);
  }
  if (code / 100 == 3) {
    return Unavailable(
        "%s: answer %d, %s: it sends elsewhere; look at --store-s3's endpoint and AWS_REGION",
        asked.doing, code, why.told);
  }
  if (code == 416 && asked.range_begin >= 0 && why.code == "InvalidRange") {
    return NotFound("%s: it is shorter than it was listed; it was put anew", asked.doing);
  }
  if (code == 501)
    return absl::UnimplementedError(absl::StrFormat("%s: %s", asked.doing, why.told));
  if (WorthARetry(code) || why.code == "RequestTimeout") {
    return Unavailable("%s: answer %d, %s", asked.doing, code, why.told);
  }
  return Internal("%s: answer %d, %s", asked.doing, code, why.told);
}

// A proxy or a captive page can answer in the server's place, with 200 and a page, and cut or encode what
// passes through it. What tells:
//
//   * A server gives an ETag for what it took (all but a few do, and those cannot be used), and has no text
//     for a put or a removal.
//   * A range is 206 and names the bytes that were asked for; a page comes whole.
//   * A whole object is 200, as it was put, and tells its length. It has an ETag or a request id (each is
//     lacked by some servers), and is no page, error text or listing by its type.
//
// An object that begins as it should is believed without the last. How long it is tells nothing: another
// worker may have put it anew. What is the server's and does not begin so is what damage looks like: the
// caller's to judge.
std::string NotOfS3(const S3Asked& asked, const S3Answer& answer) {
  const bool page = IsOfAText(answer.type);
  switch (asked.method) {
    case S3Asked::kPut:
      if (!answer.text.empty()) return "a text for what was put";
      return answer.etag.empty() ? "no ETag for what was put (or a server that gives none)" : "";
    case S3Asked::kDelete:
      // 204 has no text, whatever type it gives.
      return answer.code == 204 || (answer.text.empty() && !page) ? ""
                                                                  : "a text for what was removed";
    case S3Asked::kGet:
      break;
  }
  if (!asked.of_object) {
    return answer.text.find("<ListBucketResult") == std::string::npos ? "no listing" : "";
  }
  if (!answer.encoding.empty() && !absl::EqualsIgnoreCase(answer.encoding, "identity")) {
    return absl::StrFormat("Content-Encoding \"%s\"", Shown(answer.encoding, kCodeMax));
  }
  if (asked.range_begin >= 0) {
    const bool same = answer.code == 206 && RangeBegin(answer.range) == asked.range_begin;
    return same ? "" : "not the range that was asked for";
  }
  if (answer.code != 200) return "which is not of a whole object";
  if (!answer.framed) return "without its length";
  // As it was put here; or by other means, and then a page's ETag may be weak.
  const bool tagged =
      !answer.etag.empty() &&
      (!answer.etag.starts_with("W/") || MediaType(answer.type) == "application/octet-stream");
  const bool servers = !page && (tagged || !answer.request_id.empty());
  if (servers || answer.text.starts_with(asked.magic)) return "";
  return absl::StrFormat("Content-Type \"%s\", %s ETag, %s x-amz-request-id",
                         Shown(answer.type, kCodeMax), answer.etag.empty() ? "no" : "an",
                         answer.request_id.empty() ? "no" : "an");
}

int64_t S3RangeTotal(const S3Answer& answer) {
  const size_t slash = answer.range.find('/');
  int64_t total = -1;
  const bool told = answer.range.starts_with("bytes ") && slash != std::string::npos &&
                    absl::SimpleAtoi(answer.range.substr(slash + 1), &total);
  return told ? total : -1;
}

absl::StatusOr<S3Page> ParseS3Page(const std::string& text, const std::string& doing) {
  const auto tree = Xml(text);
  const auto result = tree.get_child_optional("ListBucketResult");
  if (!result) return Unavailable("%s: the answer is no listing", doing);
  S3Page page;
  for (const auto& [tag, node] : *result) {
    if (tag != "Contents") continue;
    ObjectInfo info;
    info.name = node.get("Key", "");
    info.bytes = node.get<int64_t>("Size", -1);
    absl::ParseTime(absl::RFC3339_full, node.get("LastModified", ""), &info.modified, nullptr);
    if (info.bytes >= 0) page.objects.push_back(std::move(info));
  }
  if (!absl::EqualsIgnoreCase(result->get("IsTruncated", "false"), "true")) return page;
  page.next = result->get("NextContinuationToken", "");
  // Not all of it is worse than none: what it lacks would count as gone.
  if (page.next.empty()) {
    return FailedPrecondition(
        "%s: the server tells no token of the next page; use one that knows ListObjectsV2", doing);
  }
  return page;
}

}  // namespace deltamesh
