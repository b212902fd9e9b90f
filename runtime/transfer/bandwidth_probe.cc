#include "runtime/transfer/bandwidth_probe.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr std::string_view kAsk = "probe";
constexpr std::string_view kAnswer = "probed";
constexpr int kRoundTrips = 5;
constexpr size_t kScratchKept = 16;  // as many as are in flight
constexpr int kScratchOutMax = 64;   // beyond, whoever sends does not finish what it began

double Seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

}  // namespace

BandwidthProbe::BandwidthProbe(Transport* transport, int64_t payload_bytes_max)
    : transport_(transport), payload_bytes_max_(payload_bytes_max) {
  transport->SetHandler(MessageType::kProbe, this);
}

BandwidthProbe::~BandwidthProbe() = default;

absl::StatusOr<PayloadTarget> BandwidthProbe::OnMessage(const Arrival& arrival) {
  if (arrival.payload_bytes > payload_bytes_max_) {
    return InvalidArgument("probe: payload of %d bytes; at most %d", arrival.payload_bytes,
                           payload_bytes_max_);
  }
  const PeerId peer = arrival.peer;
  if (arrival.header == kAnswer) {
    if (arrival.payload_bytes > 0) return InvalidArgument("probe: an answer with a payload");
    std::lock_guard lock(mutex_);
    if (peer == peer_) ++answers_;
    changed_.notify_all();
    return PayloadTarget{};
  }
  if (arrival.payload_bytes == 0) {
    Answer(peer);
    return PayloadTarget{};
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Scratch> scratch, TakeScratch(arrival.payload_bytes));
  const std::span<std::byte> buffer(scratch->data(), static_cast<size_t>(arrival.payload_bytes));
  return PayloadTarget{buffer, [this, peer, scratch](const absl::Status& status) {
                         ReturnScratch(scratch);
                         if (status.ok()) Answer(peer);
                       }};
}

// Memory is kept from payload to payload, so that its first touch is not measured.
absl::StatusOr<std::shared_ptr<BandwidthProbe::Scratch>> BandwidthProbe::TakeScratch(
    int64_t bytes) {
  std::shared_ptr<Scratch> scratch;
  {
    std::lock_guard lock(mutex_);
    if (scratches_out_ >= kScratchOutMax) {
      return ResourceExhausted("probe: %d payloads are arriving, as many as allowed",
                               scratches_out_);
    }
    ++scratches_out_;
    if (!scratch_.empty()) {
      scratch = std::move(scratch_.back());
      scratch_.pop_back();
    }
  }
  if (scratch == nullptr) scratch = std::make_shared<Scratch>();
  if (static_cast<int64_t>(scratch->size()) < bytes) scratch->resize(static_cast<size_t>(bytes));
  return scratch;
}

void BandwidthProbe::ReturnScratch(std::shared_ptr<Scratch> scratch) {
  std::lock_guard lock(mutex_);
  --scratches_out_;
  if (scratch_.size() < kScratchKept) scratch_.push_back(std::move(scratch));
}

void BandwidthProbe::Answer(PeerId peer) {
  transport_->Send(peer, MessageType::kProbe, kAnswer, {}, [](const absl::Status&) {});
}

void BandwidthProbe::OnPeerLost(PeerId peer, const absl::Status& reason) {
  std::lock_guard lock(mutex_);
  if (peer == peer_ && failure_.ok()) failure_ = reason;
  changed_.notify_all();
}

void BandwidthProbe::Stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  failure_ = absl::CancelledError("probe: stopped");
  changed_.notify_all();
}

// Sends `count` messages, at most `in_flight` unanswered at a time, and waits for every answer.
absl::Status BandwidthProbe::SendAndWait(PeerId peer,
                                         std::shared_ptr<std::vector<std::byte>> payload, int count,
                                         int in_flight, absl::Time deadline) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return absl::CancelledError("probe: stopped");
    answers_ = 0;
    peer_ = peer;
    failure_ = absl::OkStatus();
  }
  absl::Status result;
  for (int sent = 0; result.ok() && sent <= count; ++sent) {
    const int needed = sent < count ? sent - in_flight + 1 : count;
    {
      std::unique_lock lock(mutex_);
      const bool come = changed_.wait_until(lock, absl::ToChronoTime(deadline),
                                            [&] { return answers_ >= needed || !failure_.ok(); });
      result = come ? failure_
                    : DeadlineExceeded("probe: %d of %d answers came in time", answers_, count);
    }
    if (!result.ok() || sent == count) break;
    // The completion keeps the payload. A peer that was lost before is told of only here.
    transport_->Send(peer, MessageType::kProbe, kAsk, *payload,
                     [this, peer, payload](const absl::Status& status) {
                       if (!status.ok()) OnPeerLost(peer, status);
                     });
  }
  std::lock_guard lock(mutex_);
  peer_ = 0;
  return result;
}

absl::StatusOr<BandwidthResult> BandwidthProbe::Measure(PeerId peer,
                                                        const BandwidthProbeOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  auto empty = std::make_shared<std::vector<std::byte>>();
  std::vector<double> trips;
  for (int i = 0; i <= kRoundTrips; ++i) {  // the first also connects
    const auto start = std::chrono::steady_clock::now();
    const absl::Status trip = SendAndWait(peer, empty, 1, 1, deadline);
    if (i == 0 && absl::IsDeadlineExceeded(trip)) {
      return FailedPrecondition("probe: nothing was answered within %s; it may know no probes",
                                absl::FormatDuration(options.timeout));
    }
    RETURN_IF_ERROR(trip);
    if (i > 0) trips.push_back(Seconds(std::chrono::steady_clock::now() - start));
  }
  std::sort(trips.begin(), trips.end());

  auto payload =
      std::make_shared<std::vector<std::byte>>(static_cast<size_t>(options.payload_bytes));
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(SendAndWait(peer, payload, options.payloads, options.in_flight, deadline));
  BandwidthResult result;
  result.round_trip_seconds = trips[trips.size() / 2];
  result.bytes_per_second = static_cast<double>(options.payload_bytes) * options.payloads /
                            Seconds(std::chrono::steady_clock::now() - start);
  return result;
}

void ReportBandwidth(std::string_view peer, std::string_view lanes, const BandwidthResult& result,
                     double expected_bytes_per_second) {
  const bool slow = result.bytes_per_second < expected_bytes_per_second;
  Log(slow ? LogLevel::kWarning : LogLevel::kInfo, slow ? "transport.slow" : "transport.bandwidth",
      {{"peer", peer},
       {"lanes", lanes},
       {"mb_per_second", result.bytes_per_second / 1e6},
       {"expected_mb_per_second", expected_bytes_per_second / 1e6},
       {"round_trip_us", result.round_trip_seconds * 1e6}});
}

}  // namespace deltamesh
