#include "services/cli/chat.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <optional>
#include <thread>

#include "CLI/CLI.hpp"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "runtime/base/status.h"
#include "runtime/text/utf8.h"
#include "services/cli/answer_rate.h"
#include "services/cli/chat_session.h"

namespace deltamesh {
namespace {

constexpr size_t kLineBytesMax = 1 << 20;

// Lines from a descriptor, waiting in short turns so that a signal can end the wait.
class LineReader {
 public:
  explicit LineReader(int fd) : fd_(fd) {}

  // False at the end of the input or when `stop` says so.
  bool Next(std::string* line, const std::atomic<bool>& stop) {
    for (;;) {
      if (const size_t end = buffer_.find('\n'); end != buffer_.npos) {
        *line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return true;
      }
      if (stop) return false;
      if (ended_ || buffer_.size() > kLineBytesMax) {
        *line = std::exchange(buffer_, "");
        return !line->empty();
      }
      pollfd p{fd_, POLLIN, 0};
      if (::poll(&p, 1, 100) <= 0) continue;
      char bytes[4096];
      const ssize_t n = ::read(fd_, bytes, sizeof(bytes));
      if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
      if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) ended_ = true;
    }
  }

 private:
  const int fd_;
  std::string buffer_;
  bool ended_ = false;
};

// The call a signal would end, if any. Thread-safe.
class RunningCall {
 public:
  void Set(grpc::ClientContext* context) {
    absl::MutexLock lock(&mu_);
    context_ = context;
  }
  // False when nothing runs.
  bool Cancel() {
    absl::MutexLock lock(&mu_);
    if (context_ == nullptr) return false;
    context_->TryCancel();
    return true;
  }

 private:
  absl::Mutex mu_;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mu_) = nullptr;
};

class Chat {
 public:
  Chat(const ChatOptions& options, int input, std::ostream& out)
      : options_(options),
        out_(out),
        terminal_(isatty(input) != 0),
        reader_(input),
        stub_(v1::Inference::NewStub(
            grpc::CreateChannel(options.router, grpc::InsecureChannelCredentials()))) {
    if (!options_.session.empty()) {
      session_.emplace(stub_.get(), options_.session, options_.salt, &out_);
    }
  }

  int Run(const std::function<int(absl::Duration)>& wait_signal) {
    std::atomic<bool> done = false;
    std::thread signals([&] {
      while (!done) OnSignal(wait_signal(absl::Milliseconds(100)));
    });
    const int code = Converse();
    done = true;
    signals.join();
    return code;
  }

 private:
  void OnSignal(int number) {
    if (number == 0) return;
    if (number == SIGTERM) stop_ = true;
    if (running_.Cancel() || number != SIGINT) return;
    dropped_ = true;
    if (!terminal_) {
      stop_ = true;
    } else {
      out_ << "\n(Ctrl-D or /exit leaves)\n> " << std::flush;
    }
  }

  int Converse() {
    if (!Greet()) return 1;
    if (session_ && !session_->Open()) return 1;
    if (!options_.system.empty() && session_ && session_->begun()) {
      out_ << "(--system is left out: the session has begun; /reset begins it anew with it)\n"
           << std::flush;
    }
    Reset();
    bool failed = false;
    for (std::string line; !stop_;) {
      if (terminal_) out_ << "> " << std::flush;
      if (!NextMessage(&line)) break;
      if (line.empty()) continue;
      if (line == "/exit" || line == "/quit") break;
      if (line == "/reset") {
        if (session_) session_->Reset();
        Reset();
        out_ << "(a new conversation)\n" << std::flush;
        continue;
      }
      if (line[0] == '/') {
        if (!session_ || !session_->Command(line)) Help();
        continue;
      }
      if (!Ask(line) && !terminal_) failed = true;
    }
    if (terminal_) out_ << "\n" << std::flush;
    if (session_) session_->SayGoodbye();
    return failed ? 1 : 0;
  }

  // A line, and those after it while one ends with a backslash; at a terminal Ctrl-C and Ctrl-D drop what was
  // not ended. False at the end of the input.
  bool NextMessage(std::string* message) {
    message->clear();
    for (std::string line; reader_.Next(&line, stop_);) {
      if (dropped_.exchange(false)) message->clear();
      if (!line.empty() && line.back() == '\r') line.pop_back();
      const bool goes_on = line.ends_with('\\');
      if (goes_on) line.back() = '\n';
      *message += line;
      if (!goes_on) return true;
      if (terminal_) out_ << ". " << std::flush;
    }
    return !terminal_ && !message->empty();
  }

