// Short chats: people ask, read the answer, ask again a few times. Prompts are a short common text and what
// was said so far, so that a state is worth more bytes than its prompt.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "services/simulate/traffic.h"

namespace deltamesh {

struct ChatTrafficOptions {
  uint64_t seed = 1;
  int64_t chats = 1000;
  double seconds = 600;   // chats begin evenly over it
  int64_t variants = 20;  // of the common text
};

class ChatTraffic final : public Traffic {
 public:
  explicit ChatTraffic(const ChatTrafficOptions& options);
  ~ChatTraffic() override;

  std::optional<double> NextAt() const override;
  Turn Next() override;
  void Finished(const Turn& turn, double now) override;

 private:
  struct Chat;
  using Due = std::pair<double, uint64_t>;  // time, chat

  const ChatTrafficOptions options_;
  std::vector<std::unique_ptr<Chat>> chats_;  // by number; null: over, or not begun
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
};

}  // namespace deltamesh
