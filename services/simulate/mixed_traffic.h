// Several traffics at once, each as it would come alone.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "services/simulate/traffic.h"

namespace deltamesh {

class MixedTraffic final : public Traffic {
 public:
  // Their texts must have names that differ. Of two turns at once that of the earlier part comes first.
  explicit MixedTraffic(std::vector<std::unique_ptr<Traffic>> parts);

  std::optional<double> NextAt() const override;
  Turn Next() override;
  void Finished(const Turn& turn, double now) override;
  absl::Status status() const override;

 private:
  const std::vector<std::unique_ptr<Traffic>> parts_;
};

}  // namespace deltamesh