  void Help() {
    out_ << "(a line that ends with \\ goes on in the next; /reset begins anew, /exit or Ctrl-D "
            "leaves, Ctrl-C ends an answer"
         << (session_ ? "; /session shows it, /suspend stores it, /fork NAME begins another)\n"
                      : ")\n")
         << std::flush;
  }

  bool Greet() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::ListModelsResponse models;
    const grpc::Status status = stub_->ListModels(&context, {}, &models);
    if (!status.ok() || models.models_size() == 0) {
      out_ << "no router answers at " << options_.router << " (" << status.error_message()
           << "); start one with `deltamesh serve` or pass --router\n"
           << std::flush;
      return false;
    }
    const v1::ModelInfo& m = models.models(0);
    out_ << absl::StrFormat(
        "%s (%s, %d tokens of context)%s\n", m.name(), m.family(), m.context_tokens(),
        m.random_weights() ? ": the weights are random, answers are noise" : "");
    if (terminal_) out_ << "(a line that ends with \\ goes on in the next; /help tells more)\n";
    out_ << std::flush;
    return true;
  }

  void Reset() {
    conversation_.Clear();
    if (options_.thinking) conversation_.set_thinking(*options_.thinking);
    if (!options_.system.empty() && !(session_ && session_->begun())) {
      Say("system", options_.system);
    }
  }

  v1::ChatMessage* Say(const std::string& role, const std::string& content) {
    v1::ChatMessage* m = conversation_.add_messages();
    m->set_role(role);
    m->set_content(content);
    return m;
  }

  v1::GenerateRequest Request() const {
    v1::GenerateRequest request;
    request.set_model(options_.model);
    *request.mutable_chat() = conversation_;
    request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(options_.max_tokens));
    if (options_.temperature) {
      request.mutable_sampling()->set_temperature(static_cast<float>(*options_.temperature));
    }
    if (options_.seed) request.mutable_sampling()->set_seed(*options_.seed);
    if (session_) session_->Fill(&request);
    return request;
  }

  // One message and its answer. False when the answer failed; the message is forgotten then.
  bool Ask(const std::string& text) {
    if (const std::optional<size_t> bad = FirstInvalidUtf8(text)) {  // it could not even be sent
      out_ << absl::StrFormat("(failed: byte %d of the message is not UTF-8; type it anew)\n", *bad)
           << std::flush;
      return false;
    }
    Say("user", text);
    grpc::ClientContext context;
    running_.Set(&context);
    const absl::Time begin = absl::Now();
    absl::Time first = absl::InfiniteFuture();
    std::string answer, reasoning;
    v1::Finish finish;
    auto reader = stub_->Generate(&context, Request());
    int64_t tokens = 0;
    for (v1::GenerateEvent event; reader->Read(&event);) {
      const v1::Delta& delta = event.delta();
      if (delta.tokens_size() > 0) first = std::min(first, absl::Now());
      tokens += delta.tokens_size();
      reasoning += delta.reasoning();
      answer += delta.text();
      Show(delta);
      if (event.has_finish()) finish = event.finish();
    }
    const absl::Time end = absl::Now();
    const grpc::Status status = reader->Finish();
    running_.Set(nullptr);
    EndThinking();
    out_ << "\n";
    const bool cancelled = status.error_code() == grpc::StatusCode::CANCELLED;
    if (!status.ok() && !cancelled) {
      out_ << "(failed: " << status.error_message() << ")\n" << std::flush;
      conversation_.mutable_messages()->RemoveLast();
      if (session_) Refresh(/*said=*/false);
      return false;
    }
    Remember(answer, reasoning, status.ok() ? &finish : nullptr);
    ShowUsage(finish, cancelled, tokens, begin, first, end);
    return true;
  }

  // An answer cut short (no `finish`) stays in the conversation as far as it came.
  void Remember(const std::string& answer, const std::string& reasoning, const v1::Finish* finish) {
    if (!session_) {
      Say("assistant", answer)->set_reasoning_content(reasoning);
      return;
    }
    if (finish != nullptr) {
      session_->Ended(*finish);
    } else {
      Refresh(/*said=*/!answer.empty() || !reasoning.empty());
    }
    if (session_->begun()) {
      conversation_.clear_messages();  // the router has them
    } else {
      Reset();  // nothing was said, or nothing is left of it: the turn does not count
    }
  }

  // What the router does not know any more it cannot go on with: the next message is a first one, with what
  // belongs before that.
  void Refresh(bool said) {
    const bool had_begun = session_->begun();
    session_->Refresh(said);
    if (session_->begun()) return;
    Reset();
    if (had_begun) {
      out_ << "(session " << options_.session
           << " is not known to the router any more; the next message begins it anew)\n"
           << std::flush;
    }
  }

  void Show(const v1::Delta& delta) {
    if (!delta.reasoning().empty()) {
      if (!thinking_shown_) out_ << (terminal_ ? "\033[2m" : "") << "<think>";
      thinking_shown_ = true;
      out_ << delta.reasoning();
    }
    if (!delta.text().empty()) {
      EndThinking();
      out_ << delta.text();
    }
    for (const v1::ToolCall& call : delta.tool_calls()) {
      EndThinking();
      out_ << "\n[call " << call.name() << " " << call.arguments() << "]";
    }
    out_ << std::flush;
  }

  void EndThinking() {
    if (!std::exchange(thinking_shown_, false)) return;
    out_ << "</think>" << (terminal_ ? "\033[0m" : "") << "\n";
  }

  void ShowUsage(const v1::Finish& finish, bool cancelled, int64_t tokens, absl::Time begin,
                 absl::Time first, absl::Time end) {
    out_ << "(" << (cancelled ? "cancelled after " : "") << tokens << " tokens";
    if (const std::string rate = DescribeAnswerRate(tokens, end - first); !rate.empty()) {
      out_ << ", " << rate;
    }
    if (tokens > 0)
      out_ << absl::StrFormat(", first after %.2f s", absl::ToDoubleSeconds(first - begin));
    if (!cancelled) {
      out_ << absl::StrFormat(
          "; prompt %d tokens, %d cached%s", finish.usage().prompt_tokens(),
          finish.usage().cached_tokens(),
          finish.reason() == v1::FINISH_REASON_LENGTH ? "; cut at the limit" : "");
    }
    out_ << ")\n" << std::flush;
  }

  const ChatOptions options_;
  std::ostream& out_;
  const bool terminal_;
  LineReader reader_;
  const std::unique_ptr<v1::Inference::Stub> stub_;
  RunningCall running_;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> dropped_ = false;  // what was begun at the prompt
  std::optional<ChatSession> session_;
  v1::ChatInput conversation_;  // of a session only what the router does not have
  bool thinking_shown_ = false;
};

}  // namespace

