// A router core with hand-driven workers: what it does is printed one line per action, so that a test
// reads as a transcript.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_join.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/protocol.h"
#include "services/common/retry_hint.h"
#include "services/router/router_core.h"

namespace deltamesh {

inline mesh::ModelIdentity TestIdentity() {
  mesh::ModelIdentity id;
  id.set_digest("d1");
  id.set_text_digest("t1");
  id.set_state_layout(1);
  id.set_block_tokens(64);
  id.set_tile_tokens(16);
  id.set_protocol(kMeshProtocol);
  return id;
}

inline mesh::WorkerMessage TestRegister(const std::string& name, mesh::Role role,
                                        uint64_t epoch = 1) {
  mesh::WorkerMessage m;
  mesh::Register* r = m.mutable_register_();
  r->set_name(name);
  r->set_role(role);
  r->set_epoch(epoch);
  *r->mutable_model() = TestIdentity();
  r->mutable_capacity()->set_slabs(4);
  r->mutable_capacity()->set_latent_blocks(64);
  r->mutable_capacity()->set_context_tokens(2048);
  r->mutable_capacity()->set_step_tokens(256);
  r->set_transport_address(name + "-address");
  r->set_transport_kind("inproc");
  if (role == mesh::ROLE_EXPERT) {
    r->mutable_experts()->set_shards(1);
    r->mutable_experts()->add_experts(0);
  }
  return m;
}

inline std::string DescribeMessage(const mesh::RouterMessage& m) {
  switch (m.body_case()) {
    case mesh::RouterMessage::kRegistered:
      return absl::StrFormat("Registered by %s", m.registered().router());
    case mesh::RouterMessage::kView: {
      std::vector<std::string> names;
      for (const auto& e : m.view().experts()) names.push_back(e.name());
      return absl::StrFormat("View %d [%s]", m.view().epoch(), absl::StrJoin(names, " "));
    }
    case mesh::RouterMessage::kStartDecode: {
      const auto& s = m.start_decode();
      return absl::StrFormat("StartDecode %s prompt=%d handoff=%d max=%d attempt=%d",
                             s.request_id(), s.prompt_size(), s.handoff_tokens(), s.max_tokens(),
                             s.attempt());
    }
    case mesh::RouterMessage::kStartPrefill: {
      const auto& s = m.start_prefill();
      return absl::StrFormat("StartPrefill %s tokens=%d transfer=%d attempt=%d", s.request_id(),
                             s.tokens_size(), s.landing().transfer_id(), s.attempt());
    }
    case mesh::RouterMessage::kCancel:
      return "Cancel " + m.cancel().request_id();
    case mesh::RouterMessage::kSession: {
      const auto& c = m.session();
      if (c.has_read()) return absl::StrFormat("Read %d", c.call());
      if (c.has_load()) {
        return absl::StrFormat("Load %d tokens=%d", c.call(), c.load().tokens_size());
      }
      return absl::StrFormat("Suspend %d tokens=%d", c.call(), c.suspend().record().tokens_size());
    }
    default:
      return "(empty)";
  }
}

inline std::string DescribeAction(const RouterAction& action) {
  if (const auto* a = std::get_if<SendToWorker>(&action)) {
    return absl::StrFormat("%d <- %s", a->link, DescribeMessage(a->message));
  }
  if (const auto* a = std::get_if<CloseLink>(&action)) {
    return absl::StrFormat("%d closed %s", a->link, a->status.ToString());
  }
  if (const auto* a = std::get_if<ClientTokens>(&action)) {
    std::vector<int> tokens(a->output.tokens().begin(), a->output.tokens().end());
    return absl::StrFormat("client %s tokens [%s] at %d", a->request_id, absl::StrJoin(tokens, " "),
                           a->output.first_index());
  }
  if (const auto* a = std::get_if<ClientFinished>(&action)) {
    return absl::StrFormat("client %s finished %s usage %d+%d cached %d", a->request_id,
                           mesh::SequenceOutput::End_Name(a->end), a->usage.prompt_tokens,
                           a->usage.completion_tokens, a->usage.cached_tokens);
  }
  if (const auto* a = std::get_if<SessionAnswered>(&action)) {
    if (!a->status.ok()) {
      const auto again = RetryAfterOf(a->status);
      return absl::StrFormat("session %s: %s: %s%s", a->id,
                             absl::StatusCodeToString(a->status.code()), MessageOf(a->status),
                             again ? " [again in " + absl::FormatDuration(*again) + "]" : "");
    }
    const SessionState& s = a->state;
    return absl::StrFormat("session %s: %d tokens%s%s%s, position %d at \"%s\" %s", a->id,
                           s.tokens->size(), s.ended ? ", ended" : "",
                           s.suspended ? ", suspended" : "", s.running ? ", running" : "",
                           s.position, s.worker, s.tier);
  }
  const auto& a = std::get<ClientFailed>(action);
  return absl::StrFormat("client %s failed %s: %s", a.request_id,
                         absl::StatusCodeToString(a.status.code()), MessageOf(a.status));
}

class RouterCoreTest : public ::testing::Test {
 protected:
  explicit RouterCoreTest(RouterOptions options = DefaultOptions()) {
    InitLog("test", LogLevel::kError);
    Restart(options);
  }

  static RouterOptions DefaultOptions() {
    RouterOptions o;
    o.name = "r";
    o.epoch = 100;
    return o;
  }

