// The other process of the UCX tests.
//   echo             listens, prints its address, answers every message with the same header and payload
//   source ADDRESS   connects and sends 64 MiB messages without end
//   sink             listens, prints its address, takes everything
//   probe            listens, prints its address, answers bandwidth probes
//   measure ADDRESS BYTES COUNT   measures against a "probe" and prints MB/s
// Ends when standard input closes.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "runtime/transfer/bandwidth_probe.h"
#include "tests/unit/transfer/ucx_recorder.h"

namespace deltamesh {
namespace {

class Echo final : public Recorder {
 public:
  explicit Echo(bool answer) : answer_(answer) {}
  void Use(Transport* transport) { transport_ = transport; }

 private:
  void Add(const std::shared_ptr<Recorded>& message) override {
    if (!answer_ || !message->status.ok()) return;
    transport_->Send(message->peer, message->type, message->header, message->payload,
                     [message](absl::Status) {});
  }
  bool answer_;
  Transport* transport_ = nullptr;
};

void WaitForEnd() {
  char c;
  while (read(STDIN_FILENO, &c, 1) > 0) {
  }
}

void Listen(bool answer) {
  Echo echo(answer);
  auto transport = OpenLoopback();
  echo.Use(transport.get());
  transport->SetHandler(MessageType::kProbe, &echo);
  std::printf("%s\n", transport->address().c_str());
  std::fflush(stdout);
  WaitForEnd();
}

void Probe() {
  auto transport = OpenLoopback();
  BandwidthProbe probe(transport.get(), int64_t{1} << 30);
  std::printf("%s\n", transport->address().c_str());
  std::fflush(stdout);
  WaitForEnd();
  transport.reset();
}

void Measure(std::string_view address, int64_t bytes, int count) {
  auto transport = OpenLoopback();
  BandwidthProbe probe(transport.get());
  const auto result =
      probe.Measure(*transport->Connect(address),
                    {.payload_bytes = bytes, .payloads = count, .timeout = absl::Seconds(60)});
  CHECK_OK(result.status());
  std::printf("%.0f MB/s, round trip %.0f us, lanes %s\n", result->bytes_per_second / 1e6,
              result->round_trip_seconds * 1e6, transport->lanes().c_str());
  transport.reset();
}

void Source(std::string_view address) {
  Recorder recorder;
  auto transport = OpenLoopback();
  transport->SetHandler(MessageType::kProbe, &recorder);
  const PeerId peer = *transport->Connect(address);
  const std::vector<std::byte> payload = Pattern(64 << 20, 1);
  std::atomic<bool> stop{false};
  std::thread sender([&] {
    for (size_t i = 0; !stop; ++i) {
      transport->Send(peer, MessageType::kProbe, "x", payload, recorder.Count());
      recorder.Wait(5,
                    [&](const Recorder& r) { return r.sent_.size() + 2 > i || !r.lost_.empty(); });
    }
  });
  WaitForEnd();
  stop = true;
  sender.join();
  transport.reset();
}

}  // namespace
}  // namespace deltamesh

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "echo") deltamesh::Listen(true);
  if (mode == "sink") deltamesh::Listen(false);
  if (mode == "source" && argc > 2) deltamesh::Source(argv[2]);
  if (mode == "probe") deltamesh::Probe();
  if (mode == "measure" && argc > 4)
    deltamesh::Measure(argv[2], std::atoll(argv[3]), std::atoi(argv[4]));
  return 0;
}
