// A sender played by hand, so that each message can be wrong in one way.
#pragma once

#include "tests/unit/transfer/handoff_fixture.h"

namespace deltamesh {

class RawHandoffTest : public HandoffTest, public MessageHandler {
 protected:
  using HandoffTest::HandoffTest;

  void StartRaw() {
    Start();
    raw_ = *network_->Open("raw");
    raw_->SetHandler(MessageType::kHandoffVerdict, this);
    peer_ = *raw_->Connect("decode-0");
  }
  void TearDown() override {
    raw_.reset();
    HandoffTest::TearDown();
  }

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override {
    mesh::Verdict verdict;
    CHECK(verdict.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size())));
    verdicts_.push_back(verdict);
    return PayloadTarget{};
  }
  void OnPeerLost(PeerId, const absl::Status&) override {}

  std::vector<mesh::Verdict> verdicts_;
  std::unique_ptr<Transport> raw_;
  PeerId peer_ = 0;
};

}  // namespace deltamesh