void AddChatFlags(CLI::App* app, ChatOptions* o) {
  app->add_option("--router", o->router,
                  "host:port of the router's gRPC port (default: 127.0.0.1:8081; where nobody "
                  "answers, a mesh of "
                  "its own)")
      ->envname("DELTAMESH_ROUTER");
  app->add_option(
      "--model", o->model,
      "the checkpoint folder, with a slash in it (./NAME), for a mesh of its own, or the name that "
      "a router serves (default: the router's only one, or the one that comes with deltamesh)");
  app->add_option("--system", o->system, "system message");
  app->add_option("--max-tokens", o->max_tokens,
                  "longest answer (default: up to the context limit)")
      ->check(CLI::PositiveNumber);
  app->add_option("--temperature", o->temperature, "0 is greedy (default: the router's, 1)")
      ->check(CLI::Range(0.0, 2.0));
  app->add_option("--seed", o->seed, "the same seed gives the same answers (default: a drawn one)");
  // An optional flag would be set, to false, also where it is not given.
  app->add_flag_function(
      "--thinking,!--no-thinking", [o](int64_t times) { o->thinking = times > 0; },
      "think first (default: as the model does)");
  app->add_option("--session", o->session,
                  "name of a conversation to go on with, or to begin (default: none is kept)");
  app->add_option("--salt", o->salt, "the tenant's salt, if sessions have one (default: none)");
}

int RunChat(const ChatOptions& options, int input, std::ostream& out,
            const std::function<int(absl::Duration)>& wait_signal) {
  return Chat(options, input, out).Run(wait_signal);
}

}  // namespace deltamesh
