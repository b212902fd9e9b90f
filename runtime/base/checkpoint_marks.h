// What a checkpoint folder says of itself in deltamesh.json. No weights are read.
#pragma once

#include <string>

namespace deltamesh {

// Whether its weights were drawn by a generator ("random_weights"). False when it says nothing, or nothing
// that can be read.
bool HasRandomWeights(const std::string& folder);

}  // namespace deltamesh
