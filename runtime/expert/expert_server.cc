#include "runtime/expert/expert_server.h"

#include <chrono>
#include <utility>

#include "deltamesh/mesh/expert.pb.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/expert/checksum.h"

namespace deltamesh {
namespace {

constexpr std::chrono::seconds kLookAgain{1};  // longest wait for work before the next

absl::Status CheckIdentity(const mesh::ExpertDispatch& d, const ExpertServerOptions& options) {
  if (d.shard_epoch() != options.epoch) {
    return FailedPrecondition("epoch: %d, but this shard is at %d; refresh the view",
                              d.shard_epoch(), options.epoch);
  }
  if (d.model_digest() != options.model_digest) {
    return FailedPrecondition(
        "model_digest: %s, but this shard serves %s; load the same checkpoint with the same "
        "--weights and --activations",
        d.model_digest(), options.model_digest);
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const mesh::ExpertDispatch& d, const ExpertSet& set,
                        int64_t payload_bytes) {
  if (d.layer() >= set.layers.size() || set.layers[d.layer()].empty()) {
    return InvalidArgument("layer: %d has no routed experts", d.layer());
  }
  if (d.width() != set.width) {
    return InvalidArgument("width: %d, but experts take %d", d.width(), set.width);
  }
  const int64_t row_bytes = set.width * static_cast<int64_t>(sizeof(float));
  if (d.rows() == 0 || d.rows() * row_bytes != payload_bytes) {
    return InvalidArgument("rows: %d of %d bytes, but the payload has %d", d.rows(), row_bytes,
                           payload_bytes);
  }
  if (d.experts_per_row_size() != static_cast<int64_t>(d.rows())) {
    return InvalidArgument("experts_per_row: %d entries for %d rows", d.experts_per_row_size(),
                           d.rows());
  }
  if (d.requests_size() > static_cast<int>(kNotedRequestsMax)) {
    return InvalidArgument("requests: %d names; one call gives at most %d", d.requests_size(),
                           kNotedRequestsMax);
  }
  int64_t answers = 0;
  for (const uint32_t n : d.experts_per_row()) {
    if (n == 0 || n > set.experts) {
      return InvalidArgument("experts_per_row: %d; 1 to %d can be", n, set.experts);
    }
    answers += n;
  }
  if (answers != d.experts_size() || answers * row_bytes > kPayloadBytesMax) {
    return InvalidArgument(
        "experts: %d ids, experts_per_row adds up to %d, an answer holds at most %d",
        d.experts_size(), answers, kPayloadBytesMax / row_bytes);
  }
  for (const uint32_t e : d.experts()) {
    if (e >= set.experts || set.layers[d.layer()][e].gate.data == nullptr) {
      return InvalidArgument("experts: %d is not hosted here", e);
    }
  }
  return absl::OkStatus();
}

std::span<const std::byte> Bytes(const float* data, int64_t count) {
  return std::as_bytes(std::span(data, static_cast<size_t>(count)));
}

}  // namespace

// One accepted dispatch. Owned by the queue and by the transport's callbacks.
struct ExpertServer::Job {
  PeerId peer = 0;
  uint64_t call_id = 0;
  int64_t layer = 0;
  int64_t rows = 0;
  mesh::ExpertDispatch header;    // kept for its checksum
  std::vector<ExpertRow> wanted;  // in the order of the answer
  std::unique_ptr<float[]> in;    // [rows, width]
  std::unique_ptr<float[]> out;   // [wanted.size(), width]
  int64_t bytes = 0;              // of both, counted in landing_bytes
};

ExpertServer::ExpertServer(Transport* transport, const ExpertSet* set, ThreadPool* pool,
                           ExpertServerOptions options)
    : transport_(transport), set_(set), options_(std::move(options)), experts_(set, pool) {
  transport_->SetHandler(MessageType::kExpertDispatch, this);
  if (!options_.compute_inline) thread_ = std::thread([this] { Loop(); });
}

ExpertServer::~ExpertServer() { Stop(); }

void ExpertServer::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  if (!thread_.joinable()) return;
  work_.notify_all();
  transport_->Nudge();
  thread_.join();
}

ExpertServerStats ExpertServer::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

absl::StatusOr<PayloadTarget> ExpertServer::OnMessage(const Arrival& arrival) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Accept(arrival));
  return PayloadTarget{.buffer = std::as_writable_bytes(
                           std::span(job->in.get(), static_cast<size_t>(job->rows * set_->width))),
                       .done = [this, job](absl::Status status) { Landed(job, status); }};
}

