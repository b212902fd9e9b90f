// A router with a scripted decode worker behind it, in one process and without gRPC between them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/router/encode_pool.h"
#include "services/router/front.h"
#include "services/router/router_server.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {

// What the scripted worker does with a request. By default: "Hello world", then the end token.
struct Script {
  std::vector<TokenId> tokens;
  bool end = true;                            // ends with a stop token; false: goes silent
  absl::Duration gap = absl::ZeroDuration();  // before each token
  absl::Status refuse;                        // instead of any token
  absl::Status fail_after;                    // after the tokens
};

class FakeMesh {
 public:
  static constexpr LinkId kLink = 1;

  explicit FakeMesh(const std::string& model = "kimi_linear_tiny", RouterOptions options = {}) {
    InitLog("test", LogLevel::kError);
    FrontOptions front_options;
    front_options.model = std::string(DELTAMESH_SOURCE_DIR "/tests/data/golden/") + model;
    front_options.model_name = "tiny";
    auto loaded = Front::Load(front_options, &entropy_);
    CHECK(loaded.ok(), "%s", loaded.status().ToString());
    front = *std::move(loaded);
    router =
        std::make_unique<RouterServer>(RouterServerOptions{.core = options}, &clock_, &metrics);
    script = [this](const mesh::StartDecode&) { return Say("Hello world"); };
    router->Start(
        {.send = [this](LinkId link, mesh::RouterMessage m) { OnSend(link, std::move(m)); },
         .close = [](LinkId, const absl::Status&) {}});
  }
  ~FakeMesh() {
    router->Stop();
    stopping_ = true;
    for (std::thread& t : threads_) t.join();
  }

  Script Say(const std::string& text) const {
    Script s;
    s.tokens = front->tokenizer().EncodeOrdinary(text).value();
    return s;
  }

  void Connect() {
    router->OnLinkOpened(kLink);
    mesh::WorkerMessage m = TestRegister("d1", mesh::ROLE_DECODE);
    m.mutable_register_()->mutable_capacity()->set_slabs(slabs);
    m.mutable_register_()->mutable_capacity()->set_latent_blocks(4096);
    m.mutable_register_()->set_session_store(with_store);
    router->OnLinkMessage(kLink, m);
    absl::MutexLock lock(&mu_);
    threads_.emplace_back([this] {  // keeps the lease
      while (!stopping_ && !silent) {
        mesh::WorkerMessage beat;
        beat.mutable_heartbeat()->set_slabs_free(slabs);
        beat.mutable_heartbeat()->set_prompt_tokens_per_second(prompt_rate);
        beat.mutable_heartbeat()->set_latent_blocks_free(4096);
        router->OnLinkMessage(kLink, beat);
        absl::SleepFor(absl::Milliseconds(20));
      }
    });
  }
  void Join() {
    Connect();
    CHECK(Await([this] { return router->snapshot().ready.ok(); }), "the worker is not taken");
  }

  static bool Await(const std::function<bool()>& condition) {
    for (int i = 0; i < 5000; ++i) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return false;
  }

  std::vector<mesh::StartDecode> started() const {
    absl::MutexLock lock(&mu_);
    return started_;
  }
  bool Cancelled(const std::string& id) const {
    absl::MutexLock lock(&mu_);
    return cancelled_.contains(id);
  }
  size_t cancelled_count() const {
    absl::MutexLock lock(&mu_);
    return cancelled_.size();
  }

  Metrics metrics{MetricLabels{{"role", "router"}}};
  std::unique_ptr<const Front> front;
  std::unique_ptr<RouterServer> router;
  EncodePool pool{{.threads = 1, .queue_max = 2, .inline_bytes_max = 4096}};
  std::function<Script(const mesh::StartDecode&)> script;  // set before Join
  std::atomic<bool> silent = false;
  // Of the worker; set before Join.
  uint64_t slabs = 64;
  double prompt_rate = 0;
  bool with_store = false;                             // set before Join
  std::map<std::string, mesh::SessionRecord> records;  // what it stores; the router's thread's
  std::atomic<bool> deaf_store = false;                // hears no command

 private:
  void OnSend(LinkId, mesh::RouterMessage message) {
    if (message.has_session() && !deaf_store) OnSession(message.session());
    if (message.has_cancel()) {
      absl::MutexLock lock(&mu_);
      cancelled_.insert(message.cancel().request_id());
    }
    if (!message.has_start_decode()) return;
    absl::MutexLock lock(&mu_);
    started_.push_back(message.start_decode());
    threads_.emplace_back([this, start = message.start_decode()] { Play(start); });
  }

  // No states: records only.
  void OnSession(const mesh::SessionCommand& command) {
    mesh::WorkerMessage m;
    mesh::SessionReply* reply = m.mutable_session();
    reply->set_call(command.call());
    const auto found = records.find(command.session());
    if (command.has_suspend()) {
      records[command.session()] = command.suspend().record();
      reply->set_tier("disk");
      reply->set_bytes(command.suspend().record().ByteSizeLong());
    } else if (command.has_read() && found != records.end()) {
      *reply->mutable_record() = found->second;
    } else {
      reply->set_code(static_cast<int>(absl::StatusCode::kNotFound));
    }
    router->OnLinkMessage(kLink, m);
  }

  void Play(const mesh::StartDecode& start) {
    const Script s = script(start);
    const std::string& id = start.request_id();
    if (!s.refuse.ok()) return SendFailed(start, s.refuse);
    const size_t count = std::min<size_t>(s.tokens.size(), start.max_tokens());
    for (size_t i = 0; i < count; ++i) {
      absl::SleepFor(s.gap);
      if (stopping_ || Cancelled(id)) return;
      Send(start, s.tokens[i], i,
           i + 1 == start.max_tokens() ? mesh::SequenceOutput::MAX_TOKENS
                                       : mesh::SequenceOutput::RUNNING);
    }
    if (!s.fail_after.ok()) return SendFailed(start, s.fail_after);
    if (s.end && count < start.max_tokens()) {
      Send(start, front->tokenizer().eos_ids().front(), count, mesh::SequenceOutput::STOP_TOKEN);
    }
  }

  void Send(const mesh::StartDecode& start, TokenId token, size_t index,
            mesh::SequenceOutput::End end) {
    mesh::WorkerMessage m;
    mesh::SequenceOutput* o = m.mutable_outputs()->add_sequences();
    o->set_request_id(start.request_id());
    o->add_tokens(token);
    o->set_first_index(index);
    o->set_end(end);
    o->set_attempt(start.attempt());
    if (start.sampling().logprobs() >= 0) {
      mesh::TokenScores* scores = o->add_scores();
      scores->set_logprob(-0.5f);
      for (int k = 0; k < start.sampling().logprobs(); ++k) {
        scores->add_top_ids(token + k);
        scores->add_top_logprobs(-0.5f - static_cast<float>(k));
      }
    }
    router->OnLinkMessage(kLink, m);
  }

  void SendFailed(const mesh::StartDecode& start, const absl::Status& status) {
    mesh::WorkerMessage m;
    m.mutable_failed()->set_request_id(start.request_id());
    m.mutable_failed()->set_attempt(start.attempt());
    m.mutable_failed()->set_code(static_cast<int>(status.code()));
    m.mutable_failed()->set_message(MessageOf(status));
    router->OnLinkMessage(kLink, m);
  }

  SystemClock clock_;
  SeededEntropy entropy_{7};
  mutable absl::Mutex mu_;
  std::vector<mesh::StartDecode> started_;
  std::set<std::string> cancelled_;
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;  // grows on the router's thread and in Join
};

}  // namespace deltamesh
