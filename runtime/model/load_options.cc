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

std::string_view ActivationsName(Activations activations) {
  return activations == Activations::kInt8 ? "int8" : "float";
}

bool ParseActivations(std::string_view name, Activations* activations) {
  for (const Activations a : {Activations::kFloat, Activations::kInt8}) {
    if (name == ActivationsName(a)) return *activations = a, true;
  }
  return false;
}

}  // namespace deltamesh