absl::StatusOr<std::shared_ptr<ExpertServer::Job>> ExpertServer::Accept(const Arrival& arrival) {
  {
    std::lock_guard lock(mutex_);
    ++stats_.arrived;
  }
  mesh::ExpertDispatch d;
  if (!d.ParseFromArray(arrival.header.data(), static_cast<int>(arrival.header.size()))) {
    std::lock_guard lock(mutex_);
    ++stats_.malformed;
    return InvalidArgument("expert dispatch: the header does not parse");
  }
  const auto refuse = [&](const absl::Status& status, uint64_t ExpertServerStats::*counter) {
    {
      std::lock_guard lock(mutex_);
      ++(stats_.*counter);
    }
    Refuse(arrival.peer, d.call_id(), d.caller(), status);
    return status;
  };
  if (const absl::Status s = CheckIdentity(d, options_); !s.ok()) {
    return refuse(s, &ExpertServerStats::stale);
  }
  if (const absl::Status s = CheckShape(d, *set_, arrival.payload_bytes); !s.ok()) {
    return refuse(s, &ExpertServerStats::malformed);
  }

  auto job = std::make_shared<Job>();
  job->peer = arrival.peer;
  job->call_id = d.call_id();
  job->layer = d.layer();
  job->rows = d.rows();
  job->bytes = (job->rows + d.experts_size()) * set_->width * static_cast<int64_t>(sizeof(float));
  if (const absl::Status s = Reserve(*job); !s.ok()) return refuse(s, &ExpertServerStats::full);
  for (const RequestId& request : d.requests()) {
    LogInfo("expert.request",
            {{"request", request}, {"caller", d.caller()}, {"call", d.call_id()}});
  }

  job->wanted.reserve(static_cast<size_t>(d.experts_size()));
  int at = 0;
  for (int row = 0; row < d.experts_per_row_size(); ++row) {
    for (uint32_t i = 0; i < d.experts_per_row(row); ++i) {
      job->wanted.push_back({row, static_cast<int32_t>(d.experts(at++))});
    }
  }
  const auto floats = [&](int64_t n) {
    return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n * set_->width));
  };
  job->in = floats(job->rows);
  job->header = std::move(d);
  job->out = floats(static_cast<int64_t>(job->wanted.size()));
  return job;
}

absl::Status ExpertServer::Reserve(Job& job) {
  std::lock_guard lock(mutex_);
  if (stop_) return Unavailable("expert shard %s is stopping; use a replica", options_.name);
  if (stats_.queued >= options_.queue_max) {
    return ResourceExhausted("expert queue: %d calls are waiting; retry later", stats_.queued);
  }
  if (stats_.landing_bytes + job.bytes > options_.landing_bytes_max) {
    return ResourceExhausted(
        "expert buffers: %d of %d bytes are in use, the call needs %d; retry later",
        stats_.landing_bytes, options_.landing_bytes_max, job.bytes);
  }
  ++stats_.queued;
  stats_.landing_bytes += job.bytes;
  return absl::OkStatus();
}

void ExpertServer::Release(const Job& job) {
  std::lock_guard lock(mutex_);
  --stats_.queued;
  stats_.landing_bytes -= job.bytes;
}

void ExpertServer::Landed(const std::shared_ptr<Job>& job, const absl::Status& status) {
  if (!status.ok()) {
    Release(*job);
    Lost(*job, status);
    return;
  }
  if (options_.compute_inline) {
    std::unique_lock lock(inline_mutex_);
    Run(job);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(job);
  }
  work_.notify_one();
}

