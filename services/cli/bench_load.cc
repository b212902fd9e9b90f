#include "services/cli/bench_load.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "services/cli/bench_rows.h"

namespace deltamesh {
namespace {

double TickSeconds() { return 1.0 / static_cast<double>(sysconf(_SC_CLK_TCK)); }

// Seconds of CPU of the whole machine; -1: unknown.
double MachineBusy() {
  std::ifstream in("/proc/stat");
  std::string name;
  double user, nice, system, idle, iowait, irq, softirq, steal;
  if (!(in >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal)) {
    return -1;
  }
  return (user + nice + system + irq + softirq + steal) * TickSeconds();
}

double Of(const timeval& t) {
  return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
}

double UsageOf(int who) {
  rusage usage{};
  getrusage(who, &usage);
  return Of(usage.ru_utime) + Of(usage.ru_stime);
}

struct Process {
  int64_t pid = 0;
  double ticks = 0;  // its own and those of children that it has waited for
};

// The living processes by their parents.
std::multimap<int64_t, Process> ByParent() {
  std::multimap<int64_t, Process> out;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator("/proc", error);
       !error && it != std::filesystem::end(it); it.increment(error)) {
    const std::string name = it->path().filename().string();
    Process process;
    const auto [end, bad] = std::from_chars(name.data(), name.data() + name.size(), process.pid);
    if (bad != std::errc() || end != name.data() + name.size()) continue;
    std::string text;
    std::getline(std::ifstream(it->path() / "stat"), text);
    if (text.rfind(')') == std::string::npos) continue;  // it has ended
    // After the name in brackets: state, parent, ..., the 12th to 15th the four times.
    std::istringstream fields(text.substr(text.rfind(')') + 1));
    std::string skipped;
    int64_t parent = 0;
    fields >> skipped >> parent;
    for (int i = 3; i <= 11; ++i) fields >> skipped;
    for (int i = 12; i <= 15; ++i) {
      double ticks = 0;
      fields >> ticks;
      process.ticks += ticks;
    }
    out.emplace(parent, process);
  }
  return out;
}

// Of this process and all below it, ended ones too.
double OwnBusy() {
  const std::multimap<int64_t, Process> processes = ByParent();
  double ticks = 0;
  std::vector<int64_t> parents = {getpid()};
  while (!parents.empty()) {
    const auto [begin, end] = processes.equal_range(parents.back());
    parents.pop_back();
    for (auto it = begin; it != end; ++it) {
      ticks += it->second.ticks;
      parents.push_back(it->second.pid);
    }
  }
  return UsageOf(RUSAGE_SELF) + UsageOf(RUSAGE_CHILDREN) + ticks * TickSeconds();
}

}  // namespace

OtherLoad::OtherLoad() : busy_(MachineBusy()), own_(OwnBusy()), start_(BenchSeconds()) {}

double OtherLoad::cores() const {
  const double wall = std::max(BenchSeconds() - start_, 1e-3);
  const double own = OwnBusy(), busy = MachineBusy();
  if (busy < 0 || busy_ < 0) return -1;
  return std::max(0.0, (busy - busy_ - (own - own_)) / wall);
}

}  // namespace deltamesh
