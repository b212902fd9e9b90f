// The named session of a chat in the terminal: the router remembers what was said, so that only new messages
// are sent, and the conversation can rest in a store and go on another day.
//
// One thread.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "deltamesh/v1/inference.grpc.pb.h"

namespace deltamesh {

class ChatSession {
 public:
  // `stub` and `out` must outlive this.
  ChatSession(v1::Inference::Stub* stub, std::string name, std::string salt, std::ostream* out)
      : stub_(stub), name_(std::move(name)), salt_(std::move(salt)), out_(out) {}

  // Finds the session, from its store if it rests there, and says where it stands. False, and said why, when
  // that is not known.
  bool Open();
  // It has tokens: the next turn is appended.
  bool begun() const { return tokens_ > 0; }
  // The next turn begins it anew; until one did, what the router has of it is another conversation.
  void Reset() {
    tokens_ = 0;
    reset_ = true;
  }

  void Fill(v1::GenerateRequest* request) const;
  // A turn ended well.
  void Ended(const v1::Finish& finish) {
    tokens_ = finish.session_tokens();
    reset_ = false;
  }
  // A turn was cut or failed: asks how far the session came. With `said` some of its answer came here, so the
  // router will know the session once it notices.
  void Refresh(bool said);

  // /session, /suspend, /fork NAME. False: it is no command of these.
  bool Command(const std::string& line);
  void SayGoodbye() const;

 private:
  void Show();
  void Suspend();
  void Fork(const std::string& to);
  void Failed(const grpc::Status& status) const;
  bool IsText(const char* what, const std::string& name) const;  // false, and said

  v1::Inference::Stub* const stub_;
  const std::string name_, salt_;
  std::ostream* const out_;
  uint32_t tokens_ = 0;
  bool reset_ = false;
};

}  // namespace deltamesh
