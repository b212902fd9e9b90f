#include "services/cli/bench_handoff.h"

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_receiver.h"
#include "runtime/transfer/handoff_sender.h"
#include "runtime/transfer/ucx_transport.h"
#include "services/cli/bench_link.h"
#include "services/cli/bench_load.h"
#include "services/cli/piped_child.h"
#include "services/common/flags.h"
#include "services/common/process.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kLongest = absl::Seconds(20);  // for any one wait
constexpr int64_t kMibMax = 256;
constexpr int64_t kInFlightMax = 16;

// A state of exactly `mib` MiB: three quarters are recurrent state in three layers, the rest latents in
// blocks of 128 KiB.
struct Shape {
  StateLayout layout;
  int64_t position = 0;
};

Shape ShapeOf(int64_t mib) {
  // One KDA layer of h heads of 128 x 128: h * 64 KiB, and no tails. One block of 64 x 512 floats: 128 KiB.
  Shape shape;
  shape.layout.kda_layers = 3;
  shape.layout.heads = 4 * mib;
  shape.layout.dim = 128;
  shape.layout.conv_taps = 1;
  shape.layout.mla_layers = 1;
  shape.layout.rank = 448;
  shape.layout.rope = 64;
  shape.position = 2 * mib * kBlockTokens;
  return shape;
}

absl::StatusOr<std::unique_ptr<UcxTransport>> OpenLoopback() {
  UcxTransportOptions options;
  options.spin = absl::Microseconds(WorkerFlags().spin_us);  // as workers are started
  RETURN_IF_ERROR(ApplyUcxDefaults(options));
  return UcxTransport::Create(options);
}

// Grants one landing per line and lets go of each state as soon as it is whole.
class Receiver {
 public:
  absl::Status Run(std::istream& in, std::ostream& out) {
    std::string word;
    int64_t mib = 0, slots = 0;
    if (!(in >> word >> mib >> slots) || word != "shape" || mib < 1 || mib > kMibMax || slots < 1 ||
        slots > kInFlightMax + 1) {
      return InvalidArgument("hand-off peer: the first line is not \"shape MIB SLOTS\"");
    }
    shape_ = ShapeOf(mib);
    const int64_t blocks = slots * shape_.position / kBlockTokens;
    ASSIGN_OR_RETURN(pools_, StatePools::Create(shape_.layout, slots, blocks));
    ASSIGN_OR_RETURN(transport_, OpenLoopback());
    HandoffReceiverOptions options;
    options.name = "bench-decode";
    options.layout = shape_.layout;
    receiver_ = std::make_unique<HandoffReceiver>(transport_.get(), &clock_, &entropy_, options,
                                                  [](const HandoffEvent&) {});
    absl::Status status;
    for (int64_t i = 0; status.ok() && in >> word; ++i) status = Grant(i, out);
    transport_.reset();
    return status;
  }

 private:
  absl::Status Grant(int64_t number, std::ostream& out) {
    // The state of the hand-off before may be let go of a moment after its verdict was sent.
    absl::StatusOr<HandoffBuffers> buffers = HandoffBuffers::Reserve(pools_, shape_.position);
    const absl::Time until = clock_.Now() + kLongest;
    while (absl::IsResourceExhausted(buffers.status()) && clock_.Now() < until) {
      absl::SleepFor(absl::Microseconds(50));
      buffers = HandoffBuffers::Reserve(pools_, shape_.position);
    }
    RETURN_IF_ERROR(buffers.status());
    HandoffGrant grant;
    grant.request_id = std::to_string(number);
    grant.position = shape_.position;
    grant.buffers = *std::move(buffers);
    ASSIGN_OR_RETURN(const mesh::Landing landing, receiver_->Grant(std::move(grant)));
    out << absl::BytesToHexString(landing.SerializeAsString()) << std::endl;
    return absl::OkStatus();
  }

  const SystemClock clock_;
  SystemEntropy entropy_;
  Shape shape_;
  StatePools pools_;
  std::unique_ptr<HandoffReceiver> receiver_;
  std::unique_ptr<UcxTransport> transport_;  // destroyed first
};

class Sender {
 public:
  static absl::StatusOr<std::unique_ptr<Sender>> Open(int64_t mib, int64_t in_flight) {
    std::unique_ptr<Sender> s(new Sender(ShapeOf(mib), in_flight));
    ASSIGN_OR_RETURN(s->peer_, PipedChild::Start({"bench-handoff-peer"}));
    RETURN_IF_ERROR(s->peer_->WriteLine(absl::StrFormat("shape %d %d\ngrant", mib, in_flight + 1)));
    ASSIGN_OR_RETURN(const StatePools pools, StatePools::Create(s->shape_.layout, 1, s->blocks()));
    ASSIGN_OR_RETURN(s->state_, SequenceState::Create(pools));
    RETURN_IF_ERROR(s->state_->Reserve(s->shape_.position));
    s->state_->Advance(s->shape_.position);
    std::fill_n(s->state_->slab().data(), s->shape_.layout.slab_floats(), 0.5f);
    for (const SlotRef& block : s->state_->blocks()) {
      std::fill_n(block.data(), s->shape_.layout.block_floats(), 0.25f);
    }
    ASSIGN_OR_RETURN(s->transport_, OpenLoopback());
    HandoffSenderOptions options;
    options.name = "bench-prefill";
    options.layout = s->shape_.layout;
    s->sender_ = std::make_unique<HandoffSender>(s->transport_.get(), &s->clock_, options,
                                                 [raw = s.get()](HandoffSent sent) {
                                                   std::lock_guard lock(raw->mutex_);
                                                   ++raw->ended_;
                                                   if (!sent.status.ok())
                                                     raw->failure_ = sent.status;
                                                   raw->changed_.notify_all();
                                                 });
    return s;
  }
  ~Sender() {
    transport_.reset();
    peer_.reset();
  }

