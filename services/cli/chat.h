// `deltamesh chat`: a conversation in the terminal over gRPC.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>

#include "absl/time/time.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct ChatOptions {
  std::string router;      // empty: see chat_mesh.h
  std::string model;       // empty: the only one
  std::string system;      // first message, if any
  int64_t max_tokens = 0;  // of one answer; 0: up to the context limit
  std::optional<double> temperature;
  std::optional<uint64_t> seed;
  std::optional<bool> thinking;  // absent: the model's default
  std::string session;           // name of a session to go on with; empty: none
  std::string salt;              // its tenant's
};
void AddChatFlags(CLI::App* app, ChatOptions* options);

// Reads lines from `input` until its end or /exit; a line is a message (with the next ones where it ends with
// a backslash), its answer streams to `out`.
// `wait_signal` waits for SIGINT or SIGTERM and gives its number, 0 after the wait: SIGINT ends the answer
// that is running, SIGTERM the program. Returns the exit code: 1 when the router cannot be reached or, with
// no terminal at `input`, when an answer failed.
int RunChat(const ChatOptions& options, int input, std::ostream& out,
            const std::function<int(absl::Duration)>& wait_signal);

}  // namespace deltamesh
