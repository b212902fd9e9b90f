// Measures each new connection of a worker's hand-offs once: routers place by what it gives, and one which
// carries far less than it should is warned of. A wrong network device slows every answer and breaks none.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/transfer/bandwidth_probe.h"

namespace deltamesh {

// Thread-safe. The transport must be destroyed first, and Stop called before that.
class ConnectionMeter {
 public:
  // On the meter's thread: what a connection gave, or, when it did not end in time, at most could have.
  using Measured =
      std::function<void(const std::string& name, uint64_t epoch, double bytes_per_second)>;

  // Warns below `expect_mb` MB/s; 0: measures and warns of nothing.
  ConnectionMeter(Transport* transport, int64_t expect_mb, Measured measured);
  ~ConnectionMeter() { Stop(); }
  ConnectionMeter(const ConnectionMeter&) = delete;
  ConnectionMeter& operator=(const ConnectionMeter&) = delete;

  // Returns at once. The hand-off that opened the connection has a second before it is measured.
  void Add(PeerId peer, const std::string& name, uint64_t epoch);

  // Ends what is measured now; nothing is afterwards. Others' probes are answered still.
  void Stop();

 private:
  struct Connection {
    PeerId peer = 0;
    std::string name;
    uint64_t epoch = 0;
    std::chrono::steady_clock::time_point due;
  };

  void Run();
  void Measure(const Connection& connection);

  Transport* const transport_;
  const double expected_bytes_per_second_;
  const Measured measured_;
  BandwidthProbe probe_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Connection> queue_;  // guarded by mutex_
  bool stop_ = false;             // guarded by mutex_
  std::thread thread_;
};

}  // namespace deltamesh
