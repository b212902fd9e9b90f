// The rows of a benchmark, as a table for people and as JSON for scripts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace deltamesh {

double BenchSeconds();  // of a clock that only goes forwards
double Median(std::vector<double> values);

struct BenchRow {
  std::string test;  // "prefill", "decode", "handoff", "mesh-prefill", "mesh-decode-2-shards"
  int64_t n = 0;     // tokens of a prompt, steps, or bytes of a hand-off
  int64_t depth = 0, seqs = 1;
  std::vector<double> runs;          // tokens per second, or bytes per second of a hand-off
  std::string ceiling;               // what the row is measured against; empty: nothing
  std::vector<double> ceiling_runs;  // in the row's unit; one per run where both took turns
  double others = -1;                // most cores that others used during a run; -1: not known

  // Of one more run.
  void AddOthers(double cores) {
    others = runs.empty() ? cores : cores < 0 || others < 0 ? -1 : std::max(others, cores);
  }
  double median() const { return Median(runs); }
  // The median of ratios where both took turns, else the ratio of medians.
  std::optional<double> fraction() const;
};

// The most memory this process ever had, -1 when the system does not tell.
int64_t PeakResidentBytes();

void PrintRows(const std::vector<BenchRow>& rows, std::ostream& out);
nlohmann::ordered_json RowsJson(const std::vector<BenchRow>& rows);
// Ends with a line feed. What is not UTF-8, as paths may be, is replaced.
std::string JsonText(const nlohmann::ordered_json& document);

}  // namespace deltamesh
