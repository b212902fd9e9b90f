// The requests an attention worker has admitted, from a router's start to whatever ends them: the role's own
// end, a failure, a cancel, a deadline, a lost router. Each of these frees everything of the request - its
// transfer, its sequence - in the same call.
//
// Not thread-safe: part of a core.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/base/ids.h"
#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/engine/engine.h"
#include "services/worker/metric_list.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

// What every role knows of a request; a role adds to it by deriving.
struct AdmittedRequest {
  LinkId link = 0;  // of the router that wants it
  RequestId id;
  uint32_t attempt = 0;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time admitted;
  SequenceId sequence;    // 0: not in the engine
  uint32_t transfer = 0;  // serial of its hand-off; 0: none is open
  bool fetching = false;  // its state comes from another worker
};

template <typename Request>
class RequestTable {
 public:
  struct Role {
    std::string name;  // of the role, as in "decode.cancelled"
    int64_t requests_max = 0;
    // Ends the transfer of a request that has one.
    std::function<void(const RequestId& id)> end_transfer;
    // The same for one that is fetching.
    std::function<void(const RequestId& id)> end_fetch;
    // "the request's deadline passed while ...".
    std::function<std::string_view(const Request& request)> doing;
  };

  // `links` and `engine` are not owned and must outlive the table.
  RequestTable(Role role, WorkerLinks* links, Engine* engine)
      : role_(std::move(role)), links_(links), engine_(engine) {}
  ~RequestTable() {
    while (!requests_.empty()) Free(*requests_.begin()->second);
  }
  RequestTable(const RequestTable&) = delete;
  RequestTable& operator=(const RequestTable&) = delete;

  // ---- how requests come in ----

  // Admits what a router asked for in `message` (StartDecode, StartPrefill), or tells it why not. `admit`
  // checks the message and takes what the request needs; what it took by the time it fails is freed.
  template <typename Message, std::invocable<Request&> Admit>
  void Start(LinkId link, const Message& message, absl::Time now, Admit admit) {
    const RequestId& id = message.request_id();
    if (Request* known = Find(id); known != nullptr && known->link == link) {
      Free(*known);  // the router starts it anew
    }
    absl::Status status = CheckRoom(link, id);
    if (status.ok()) {
      Request& request = *(requests_[id] = std::make_unique<Request>());
      request.link = link;
      request.id = id;
      request.attempt = message.attempt();
      request.admitted = now;
      if (message.deadline_unix_ns() != 0) {
        request.deadline = absl::FromUnixNanos(static_cast<int64_t>(message.deadline_unix_ns()));
      }
      status = admit(request);
      if (!status.ok()) Free(request);
    }
    if (status.ok()) {
      ++started_;
      return;
    }
    ++refused_;
    SendFailed(link, id, message.attempt(), status);
  }

  // Answers a message meant for another role.
  template <typename Message>
  void Refuse(LinkId link, const Message& message, const absl::Status& status) {
    SendFailed(link, message.request_id(), message.attempt(), status);
  }

  absl::Status AddSequence(Request& request, SequenceSpec spec) {
    ASSIGN_OR_RETURN(request.sequence, engine_->Add(std::move(spec)));
    by_sequence_[request.sequence] = request.id;
    return absl::OkStatus();
  }

  // Takes a computed or unwanted sequence out of the engine.
  void RemoveSequence(Request& request) {
    if (request.sequence.value == 0) return;
    by_sequence_.erase(request.sequence);
    engine_->Remove(std::exchange(request.sequence, {}));
  }

  // A serial for a new transfer of the request; events of its older ones are stale from now on.
  uint32_t OpenTransfer(Request& request) { return request.transfer = next_transfer_++; }

  // ---- finding them; null: it has ended ----

