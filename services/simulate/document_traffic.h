// Questions about shared documents: many prompts begin with the same long texts and end with words of their
// own, so what one prompt can use of another lies within it and not at its end.
//
// A prompt is a short common text, then one to three documents, then a question. Documents are asked about
// by popularity (Zipf); a second and third one belong to those before it, so prompts part between them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "services/simulate/content_path.h"
#include "services/simulate/sim_random.h"
#include "services/simulate/traffic.h"

namespace deltamesh {

struct DocumentTrafficOptions {
  uint64_t seed = 1;
  int64_t requests = 4000;
  double requests_per_second = 1.1;
  int64_t documents = 2000;
  double skew = 0.8;    // of popularity: rank to the power of minus this
  bool unique = false;  // every document is asked about once: only the common text is shared
};

class DocumentTraffic final : public Traffic {
 public:
  explicit DocumentTraffic(const DocumentTrafficOptions& options);

  std::optional<double> NextAt() const override;
  Turn Next() override;
  void Finished(const Turn& turn, double now) override;

 private:
  int64_t DrawDocument();

  const DocumentTrafficOptions options_;
  SimRandom random_;
  std::vector<double> popularity_;  // cumulative, ends with 1
  int64_t made_ = 0;
  double next_at_ = 0;
  std::vector<std::unique_ptr<ContentPath>> live_;  // by Turn::source
  std::vector<uint64_t> free_;
};

}  // namespace deltamesh
