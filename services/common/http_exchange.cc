#include "services/common/http_exchange.h"

#include <utility>

namespace deltamesh {
namespace {

class Responder final : public HttpResponder {
 public:
  explicit Responder(std::shared_ptr<HttpExchange> exchange) : exchange_(std::move(exchange)) {}
  ~Responder() override { exchange_->Abandon(); }
  void Send(HttpResponse response) override { exchange_->Send(std::move(response)); }
  void Begin(HttpResponse head) override { exchange_->Begin(std::move(head)); }
  bool Write(std::string chunk) override { return exchange_->Write(std::move(chunk)); }
  void End() override { exchange_->End(); }
  void OnGone(std::function<void()> gone) override { exchange_->OnGone(std::move(gone)); }

 private:
  const std::shared_ptr<HttpExchange> exchange_;
};

}  // namespace

std::shared_ptr<HttpResponder> MakeResponder(std::shared_ptr<HttpExchange> exchange) {
  return std::make_shared<Responder>(std::move(exchange));
}

void HttpExchange::Send(HttpResponse response) {
  Put(Piece{Piece::kWhole, std::move(response), {}}, State::kIdle, State::kEnded);
}

void HttpExchange::Begin(HttpResponse head) {
  Put(Piece{Piece::kHead, std::move(head), {}}, State::kIdle, State::kBegun);
}

bool HttpExchange::Write(std::string chunk) {
  if (chunk.empty()) return !gone();  // an empty chunk would end the stream on the wire
  {
    std::lock_guard lock(mu_);
    queued_ += static_cast<int64_t>(chunk.size());
    if (!gone_ && queued_ > unread_max_) overflow_ = true;
  }
  return Put(Piece{Piece::kChunk, {}, std::move(chunk)}, State::kBegun, State::kBegun);
}

void HttpExchange::End() { Put(Piece{Piece::kEnd, {}, {}}, State::kBegun, State::kEnded); }

void HttpExchange::Abandon() {
  {
    std::lock_guard lock(mu_);
    if (state_ == State::kEnded || gone_) return;
    state_ = State::kEnded;
    pieces_.push_back(Piece{Piece::kAbandoned, {}, {}});
  }
  wake_();
}

void HttpExchange::OnGone(std::function<void()> callback) {
  {
    std::lock_guard lock(mu_);
    if (!gone_) {
      if (!complete_) on_gone_ = std::move(callback);
      return;
    }
  }
  callback();
}

HttpExchange::Piece HttpExchange::Take() {
  std::lock_guard lock(mu_);
  if (pieces_.empty()) return {};
  Piece piece = std::move(pieces_.front());
  pieces_.pop_front();
  queued_ -= static_cast<int64_t>(piece.chunk.size());
  return piece;
}

void HttpExchange::MarkGone() {
  std::function<void()> callback;
  {
    std::lock_guard lock(mu_);
    if (gone_ || complete_) return;
    gone_ = true;
    pieces_.clear();
    callback = std::exchange(on_gone_, nullptr);
  }
  if (callback) callback();
}

void HttpExchange::MarkComplete() {
  std::lock_guard lock(mu_);
  complete_ = true;
  on_gone_ = nullptr;
}

bool HttpExchange::gone() const {
  std::lock_guard lock(mu_);
  return gone_;
}

bool HttpExchange::overflow() const {
  std::lock_guard lock(mu_);
  return overflow_;
}

bool HttpExchange::Put(Piece piece, State from, State to) {
  bool taken;
  {
    std::lock_guard lock(mu_);
    taken = !gone_ && !overflow_ && state_ == from;
    if (taken) {
      state_ = to;
      pieces_.push_back(std::move(piece));
    }
  }
  wake_();
  return taken;
}

}  // namespace deltamesh