void ExpertServer::Loop() {
  while (const std::shared_ptr<Job> job = NextJob()) Run(job);
}

std::shared_ptr<ExpertServer::Job> ExpertServer::NextJob() {
  const auto called = [this] { return stop_ || !queue_.empty(); };
  for (;;) {
    const bool driven = transport_->Drive(
        [&] {
          std::lock_guard lock(mutex_);
          return called();
        },
        std::chrono::steady_clock::now() + kLookAgain);
    std::unique_lock lock(mutex_);
    if (!driven) work_.wait_for(lock, kLookAgain, called);
    if (stop_) return nullptr;
    if (queue_.empty()) continue;
    std::shared_ptr<Job> job = std::move(queue_.front());
    queue_.pop_front();
    return job;
  }
}

void ExpertServer::Run(const std::shared_ptr<Job>& job) {
  const auto payload = Bytes(job->in.get(), job->rows * set_->width);
  if (DispatchChecksum(job->header, payload) != job->header.crc32c()) {
    {
      std::lock_guard lock(mutex_);
      ++stats_.corrupt;
    }
    Release(*job);
    Refuse(job->peer, job->call_id, job->header.caller(),
           DataLoss("dispatch: the checksum does not match; send it again"));
    return;
  }
  const absl::Status status =
      experts_.Compute(job->layer, job->wanted, job->in.get(), job->out.get());
  CHECK(status.ok(), "checked on arrival: %s", status.ToString());
  Answer(job);
}

void ExpertServer::Answer(const std::shared_ptr<Job>& job) {
  const int64_t answers = static_cast<int64_t>(job->wanted.size());
  const auto payload = Bytes(job->out.get(), answers * set_->width);
  mesh::ExpertCombine c;
  c.set_call_id(job->call_id);
  c.set_rows(static_cast<uint32_t>(answers));
  c.set_width(static_cast<uint32_t>(set_->width));
  c.set_crc32c(CombineChecksum(c.call_id(), c.rows(), c.width(), payload));
  c.set_shard_epoch(options_.epoch);
  {
    std::lock_guard lock(mutex_);
    ++stats_.calls;
    stats_.rows += static_cast<uint64_t>(job->rows);
    stats_.expert_rows += static_cast<uint64_t>(answers);
  }
  transport_->SendHere(job->peer, MessageType::kExpertCombine, c.SerializeAsString(), payload,
                       [this, job](absl::Status sent) {
                         Release(*job);
                         if (!sent.ok()) Lost(*job, sent);
                       });
}

void ExpertServer::Lost(const Job& job, const absl::Status& reason) {
  LogWarning(
      "expert.lost",
      {{"caller", job.header.caller()}, {"call", job.call_id}, {"reason", reason.ToString()}});
  std::lock_guard lock(mutex_);
  ++stats_.lost;
}

void ExpertServer::Refuse(PeerId peer, uint64_t call_id, const std::string& caller,
                          const absl::Status& status) {
  LogWarning("expert.refused",
             {{"caller", caller}, {"call", call_id}, {"reason", status.ToString()}});
  mesh::ExpertCombine c;
  c.set_call_id(call_id);
  c.set_code(static_cast<int32_t>(status.code()));
  c.set_message(MessageOf(status));
  c.set_shard_epoch(options_.epoch);
  transport_->Send(peer, MessageType::kExpertCombine, c.SerializeAsString(), {},
                   [](absl::Status) {});
}

void ExpertServer::OnPeerLost(PeerId peer, const absl::Status& reason) {
  std::vector<std::shared_ptr<Job>> gone;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(queue_, [&](const std::shared_ptr<Job>& job) {
      if (job->peer != peer) return false;
      gone.push_back(job);
      --stats_.queued;
      stats_.landing_bytes -= job->bytes;
      return true;
    });
  }
  for (const auto& job : gone) Lost(*job, reason);
}

}  // namespace deltamesh