  // Bytes per second of `count` hand-offs, from the first manifest to the last verdict. One landing is always
  // asked for ahead, as a router does while prompts are computed.
  absl::StatusOr<double> Move(int64_t count) {
    const double start = BenchSeconds();
    for (int64_t i = 0; i < count; ++i) {
      RETURN_IF_ERROR(Await(begun_ + 1 - in_flight_));
      RETURN_IF_ERROR(Begin());
    }
    RETURN_IF_ERROR(Await(begun_));
    const int64_t bytes = RegionPlan(shape_.layout, shape_.position, 0).bytes();
    return static_cast<double>(count * bytes) / (BenchSeconds() - start);
  }

 private:
  Sender(Shape shape, int64_t in_flight) : shape_(shape), in_flight_(in_flight) {}
  int64_t blocks() const { return shape_.position / kBlockTokens; }

  absl::Status Begin() {
    ASSIGN_OR_RETURN(const std::string line, peer_->ReadLine(kLongest));
    HandoffStart start;
    start.request_id = std::to_string(begun_++);
    if (!start.landing.ParseFromString(absl::HexStringToBytes(line))) {
      return Internal("hand-off peer: \"%s\" is no landing", line.substr(0, 40));
    }
    const RequestId id = start.request_id;
    RETURN_IF_ERROR(sender_->Begin(std::move(start)));
    for (int64_t b = 0; b < blocks(); ++b) {
      sender_->SendBlock(id, b, state_->blocks()[static_cast<size_t>(b)]);
    }
    for (int64_t l = 0; l < shape_.layout.kda_layers; ++l) {
      sender_->SendLayer(id, l, state_->slab());
    }
    return peer_->WriteLine("grant");
  }

  absl::Status Await(int64_t ended) {
    std::unique_lock lock(mutex_);
    const bool come = changed_.wait_until(lock, absl::ToChronoTime(absl::Now() + kLongest),
                                          [&] { return ended_ >= ended || !failure_.ok(); });
    if (!failure_.ok()) return failure_;
    if (come) return absl::OkStatus();
    return DeadlineExceeded("hand-off: %d of %d ended within %s", ended_, ended,
                            absl::FormatDuration(kLongest));
  }

  const SystemClock clock_;
  const Shape shape_;
  const int64_t in_flight_;
  int64_t begun_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t ended_ = 0;     // guarded by mutex_
  absl::Status failure_;  // guarded by mutex_
  std::unique_ptr<PipedChild> peer_;
  std::unique_ptr<SequenceState> state_;
  std::unique_ptr<HandoffSender> sender_;
  std::unique_ptr<UcxTransport> transport_;  // destroyed first
};

}  // namespace

absl::Status CheckHandoffOptions(const HandoffBenchOptions& o) {
  for (const int64_t m : o.mib) {
    if (m < 1 || m > kMibMax) return InvalidArgument("handoff-mib: %d; use 1 to %d", m, kMibMax);
  }
  for (const int64_t n : o.in_flight) {
    if (n < 1 || n > kInFlightMax) {
      return InvalidArgument("handoff-in-flight: %d; use 1 to %d", n, kInFlightMax);
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureHandoff(const HandoffBenchOptions& o, std::vector<BenchRow>* rows) {
  RETURN_IF_ERROR(CheckHandoffOptions(o));
  for (const int64_t mib : o.mib) {
    for (const int64_t in_flight : o.in_flight) {
      const int64_t count = std::max(in_flight, o.moved_mib / mib);
      ASSIGN_OR_RETURN(const std::unique_ptr<Sender> sender, Sender::Open(mib, in_flight));
      // Connects and touches all memory.
      RETURN_IF_ERROR(sender->Move(2 * (in_flight + 1)).status());
      BenchRow row = {.test = "handoff",
                      .n = mib << 20,
                      .seqs = in_flight,
                      .runs = {},
                      .ceiling = "",
                      .ceiling_runs = {}};
      for (int r = 0; r < o.repetitions; ++r) {
        const OtherLoad load;
        ASSIGN_OR_RETURN(const double rate, sender->Move(count));
        if (!o.ceiling) {
          row.AddOthers(load.cores());
          row.runs.push_back(rate);
          continue;
        }
        ASSIGN_OR_RETURN(const LinkRate link, MeasureLink(mib << 20, o.moved_mib << 20));
        row.AddOthers(load.cores());
        row.runs.push_back(rate);
        row.ceiling = link.name;
        row.ceiling_runs.push_back(link.bytes_per_second);
      }
      rows->push_back(std::move(row));
    }
  }
  return absl::OkStatus();
}

int RunHandoffPeer() {
  RestoreCrashSignals();
  InitLog("bench", LogLevel::kWarning);
  Receiver receiver;
  const absl::Status status = receiver.Run(std::cin, std::cout);
  if (!status.ok()) std::cerr << "deltamesh: " << status.message() << std::endl;
  return status.ok() ? 0 : 1;
}

}  // namespace deltamesh
