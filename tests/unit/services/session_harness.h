// A router core whose workers have stores, and what is asked about sessions.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "absl/strings/str_split.h"
#include "runtime/prefix/prefix_hash.h"
#include "services/router/session_calls.h"
#include "services/router/session_stores.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {

using Kind = SessionCall::Kind;

inline constexpr LinkId kPrefill = 1, kDecode = 2, kDecode2 = 4;

inline SessionId Id(const std::string& name, const std::string& salt = "") {
  return MakeSessionId(salt, name);
}

class SessionCallsTest : public RouterCoreTest {
 protected:
  void JoinWithStore(LinkId link, const std::string& name, mesh::Role role) {
    mesh::WorkerMessage registration = TestRegister(name, role);
    registration.mutable_register_()->set_session_store(true);
    Open(link, registration);
    Drain();
  }

  // One whole turn of a session: `prompt` tokens 0, 1, 2, ... and the answer.
  void Turn(const std::string& session, int64_t prompt, std::vector<int> answer,
            mesh::SequenceOutput::End end = mesh::SequenceOutput::STOP_TOKEN) {
    ClientRequest request = Make("turn", prompt);
    request.session = Id(session);
    ASSERT_TRUE(core->Submit(request, now).ok());
    Drain();
    Tokens(kDecode, "turn", std::move(answer), 0, end);
    AnswerReads(Drain());
  }

  // Stores that are asked whether they have a record say no. What else was said then.
  std::string AnswerReads(std::string said) {
    std::string rest;
    while (!said.empty()) {
      std::string next;
      for (const auto line : absl::StrSplit(said, '\n', absl::SkipEmpty())) {
        int link = 0, call = 0;
        if (std::sscanf(std::string(line).c_str(), "%d <- Read %d", &link, &call) == 2) {
          next += Reply(static_cast<LinkId>(link), static_cast<uint64_t>(call),
                        absl::NotFoundError("none"));
        } else {
          rest += std::string(line) + "\n";
        }
      }
      said = next;
    }
    return rest;
  }

  std::string Call(Kind kind, const std::string& name, const std::string& target = "",
                   bool replace = false, absl::Duration deadline = absl::InfiniteDuration()) {
    SessionCall call;
    call.id = "c";
    call.kind = kind;
    call.session = Id(name);
    call.name = name;
    if (!target.empty()) call.target = Id(target);
    call.target_name = target;
    call.replace = replace;
    call.deadline = now + deadline;
    core->CallSession(call, now);
    return Drain();
  }

  // `link` holds a snapshot of the first `blocks` blocks of tokens 0, 1, 2, ..., and one of the first `warm`
  // in memory.
  void Hold(LinkId link, int64_t blocks, bool cold = false, int64_t warm = 0) {
    const mesh::ModelIdentity id = TestIdentity();
    PrefixChain chain(PrefixModel(id.digest(), id.state_layout()), "");
    std::vector<TokenId> tokens;
    for (int64_t i = 0; i < blocks * 64; ++i) tokens.push_back(static_cast<TokenId>(i));
    chain.Append(tokens);
    mesh::WorkerMessage m;
    mesh::PrefixChanges* changes = m.mutable_prefixes();
    changes->set_complete(true);
    for (const PrefixKey& key : chain.keys()) {
      changes->add_keys(key.index());
      changes->mutable_changes()->push_back(mesh::PrefixChanges::LATENTS_ADDED);
    }
    changes->add_keys(chain.keys().back().index());
    changes->mutable_changes()->push_back(cold ? mesh::PrefixChanges::SNAPSHOT_COLD
                                               : mesh::PrefixChanges::SNAPSHOT_ADDED);
    if (warm > 0) {
      changes->add_keys(chain.keys()[static_cast<size_t>(warm - 1)].index());
      changes->mutable_changes()->push_back(mesh::PrefixChanges::SNAPSHOT_ADDED);
    }
    Send(link, m);
    Drain();
  }

  static mesh::SessionRecord Record(const std::string& name, int64_t tokens, uint64_t position) {
    const mesh::ModelIdentity id = TestIdentity();
    mesh::SessionRecord record;
    record.set_version(kSessionRecordVersion);
    record.set_session(Id(name));
    record.set_digest(id.digest());
    record.set_state_layout(id.state_layout());
    record.set_text_digest(id.text_digest());
    for (int64_t i = 0; i < tokens; ++i) record.add_tokens(static_cast<int>(i));
    record.set_position(position);
    record.set_ended(true);
    return record;
  }
  std::string Reply(LinkId link, uint64_t call, const absl::Status& status = absl::OkStatus(),
                    const std::function<void(mesh::SessionReply*)>& fill = {}) {
    mesh::WorkerMessage m;
    m.mutable_session()->set_call(call);
    m.mutable_session()->set_code(static_cast<int>(status.code()));
    m.mutable_session()->set_message(MessageOf(status));
    if (fill) fill(m.mutable_session());
    Send(link, m);
    return Drain();
  }
  std::string ReplyRecord(LinkId link, uint64_t call, const mesh::SessionRecord& record) {
    return Reply(link, call, {}, [&](auto* reply) { *reply->mutable_record() = record; });
  }
  // A record that a store has from before, later than any clock here.
  mesh::SessionRecord Old(const std::string& session) const {
    mesh::SessionRecord record = Record(session, 300, 256);
    record.set_key(std::string(16, 'k'));
    record.set_suspended_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(now + absl::Hours(1))));
    return record;
  }
  // The record of the only suspension that was sent since.
  mesh::SessionRecord Sent() {
    mesh::SessionRecord record;
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent != nullptr && sent->message.session().has_suspend()) {
        record = sent->message.session().suspend().record();
      }
    }
    return record;
  }
  std::string Wait(absl::Duration time, std::vector<LinkId> alive = {kDecode}) {
    Pass(time, std::move(alive));
    return Drain();
  }
  uint64_t Refused(SessionRefusal why) const {
    return core->counters().sessions.refused[static_cast<size_t>(why)];
  }
};

}  // namespace deltamesh
