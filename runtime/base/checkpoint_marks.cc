#include "runtime/base/checkpoint_marks.h"

#include <fstream>
#include <nlohmann/json.hpp>

namespace deltamesh {
namespace {

constexpr size_t kMarksBytesMax = size_t{1} << 20;

}  // namespace

bool HasRandomWeights(const std::string& folder) {
  std::ifstream in(folder + "/deltamesh.json", std::ios::binary);
  std::string text(kMarksBytesMax, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  const auto marks = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  return marks.is_object() && marks.value("random_weights", nlohmann::json(false)) == true;
}

}  // namespace deltamesh