  Request* Find(const RequestId& id) {
    auto it = requests_.find(id);
    return it == requests_.end() ? nullptr : it->second.get();
  }
  Request* FindSequence(SequenceId sequence) {
    auto it = by_sequence_.find(sequence);
    return it == by_sequence_.end() ? nullptr : Find(it->second);
  }
  // The request that a transfer's event is about. One of an older transfer is counted as stale.
  Request* FindTransfer(const RequestId& id, uint32_t serial) {
    Request* request = Find(id);
    if (request != nullptr && request->transfer == serial) return request;
    ++stale_events_;
    return nullptr;
  }
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [id, request] : requests_) visit(*request);
  }
  bool empty() const { return requests_.empty(); }

  // ---- how they end; the request is gone afterwards ----

  void Finish(Request& request) {
    ++finished_;
    Free(request);
  }
  void Fail(Request& request, const absl::Status& status) {
    const LinkId link = request.link;
    const uint32_t attempt = request.attempt;
    const RequestId id = request.id;
    FailSilently(request);
    SendFailed(link, id, attempt, status);
  }
  // The router hears of it from elsewhere.
  void FailSilently(Request& request) {
    ++failed_;
    Free(request);
  }
  void Cancel(LinkId link, const RequestId& id) {
    Request* request = Find(id);
    if (request == nullptr || request->link != link) return;
    ++cancelled_;
    LogInfo(role_.name + ".cancelled", {{"request", id}});
    Free(*request);
  }
  void CancelAllOf(LinkId link) {
    for (Request* request : Select([link](const Request& r) { return r.link == link; })) {
      ++cancelled_;
      Free(*request);
    }
  }
  void Expire(absl::Time now) {
    for (Request* request : Select([now](const Request& r) { return r.deadline <= now; })) {
      ++expired_;
      Fail(*request,
           DeadlineExceeded("the request's deadline passed while %s", role_.doing(*request)));
    }
  }

  // Admits nothing from now on.
  void Drain() { draining_ = true; }
  bool draining() const { return draining_; }

  void AddMetrics(MetricList& list) const {
    const char* help = "Requests by what happened to them here; refused ones were never started.";
    list.Counter("requests_total", help, started_, {{"event", "started"}});
    list.Counter("requests_total", help, refused_, {{"event", "refused"}});
    list.Counter("requests_total", help, finished_, {{"event", "finished"}});
    list.Counter("requests_total", help, failed_, {{"event", "failed"}});
    list.Counter("requests_total", help, cancelled_, {{"event", "cancelled"}});
    list.Counter("requests_total", help, expired_, {{"event", "expired"}});
    list.Counter("stale_events_total", "Transfer events of ended requests.", stale_events_);
  }

 private:
  absl::Status CheckRoom(LinkId link, const RequestId& id) const {
    if (!links_->open(link)) return Unavailable("the link is gone");
    // As where there is no room: the router had not heard of it yet, and asks another.
    if (draining_) return ResourceExhausted("%s is draining", links_->registration().name());
    if (requests_.contains(id)) {
      return absl::AlreadyExistsError(
          absl::StrFormat("request_id: \"%s\" runs here for another router", id));
    }
    if (static_cast<int64_t>(requests_.size()) >= role_.requests_max) {
      return ResourceExhausted("%d requests are admitted already; raise --requests",
                               role_.requests_max);
    }
    return absl::OkStatus();
  }

  template <typename Wanted>
  std::vector<Request*> Select(Wanted wanted) const {
    std::vector<Request*> selected;
    for (const auto& [id, request] : requests_) {
      if (wanted(*request)) selected.push_back(request.get());
    }
    return selected;
  }

  void Free(Request& request) {
    if (request.transfer != 0) role_.end_transfer(request.id);
    if (request.fetching) role_.end_fetch(request.id);
    RemoveSequence(request);
    requests_.erase(requests_.find(request.id));
  }

  void SendFailed(LinkId link, const RequestId& id, uint32_t attempt, const absl::Status& status) {
    LogWarning(role_.name + ".failed",
               {{"request", id}, {"attempt", attempt}, {"error", status.ToString()}});
    mesh::WorkerMessage message;
    mesh::RequestFailed* failed = message.mutable_failed();
    failed->set_request_id(id);
    failed->set_attempt(attempt);
    failed->set_code(static_cast<int>(status.code()));
    failed->set_message(SafeMessage(status));
    links_->Send(link, std::move(message));
  }

  const Role role_;
  WorkerLinks* const links_;
  Engine* const engine_;
  std::map<RequestId, std::unique_ptr<Request>> requests_;  // ordered so that runs repeat
  absl::flat_hash_map<SequenceId, RequestId> by_sequence_;
  uint32_t next_transfer_ = 1;
  bool draining_ = false;
  uint64_t started_ = 0, refused_ = 0, finished_ = 0, failed_ = 0, cancelled_ = 0, expired_ = 0;
  uint64_t stale_events_ = 0;
};

}  // namespace deltamesh
