#include "services/worker/worker_links.h"

#include <algorithm>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/cache/state_layout.h"
#include "services/common/protocol.h"

namespace deltamesh {

mesh::ModelIdentity MakeModelIdentity(const std::string& digest, const std::string& text_digest) {
  mesh::ModelIdentity identity;
  identity.set_digest(digest);
  identity.set_text_digest(text_digest);
  identity.set_state_layout(kStateLayoutVersion);
  identity.set_block_tokens(kBlockTokens);
  identity.set_tile_tokens(kTileTokens);
  identity.set_protocol(kMeshProtocol);
  return identity;
}

void WorkerLinks::Open(LinkId link) {
  links_[link] = Link{};
  mesh::WorkerMessage message;
  *message.mutable_register_() = registration_;
  Send(link, std::move(message));
}

void WorkerLinks::Close(LinkId link) {
  links_.erase(link);
  std::erase_if(out_, [link](const SendToRouter& action) { return action.link == link; });
}

void WorkerLinks::OnRegistered(LinkId link, const mesh::Registered& message, absl::Time now) {
  auto it = links_.find(link);
  if (it == links_.end()) return;
  it->second.registered = true;
  it->second.period = absl::Milliseconds(std::max<int64_t>(message.heartbeat_ms(), 10));
  it->second.calm = absl::Milliseconds(message.lease_ms()) / 4;
  it->second.due = now;
  for (const auto& [to, connection] : connections_) SendConnection(link, to);
  LogInfo("worker.registered", {{"router", message.router()},
                                {"heartbeat_ms", message.heartbeat_ms()},
                                {"lease_ms", message.lease_ms()}});
}

std::optional<mesh::MeshView> WorkerLinks::OnView(LinkId link, const mesh::MeshView& view) {
  auto it = links_.find(link);
  if (it == links_.end() || view.epoch() < it->second.view.epoch()) return std::nullopt;
  it->second.view = view;

  std::map<std::string, const mesh::ExpertPeer*> latest;
  for (const auto& [id, state] : links_) {
    for (const auto& peer : state.view.experts()) {
      const mesh::ExpertPeer*& known = latest[peer.name()];
      if (known == nullptr || known->epoch() < peer.epoch()) known = &peer;
    }
  }
  mesh::MeshView merged;
  for (const auto& [name, peer] : latest) *merged.add_experts() = *peer;
  std::string content = merged.SerializeAsString();
  if (merged_epoch_ > 0 && content == merged_) return std::nullopt;
  merged_ = std::move(content);
  merged.set_epoch(++merged_epoch_);
  return merged;
}

void WorkerLinks::Tick(const mesh::Heartbeat& load, absl::Time now) {
  for (auto& [id, link] : links_) {
    if (!link.registered || now < link.due) continue;
    link.due = now + link.period;
    std::string content = load.SerializeAsString();
    if (content == link.told && now < link.told_at + link.calm) continue;
    link.told = std::move(content);
    link.told_at = now;
    mesh::WorkerMessage message;
    *message.mutable_heartbeat() = load;
    Send(id, std::move(message));
  }
}

void WorkerLinks::HeartbeatSoon() {
  for (auto& [id, link] : links_) {
    if (!link.registered) continue;
    link.due = link.told_at = absl::InfinitePast();
  }
}

void WorkerLinks::TellConnection(const std::string& to, uint64_t epoch, double bytes_per_second) {
  if (connections_.size() >= kConnectionsMax && !connections_.contains(to)) {
    connections_.erase(connections_.begin());
  }
  connections_[to] = {epoch, bytes_per_second};
  for (const auto& [link, state] : links_) {
    if (state.registered) SendConnection(link, to);
  }
}

void WorkerLinks::SendConnection(LinkId link, const std::string& to) {
  const Connection& connection = connections_.at(to);
  mesh::WorkerMessage message;
  message.mutable_connection()->set_to(to);
  message.mutable_connection()->set_to_epoch(connection.epoch);
  message.mutable_connection()->set_bytes_per_second(connection.bytes_per_second);
  Send(link, std::move(message));
}

void WorkerLinks::Send(LinkId link, mesh::WorkerMessage message) {
  if (!links_.contains(link)) return;
  out_.push_back({link, std::move(message)});
}

bool WorkerLinks::registered() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& entry) { return entry.second.registered; });
}

}  // namespace deltamesh
