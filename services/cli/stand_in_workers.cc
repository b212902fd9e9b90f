#include "services/cli/stand_in_workers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace deltamesh {
namespace {

constexpr uint64_t kSlabs = 64, kBlockTokens = 64;

mesh::Register Registration(const StandInWorkersOptions& o, int64_t worker) {
  mesh::Register registration;
  mesh::Register* r = &registration;
  r->set_name(absl::StrFormat("stub-%d", worker));
  r->set_role(mesh::ROLE_DECODE);
  r->set_epoch(1);
  *r->mutable_model() = MakeModelIdentity("stub", o.text_digest);
  mesh::Capacity* c = r->mutable_capacity();
  c->set_slabs(kSlabs);
  c->set_context_tokens(static_cast<uint64_t>(o.context_tokens));
  c->set_latent_blocks(kSlabs * c->context_tokens() / kBlockTokens);
  c->set_step_tokens(512);
  r->set_transport_address("none");
  r->set_transport_kind("stub");
  return registration;
}

// It holds nothing, and says so: the router names and looks up the prefixes of every prompt.
mesh::WorkerMessage NoPrefixes() {
  mesh::WorkerMessage message;
  message.mutable_prefixes()->set_complete(true);
  return message;
}

}  // namespace

StandInWorkers::StandInWorkers(const StandInWorkersOptions& options) : options_(options) {
  for (int64_t w = 0; w < options_.workers; ++w) {
    workers_.emplace_back(WorkerLinks(Registration(options_, w)));
  }
  for (size_t w = 0; w < workers_.size(); ++w) {
    LinkClientEvents events;
    events.opened = [this, w](LinkId link, const std::string&) { OnOpened(w, link); };
    events.message = [this, w](LinkId link, mesh::RouterMessage message) {
      OnMessage(w, link, message);
      return true;
    };
    events.closed = [this, w](LinkId link, const absl::Status&) {
      absl::MutexLock lock(&mu_);
      workers_[w].links.Close(link);
      workers_[w].link = 0;
      workers_[w].answers.clear();
    };
    workers_[w].client = std::make_unique<LinkClient>(std::vector<std::string>{options_.router},
                                                      LinkOptions{}, std::move(events));
  }
  for (Worker& worker : workers_) worker.client->Start();
  thread_ = std::thread([this] { Loop(); });
}

StandInWorkers::~StandInWorkers() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
  std::vector<std::unique_ptr<LinkClient>> clients;
  {
    absl::MutexLock lock(&mu_);
    for (Worker& worker : workers_) clients.push_back(std::move(worker.client));
  }
  clients.clear();  // waits for their last events, which want the lock
}

int64_t StandInWorkers::registered() const {
  absl::MutexLock lock(&mu_);
  return std::count_if(workers_.begin(), workers_.end(),
                       [](const Worker& w) { return w.link != 0; });
}

void StandInWorkers::OnOpened(size_t worker, LinkId link) {
  absl::MutexLock lock(&mu_);
  workers_[worker].links.Open(link);  // what it sends goes out with the loop
}

void StandInWorkers::OnMessage(size_t worker, LinkId link, const mesh::RouterMessage& message) {
  absl::MutexLock lock(&mu_);
  Worker& w = workers_[worker];
  if (message.has_registered()) {
    w.link = link;
    w.links.OnRegistered(link, message.registered(), absl::Now());
    w.told = false;
  } else if (message.has_start_decode()) {
    const std::string& id = message.start_decode().request_id();
    if (w.answers.empty()) w.step = absl::Now();
    w.answers[id] = {.start = message.start_decode(), .next = 0};
    w.answers[id].start.clear_prompt();
  } else if (message.has_cancel()) {
    w.answers.erase(message.cancel().request_id());
  }
}

void StandInWorkers::QueueDue(Worker& worker, absl::Time now) {
  if (!std::exchange(worker.told, true)) worker.links.Send(worker.link, NoPrefixes());
  mesh::Heartbeat load;
  load.set_slabs_free(kSlabs - worker.answers.size());
  load.set_latent_blocks_free(kSlabs * static_cast<uint64_t>(options_.context_tokens) /
                              kBlockTokens);
  load.set_running(worker.answers.size());
  worker.links.Tick(load, now);
  if (worker.answers.empty() || worker.step > now) return;
  worker.links.Send(worker.link, Step(worker));
  worker.step += options_.token_gap;
}

mesh::WorkerMessage StandInWorkers::Step(Worker& worker) {
  mesh::WorkerMessage message;
  for (auto it = worker.answers.begin(); it != worker.answers.end();) {
    Answer& a = it->second;
    const bool last = a.next + 1 >= static_cast<int64_t>(a.start.max_tokens());
    mesh::SequenceOutput* output = message.mutable_outputs()->add_sequences();
    output->set_request_id(a.start.request_id());
    output->set_attempt(a.start.attempt());
    output->add_tokens(static_cast<int32_t>(64 + a.next % 50));
    output->set_first_index(static_cast<uint64_t>(a.next++));
    output->set_end(last ? mesh::SequenceOutput::MAX_TOKENS : mesh::SequenceOutput::RUNNING);
    it = last ? worker.answers.erase(it) : std::next(it);
  }
  return message;
}

void StandInWorkers::Loop() {
  while (true) {
    std::vector<std::pair<LinkClient*, SendToRouter>> out;
    {
      absl::MutexLock lock(&mu_);
      if (stopping_) return;
      const absl::Time now = absl::Now();
      for (Worker& worker : workers_) {
        if (worker.link != 0) QueueDue(worker, now);
        for (SendToRouter& send : worker.links.Take()) {
          out.push_back({worker.client.get(), std::move(send)});
        }
      }
    }
    for (auto& [client, send] : out) client->Send(send.link, std::move(send.message));
    absl::SleepFor(absl::Microseconds(250));
  }
}

}  // namespace deltamesh