  void Restart(RouterOptions options) { core = std::make_unique<RouterCore>(std::move(options)); }

  // Every action since the last call, one per line.
  std::string Drain() {
    std::string out;
    for (const RouterAction& action : core->TakeActions()) {
      out += DescribeAction(action) + "\n";
      if (const auto* sent = std::get_if<SendToWorker>(&action)) {
        const auto& m = sent->message;
        if (m.has_start_decode())
          attempts[m.start_decode().request_id()] = m.start_decode().attempt();
        if (m.has_start_prefill()) {
          attempts[m.start_prefill().request_id()] = m.start_prefill().attempt();
        }
      }
    }
    return out;
  }

  void Open(LinkId link, const mesh::WorkerMessage& registration) {
    core->OnLinkOpened(link, now);
    core->OnWorkerMessage(link, registration, now);
  }
  void Join(LinkId link, const std::string& name, mesh::Role role, uint64_t epoch = 1) {
    Open(link, TestRegister(name, role, epoch));
    Drain();
  }

  ClientRequest Make(const std::string& id, int64_t prompt, int64_t max_tokens = 8) {
    ClientRequest r;
    r.request_id = id;
    for (int64_t i = 0; i < prompt; ++i) r.prompt.push_back(static_cast<TokenId>(i));
    r.max_tokens = max_tokens;
    return r;
  }
  absl::Status Submit(const std::string& id, int64_t prompt, int64_t max_tokens = 8) {
    return core->Submit(Make(id, prompt, max_tokens), now);
  }

  void Send(LinkId link, const mesh::WorkerMessage& message) {
    core->OnWorkerMessage(link, message, now);
  }
  void Grant(LinkId link, const std::string& id, uint64_t position, uint32_t attempt,
             uint64_t transfer = 7) {
    mesh::WorkerMessage m;
    m.mutable_landing_granted()->set_request_id(id);
    m.mutable_landing_granted()->set_attempt(attempt);
    m.mutable_landing_granted()->mutable_landing()->set_position(position);
    m.mutable_landing_granted()->mutable_landing()->set_transfer_id(transfer);
    Send(link, m);
  }
  void Verdict(LinkId link, const std::string& id, uint32_t attempt, absl::StatusCode code,
               const std::string& reason = "") {
    mesh::WorkerMessage m;
    m.mutable_handoff_result()->set_request_id(id);
    m.mutable_handoff_result()->set_attempt(attempt);
    m.mutable_handoff_result()->set_code(static_cast<int>(code));
    m.mutable_handoff_result()->set_reason(reason);
    m.mutable_handoff_result()->set_bytes(100);
    Send(link, m);
  }
  void Prefilled(LinkId link, const std::string& id, uint32_t attempt) {
    mesh::WorkerMessage m;
    m.mutable_prefill_finished()->set_request_id(id);
    m.mutable_prefill_finished()->set_attempt(attempt);
    Send(link, m);
  }
  // Under the attempt that the last Drain saw.
  void Tokens(LinkId link, const std::string& id, std::vector<int> tokens, uint64_t first,
              mesh::SequenceOutput::End end = mesh::SequenceOutput::RUNNING, uint64_t cached = 0) {
    TokensOf(attempts[id], link, id, std::move(tokens), first, end, cached);
  }
  void TokensOf(uint32_t attempt, LinkId link, const std::string& id, std::vector<int> tokens,
                uint64_t first, mesh::SequenceOutput::End end = mesh::SequenceOutput::RUNNING,
                uint64_t cached = 0) {
    mesh::WorkerMessage m;
    mesh::SequenceOutput* o = m.mutable_outputs()->add_sequences();
    o->set_request_id(id);
    o->mutable_tokens()->Assign(tokens.begin(), tokens.end());
    o->set_first_index(first);
    o->set_end(end);
    o->set_attempt(attempt);
    o->set_cached_tokens(cached);
    Send(link, m);
  }
  void Failed(LinkId link, const std::string& id, uint32_t attempt, const absl::Status& status) {
    mesh::WorkerMessage m;
    m.mutable_failed()->set_request_id(id);
    m.mutable_failed()->set_attempt(attempt);
    m.mutable_failed()->set_code(static_cast<int>(status.code()));
    m.mutable_failed()->set_message(MessageOf(status));
    Send(link, m);
  }
  void Beat(LinkId link, uint64_t slabs = 4, uint64_t blocks = 64, uint64_t waiting_tokens = 0,
            bool draining = false) {
    mesh::WorkerMessage m;
    m.mutable_heartbeat()->set_slabs_free(slabs);
    m.mutable_heartbeat()->set_latent_blocks_free(blocks);
    m.mutable_heartbeat()->set_waiting_tokens(waiting_tokens);
    m.mutable_heartbeat()->set_draining(draining);
    Send(link, m);
  }
  // Time passes while every listed link keeps its lease.
  void Pass(absl::Duration duration, std::vector<LinkId> alive) {
    for (absl::Duration left = duration; left > absl::ZeroDuration(); left -= absl::Seconds(1)) {
      now += std::min(left, absl::Seconds(1));
      for (const LinkId link : alive) Beat(link);
      core->Tick(now);
    }
  }

  absl::Time now = absl::FromUnixSeconds(1000);
  std::unique_ptr<RouterCore> core;
  std::map<std::string, uint32_t> attempts;
};

}  // namespace deltamesh
