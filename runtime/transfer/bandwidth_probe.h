// Measures what a connection really carries, to warn when it is far below what its transport should give.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/transfer/handoff_types.h"
#include "runtime/transfer/transport.h"

namespace deltamesh {

struct BandwidthProbeOptions {
  // As hand-offs send: their segments, of two transfers at once.
  int64_t payload_bytes = kHandoffSegmentBytesMax;
  int payloads = 256;
  int in_flight = 16;
  absl::Duration timeout = absl::Seconds(5);
};

struct BandwidthResult {
  double bytes_per_second = 0;
  double round_trip_seconds = 0;  // of an empty message, the median of five
};

// Takes kProbe messages and answers each with an empty one; both ends of a measurement need one.
// Payloads land in scratch memory and are forgotten.
//
// Thread-safe; one Measure at a time. Measure blocks: never call it on the transport's thread. The transport
// must be destroyed first.
class BandwidthProbe final : public MessageHandler {
 public:
  // Payloads above `payload_bytes_max` are refused.
  explicit BandwidthProbe(Transport* transport,
                          int64_t payload_bytes_max = kHandoffSegmentBytesMax);
  ~BandwidthProbe() override;

  // DEADLINE_EXCEEDED when the answers do not come in time, FAILED_PRECONDITION when none comes, UNAVAILABLE
  // when the peer is lost, CANCELLED after Stop.
  absl::StatusOr<BandwidthResult> Measure(PeerId peer, const BandwidthProbeOptions& options = {});

  // Ends a measurement that runs and every later one at once. Others are still answered.
  void Stop();

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override;
  void OnPeerLost(PeerId peer, const absl::Status& reason) override;

 private:
  using Scratch = std::vector<std::byte>;

  absl::StatusOr<std::shared_ptr<Scratch>> TakeScratch(int64_t bytes);
  void ReturnScratch(std::shared_ptr<Scratch> scratch);
  absl::Status SendAndWait(PeerId peer, std::shared_ptr<std::vector<std::byte>> payload, int count,
                           int in_flight, absl::Time deadline);
  void Answer(PeerId peer);

  Transport* const transport_;
  const int64_t payload_bytes_max_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int answers_ = 0;                                // guarded by mutex_, of the current measurement
  PeerId peer_ = 0;                                // guarded by mutex_, measured now
  std::vector<std::shared_ptr<Scratch>> scratch_;  // guarded by mutex_, free ones
  int scratches_out_ = 0;                          // guarded by mutex_, for payloads that arrive
  bool stopped_ = false;                           // guarded by mutex_
  absl::Status failure_;                           // guarded by mutex_
};

// Logs the result, as a warning when it is below `expected_bytes_per_second`.
void ReportBandwidth(std::string_view peer, std::string_view lanes, const BandwidthResult& result,
                     double expected_bytes_per_second);

}  // namespace deltamesh
