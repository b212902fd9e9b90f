#include "services/plan/measured_rates.h"

#include "nlohmann/json.hpp"
#include "runtime/base/status.h"
#include "runtime/model/json_reader.h"

namespace deltamesh {

absl::StatusOr<MeasuredRates> ReadMeasuredRates(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, int64_t{16} << 20));
  ASSIGN_OR_RETURN(const nlohmann::json parsed, ParseStrictJson(text, path));
  const auto results = parsed.is_object() ? parsed.find("results") : parsed.end();
  if (!parsed.is_object() || results == parsed.end() || !results->is_array()) {
    return InvalidArgument("%s: has no list of results; give what `deltamesh bench --json` wrote",
                           path);
  }
  MeasuredRates rates;
  int64_t longest = 0, most = 0;
  for (const nlohmann::json& row : *results) {
    JsonReader reader(row, path, "results.");
    const std::string test = reader.String("test");
    RETURN_IF_ERROR(reader.status());
    if (test != "prefill" && test != "decode") continue;
    const int64_t n = reader.Int("n", 1, int64_t{1} << 40);
    const int64_t sequences = reader.Int("seqs", 1, int64_t{1} << 20);
    const double tokens = reader.Number("median_tps", 1e-6, 1e12);
    RETURN_IF_ERROR(reader.status());
    if (test == "prefill" && n > longest) {
      longest = n;
      rates.prefill = tokens;
    } else if (test == "decode" && sequences > most) {
      most = sequences;
      rates.decode = tokens;
      rates.stream = tokens / static_cast<double>(sequences);
    }
  }
  if (longest == 0 && most == 0) {
    return InvalidArgument("%s: measured neither prefill nor decode", path);
  }
  return rates;
}

}  // namespace deltamesh
