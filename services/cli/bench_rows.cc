#include "services/cli/bench_rows.h"

#include <algorithm>
#include <chrono>
#include <fstream>

#include "absl/strings/str_format.h"

namespace deltamesh {
namespace {

// A run during which others used more than this many cores is marked as disturbed.
constexpr double kOthersMax = 0.12;

bool InBytes(const BenchRow& row) { return row.test == "handoff"; }

std::string Size(const BenchRow& row) {
  if (!InBytes(row)) return absl::StrFormat("%d", row.n);
  return absl::StrFormat("%d MiB", row.n >> 20);
}

}  // namespace

double BenchSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const size_t half = v.size() / 2;
  return v.size() % 2 == 1 ? v[half] : (v[half - 1] + v[half]) / 2;
}

std::optional<double> BenchRow::fraction() const {
  if (ceiling_runs.empty()) return std::nullopt;
  if (ceiling_runs.size() != runs.size()) return median() / Median(ceiling_runs);
  std::vector<double> ratios;
  for (size_t i = 0; i < runs.size(); ++i) ratios.push_back(runs[i] / ceiling_runs[i]);
  return Median(ratios);
}

int64_t PeakResidentBytes() {
  std::ifstream in("/proc/self/status");
  for (std::string key; in >> key;) {
    int64_t kib;
    if (key == "VmHWM:" && in >> kib) return kib * 1024;
  }
  return -1;
}

void PrintRows(const std::vector<BenchRow>& rows, std::ostream& out) {
  out << "test           size  context  sequences       median            range          of the "
         "ceiling\n";
  bool disturbed = false;
  for (const BenchRow& r : rows) {
    const double unit = InBytes(r) ? 1e-9 : 1;
    const int digits = InBytes(r) ? 2 : 1;
    const auto [low, high] = std::minmax_element(r.runs.begin(), r.runs.end());
    const bool mark = r.others > kOthersMax;
    disturbed = disturbed || mark;
    out << absl::StrFormat("%-12s %6s %8d %10d %9.*f %-5s%s %8.*f .. %-8.*f", r.test, Size(r),
                           r.depth, r.seqs, digits, r.median() * unit,
                           InBytes(r) ? "GB/s" : "tok/s", mark ? "*" : " ", digits, *low * unit,
                           digits, *high * unit);
    if (const auto fraction = r.fraction()) {
      out << absl::StrFormat(" %6.1f %% of %s", 100 * *fraction, r.ceiling);
      if (r.ceiling_runs.size() == r.runs.size()) {
        out << absl::StrFormat(" (%.*f)", digits, Median(r.ceiling_runs) * unit);
      }
    }
    out << "\n";
  }
  if (disturbed) out << absl::StrFormat("* other processes used more than %g cores\n", kOthersMax);
}

nlohmann::ordered_json RowsJson(const std::vector<BenchRow>& rows) {
  auto out = nlohmann::ordered_json::array();
  for (const BenchRow& r : rows) {
    nlohmann::ordered_json row = {
        {"test", r.test}, {"n", r.n}, {"depth", r.depth}, {"seqs", r.seqs}};
    const char* const suffix = InBytes(r) ? "gbs" : "tps";
    const double unit = InBytes(r) ? 1e-9 : 1;
    const auto scaled = [&](std::vector<double> v) {
      for (double& x : v) x *= unit;
      return v;
    };
    row[std::string("median_") + suffix] = r.median() * unit;
    // Not known: null.
    row["clean"] =
        r.others < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(r.others <= kOthersMax);
    row["runs"] = scaled(r.runs);
    row["rejected"] = nlohmann::ordered_json::array();
    if (r.others >= 0) row["others_max"] = r.others;
    if (const auto fraction = r.fraction()) {
      row["fraction_of_ceiling"] = *fraction;
      row["ceiling"] = r.ceiling;
      row[std::string("ceiling_") + suffix] = Median(r.ceiling_runs) * unit;
      if (r.ceiling_runs.size() == r.runs.size()) row["ceiling_runs"] = scaled(r.ceiling_runs);
    }
    out.push_back(std::move(row));
  }
  return out;
}

std::string JsonText(const nlohmann::ordered_json& document) {
  return document.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace deltamesh
