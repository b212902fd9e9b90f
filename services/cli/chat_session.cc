#include "services/cli/chat_session.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <optional>
#include <thread>

#include "runtime/base/status.h"
#include "runtime/text/utf8.h"

namespace deltamesh {
namespace {

constexpr std::chrono::seconds kCallMax(60);          // a state may have to be read from far away
constexpr std::chrono::milliseconds kTurnEnds(2000);  // a cut turn is over within

// Calls `method` with the session's names and what `fill` adds.
template <typename Request, typename Response, typename Fill>
grpc::Status Call(v1::Inference::Stub* stub, const std::string& name, const std::string& salt,
                  grpc::Status (v1::Inference::Stub::*method)(grpc::ClientContext*, const Request&,
                                                              Response*),
                  Response* response, Fill fill) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallMax);
  Request request;
  request.set_session(name);
  request.set_salt(salt);
  fill(&request);
  return (stub->*method)(&context, request, response);
}

}  // namespace

// The router takes names in UTF-8 only; a message that holds others cannot even be sent.
bool ChatSession::IsText(const char* what, const std::string& name) const {
  const std::optional<size_t> bad = FirstInvalidUtf8(name);
  if (bad) {
    *out_ << absl::StrFormat("(failed: %s: byte %d of the name is not UTF-8; use another)\n", what,
                             *bad)
          << std::flush;
  }
  return !bad;
}

bool ChatSession::Open() {
  if (!IsText("--session", name_) || !IsText("--salt", salt_)) return false;
  v1::ResumeSessionResponse resumed;
  const grpc::Status status = Call<v1::ResumeSessionRequest>(
      stub_, name_, salt_, &v1::Inference::Stub::ResumeSession, &resumed, [](auto*) {});
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    *out_ << "(session " << name_ << " is new)\n" << std::flush;
    return true;
  }
  if (!status.ok()) {
    Failed(status);
    return false;
  }
  tokens_ = resumed.tokens();
  *out_ << absl::StrFormat("(session %s goes on after %d tokens: ", name_, tokens_);
  if (resumed.position() == 0) {
    *out_ << "no state is held, all will be computed again";
  } else if (resumed.tier() == "memory") {
    *out_ << absl::StrFormat("%d of them held in memory by %s", resumed.position(),
                             resumed.worker());
  } else {
    *out_ << absl::StrFormat("%d of them restored from %s by %s", resumed.position(),
                             resumed.tier(), resumed.worker());
  }
  *out_ << ")\n" << std::flush;
  return true;
}

void ChatSession::Fill(v1::GenerateRequest* request) const {
  request->mutable_cache()->set_session(name_);
  request->mutable_cache()->set_salt(salt_);
  if (!begun()) return;
  request->set_append_to_session(true);
  request->set_session_tokens(tokens_);
}

void ChatSession::Refresh(bool said) {
  if (reset_ && !said) return;
  v1::SessionInfo info;
  const auto until = std::chrono::steady_clock::now() + kTurnEnds;
  do {
    info.Clear();
    const grpc::Status status = Call<v1::GetSessionRequest>(
        stub_, name_, salt_, &v1::Inference::Stub::GetSession, &info, [](auto*) {});
    const bool unknown = status.error_code() == grpc::StatusCode::NOT_FOUND;
    if (!status.ok() && !unknown) return Failed(status);
    if (!info.running() && !(unknown && said)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (std::chrono::steady_clock::now() < until);
  tokens_ = info.tokens();
  reset_ = false;
}

bool ChatSession::Command(const std::string& line) {
  constexpr std::string_view kFork = "/fork ";
  if (line == "/session") {
    Show();
  } else if (line == "/suspend") {
    Suspend();
  } else if (line.starts_with(kFork) && line.size() > kFork.size()) {
    Fork(line.substr(kFork.size()));
  } else {
    return false;
  }
  *out_ << std::flush;
  return true;
}

void ChatSession::Show() {
  v1::SessionInfo info;
  const grpc::Status status = Call<v1::GetSessionRequest>(
      stub_, name_, salt_, &v1::Inference::Stub::GetSession, &info, [](auto*) {});
  if (!status.ok()) return Failed(status);
  *out_ << absl::StrFormat("(session %s: %d tokens%s", name_, info.tokens(),
                           info.suspended() ? ", suspended" : "");
  for (const v1::SessionHolder& h : info.holders()) {
    *out_ << absl::StrFormat("; %s holds %d, %s", h.worker(), h.position(), h.tier());
  }
  *out_ << ")\n";
}

void ChatSession::Suspend() {
  v1::SuspendSessionResponse done;
  const grpc::Status status = Call<v1::SuspendSessionRequest>(
      stub_, name_, salt_, &v1::Inference::Stub::SuspendSession, &done, [](auto*) {});
  if (!status.ok()) return Failed(status);
  *out_ << absl::StrFormat(
      "(suspended: %d tokens, the state of %d of them, %d bytes written to %s by %s; the next "
      "message "
      "resumes it)\n",
      done.tokens(), done.position(), done.bytes(), done.tier(), done.worker());
}

void ChatSession::Fork(const std::string& to) {
  if (!IsText("/fork", to)) return;
  v1::ForkSessionResponse forked;
  const grpc::Status status =
      Call<v1::ForkSessionRequest>(stub_, name_, salt_, &v1::Inference::Stub::ForkSession, &forked,
                                   [&to](auto* request) { request->set_new_session(to); });
  if (!status.ok()) return Failed(status);
  *out_ << absl::StrFormat("(session %s begins with the same %d tokens)\n", to, forked.tokens());
}

void ChatSession::SayGoodbye() const {
  if (!begun()) return;
  *out_ << absl::StrFormat("(session %s has %d tokens; --session %s goes on with it)\n", name_,
                           tokens_, name_)
        << std::flush;
}

void ChatSession::Failed(const grpc::Status& status) const {
  *out_ << "(failed: " << status.error_message() << ")\n" << std::flush;
}

}  // namespace deltamesh
