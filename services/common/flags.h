// Flags that several roles share. Every bound of a role is a flag (or DELTAMESH_<FLAG> in the environment)
// and is printed once at start.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "runtime/base/log.h"
#include "services/common/address.h"

namespace CLI {
class App;
}

namespace deltamesh {

// What every worker process takes.
struct WorkerFlags {
  std::string model;                             // checkpoint folder
  std::vector<std::string> routers;              // gRPC targets
  std::string name;                              // unique in the mesh; empty: role-hostname-pid
  std::string listen = "127.0.0.1:0";            // gRPC: health and reflection
  std::string http = "127.0.0.1:0";              // /metrics, /healthz, /readyz
  std::string transport_listen = "127.0.0.1:0";  // where large buffers arrive
  std::string transport_advertise;    // names the interface of a wildcard; empty: as listened
  int64_t transport_peers = 240;      // connections of large buffers, in and out
  int threads = 1;                    // of the step loop
  std::string cpus;                   // that the process may run on; empty: as started
  int64_t spin_us = 50;               // of looking for more work before a thread sleeps; 0: none
  std::string packed_dir = "auto";    // where packed weights are kept: auto, off or a folder
  double packed_max_gib = 64;         // of them, when another is packed
  std::string weights = "stored";     // width of matrices: stored or 8bit
  std::string activations = "float";  // inputs of narrow matrices: float or int8
  double drain_seconds = 10;          // longest wait for running requests after SIGTERM
  std::string ports_file;             // where to write the chosen ports; empty: nowhere
  int64_t parent = 0;                 // end when this process dies; 0: never
  std::string log_level = "info";
};
void AddWorkerFlags(CLI::App* app, WorkerFlags* flags);

// Lets every flag that `app` has so far be given as DELTAMESH_<FLAG> too: --drain-seconds by
// DELTAMESH_DRAIN_SECONDS. The command line wins. For what people do not see, and for --help, not.
void NameInEnvironment(CLI::App* app);

// One of the names AddWorkerFlags accepts; anything else is info.
LogLevel ParseLogLevel(std::string_view name);

// Names of workers and routers go into messages, logs and labels of metrics: printable ASCII without blanks.
absl::Status CheckProcessName(std::string_view name);

// Checks the flags before anything is loaded, fills in the default name and takes the CPUs: call before
// threads are started.
absl::Status FinishWorkerFlags(std::string_view role, WorkerFlags* flags);

// Prints `key = value` lines under a title, one line each, to stderr.
void PrintConfiguration(std::string_view title,
                        const std::vector<std::pair<std::string, std::string>>& values);

// OK when a file of this name could be written, or none is named.
absl::Status CheckFileToWrite(std::string_view flag, const std::string& path);

// Writes `key=value` lines to `path` atomically (a reader sees all of it or none).
absl::Status WriteKeyValues(const std::string& path,
                            const std::vector<std::pair<std::string, std::string>>& values);

}  // namespace deltamesh
