#include "services/worker/fetch_server.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_types.h"

namespace deltamesh {
namespace {

Refusal Refuse(mesh::RefusalReason reason, std::string detail) {
  return {.reason = reason, .detail = std::move(detail)};
}

// Nothing when it is no name of a prefix.
std::optional<PrefixKey> KeyOf(const std::string& bytes) {
  PrefixKey key;
  if (bytes.size() != key.bytes.size()) return std::nullopt;
  std::copy(bytes.begin(), bytes.end(), key.bytes.begin());
  return key;
}

}  // namespace

Refusal FetchServer::Check(const mesh::StateFetch& f, std::vector<PrefixKey>* stored_path) const {
  if (f.source_epoch() != registration_->epoch()) {
    return Refuse(mesh::STALE_EPOCH, absl::StrFormat("epoch %d; this worker's is %d",
                                                     f.source_epoch(), registration_->epoch()));
  }
  if (f.model_digest() != registration_->model().digest()) {
    return Refuse(mesh::WRONG_MODEL, absl::StrFormat("model %s; this worker's is %s",
                                                     SafeMessage(f.model_digest(), 64),
                                                     registration_->model().digest()));
  }
  if (f.state_layout() != registration_->model().state_layout()) {
    return Refuse(mesh::WRONG_LAYOUT,
                  absl::StrFormat("state layout %d; this worker's is %d", f.state_layout(),
                                  registration_->model().state_layout()));
  }
  const std::optional<PrefixKey> key = KeyOf(f.prefix());
  if (!key || !f.transfer().starts_with("fetch:") || open_.contains(f.transfer())) {
    return Refuse(mesh::MALFORMED, "its names are not those of a fetch");
  }
  if (open() >= options_.open_max) {
    return Refuse(mesh::BUSY, absl::StrFormat("%d states are being sent from here", open()));
  }
  const bool held = cache_ != nullptr && cache_->tree().HasSnapshot(*key);
  if (!held && tier_ != nullptr) *stored_path = tier_->StoredPath(*key);
  const int64_t blocks = held ? cache_->tree().View(*key).blocks : std::ssize(*stored_path);
  if (blocks == 0) {
    return Refuse(mesh::NOT_HELD, absl::StrFormat("no snapshot of prefix %s is here", key->Hex()));
  }
  const int64_t position = blocks * kBlockTokens;
  if (static_cast<int64_t>(f.landing().position()) != position) {
    return Refuse(mesh::WRONG_COUNT, absl::StrFormat("prefix %s has %d tokens, the landing %d",
                                                     key->Hex(), position, f.landing().position()));
  }
  return {};
}

Refusal FetchServer::Send(const FetchAsked& asked, absl::Time now) {
  const mesh::StateFetch& f = asked.fetch;
  std::vector<PrefixKey> stored_path;
  Refusal refusal = Check(f, &stored_path);
  if (!refusal.ok()) return refusal;
  Sending sending;
  sending.key = *KeyOf(f.prefix());
  sending.peer = asked.peer;
  sending.landing = f.landing();
  const bool stored = !stored_path.empty();
  if (stored) {
    absl::StatusOr<StateLoadRef> load = tier_->LoadStored(stored_path, now);
    if (!load.ok()) {
      return Refuse(absl::IsNotFound(load.status()) ? mesh::NOT_HELD : mesh::BUSY,
                    MessageOf(load.status()));
    }
    sending.load = *std::move(load);
  }
  HandoffStart start;
  start.request_id = f.transfer();
  start.landing = f.landing();
  start.prefix = f.prefix();
  start.deadline = now + options_.whole_max;
  if (f.deadline_unix_ns() != 0) {
    start.deadline =
        std::min(start.deadline, absl::FromUnixNanos(static_cast<int64_t>(f.deadline_unix_ns())));
  }
  const absl::Status begun = ends_.sender->Begin(std::move(start));
  if (!begun.ok()) {
    return Refuse(absl::IsResourceExhausted(begun) ? mesh::BUSY : mesh::MALFORMED,
                  MessageOf(begun));
  }
  if (!stored) sending.held = cache_->Hold(cache_->tree().PathTo(sending.key));
  sending.next_block = static_cast<int64_t>(f.landing().have_blocks());
  open_.emplace(f.transfer(), std::move(sending));
  LogInfo("fetch.serving", {{"request", f.transfer()},
                            {"receiver", f.landing().receiver()},
                            {"tokens", f.landing().position()},
                            {"from", stored ? "disk" : "memory"},
                            {"have_blocks", f.landing().have_blocks()}});
  return {};
}

void FetchServer::OnAsked(const FetchAsked& asked, absl::Time now) {
  const Refusal refusal = Send(asked, now);
  if (refusal.ok()) return;
  Refused(asked.peer, asked.fetch.landing(), asked.fetch.transfer(), refusal);
}

void FetchServer::Refused(PeerId peer, const mesh::Landing& landing, const std::string& transfer,
                          const Refusal& refusal) {
  const std::string name(ReasonName(refusal.reason));
  ++results_[name];
  LogWarning("fetch.not_served", {{"request", SafeMessage(transfer, 256)},
                                  {"receiver", SafeMessage(landing.receiver(), 256)},
                                  {"reason", name},
                                  {"detail", refusal.detail}});
  mesh::StateFetchRefused refused;
  *refused.mutable_key() = TransferKeyOf(landing);
  refused.set_reason(refusal.reason);
  refused.set_detail(SafeMessage(refusal.detail));
  ends_.fetch->Refuse(peer, refused);
}

bool FetchServer::OnHandoffSent(const HandoffSent& sent) {
  const auto it = open_.find(sent.request_id);
  if (it == open_.end()) return false;
  open_.erase(it);
  const std::string name(sent.status.ok() ? "OK" : ReasonName(sent.reason));
  ++results_[name];
  if (sent.status.ok()) bytes_ += sent.bytes;
  LogInfo("fetch.served", {{"request", sent.request_id},
                           {"result", name},
                           {"bytes", sent.bytes},
                           {"seconds", sent.seconds}});
  return true;
}

bool FetchServer::Step(absl::Time now) {
  int64_t budget = options_.bytes_per_step;
  bool more = false;
  for (auto it = open_.begin(); it != open_.end();) {
    auto& [transfer, sending] = *it;
    if (sending.load != nullptr) {
      if (!tier_->Ended(sending.load, now)) {
        ++it;
        continue;
      }
      if (!TakeLoaded(transfer, sending)) {
        it = open_.erase(it);
        continue;
      }
    }
    if (!sending.given && budget > 0) budget -= Give(transfer, sending, budget);
    more |= !sending.given;
    ++it;
  }
  return more;
}

bool FetchServer::TakeLoaded(const std::string& transfer, Sending& sending) {
  sending.load = nullptr;
  if (!cache_->tree().HasSnapshot(sending.key)) {
    ends_.sender->Cancel(transfer);
    Refused(sending.peer, sending.landing, transfer,
            Refuse(mesh::NOT_HELD, "the state could not be read from the disk in time and whole"));
    return false;
  }
  ++loaded_;
  sending.held = cache_->Hold(cache_->tree().PathTo(sending.key));
  return true;
}

int64_t FetchServer::Give(const std::string& transfer, Sending& sending, int64_t budget) {
  const StateLayout& layout = cache_->pools().layout;
  int64_t bytes = 0;
  for (; sending.next_block < sending.held.blocks; ++sending.next_block) {
    if (bytes >= budget) return bytes;
    ends_.sender->SendBlock(transfer, sending.next_block,
                            sending.held.latents[static_cast<size_t>(sending.next_block)]);
    bytes += layout.block_bytes();
  }
  for (; sending.next_layer < layout.kda_layers; ++sending.next_layer) {
    if (bytes >= budget) return bytes;
    ends_.sender->SendSnapshotLayer(transfer, sending.next_layer, sending.held.content);
    bytes += layout.snapshot_bytes() / layout.kda_layers;
  }
  sending.given = true;
  return bytes;
}

void FetchServer::AddMetrics(MetricList& list) const {
  const char* help = "States that other workers asked for, by result.";
  const auto ok = results_.find("OK");
  list.Counter("fetches_served_total", help, ok == results_.end() ? 0 : ok->second,
               {{"result", "OK"}});
  for (const auto& [name, count] : results_) {
    if (name != "OK") list.Counter("fetches_served_total", help, count, {{"result", name}});
  }
  list.Counter("fetch_served_bytes_total", "Payload of states sent to workers that asked.", bytes_);
  list.Counter("fetches_read_total", "States that were read from disk for workers that asked.",
               loaded_);
  list.Gauge("fetches_serving", "States being sent to workers that asked.", open());
}

void HandleFetchEvent(const FetchEvent& event, absl::Time now, FetchClient& client,
                      FetchServer& server) {
  if (const auto* asked = std::get_if<FetchAsked>(&event)) server.OnAsked(*asked, now);
  if (const auto* refused = std::get_if<FetchRefused>(&event)) client.OnRefused(*refused, now);
  if (const auto* lost = std::get_if<FetchPeerLost>(&event)) client.OnPeerLost(*lost, now);
}

}  // namespace deltamesh
