#include "runtime/model/load_options.h"

namespace deltamesh {

std::string_view WeightWidthName(WeightWidth width) {
  return width == WeightWidth::k8bit ? "8bit" : "stored";
}

bool ParseWeightWidth(std::string_view name, WeightWidth* width) {
  for (const WeightWidth w : {WeightWidth::kStored, WeightWidth::k8bit}) {
    if (name == WeightWidthName(w)) return *width = w, true;
  }
  return false;
}

}  // namespace deltamesh
