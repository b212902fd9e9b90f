#include "tests/golden/golden_file.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "runtime/base/status.h"

namespace deltamesh {

namespace {

using nlohmann::json;

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  CHECK(in.good(), "cannot read %s", path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<float> ReadVector(const json& ref, const std::string& blob) {
  CHECK(ref.at("dtype") == "f32", "dtype %s", ref.at("dtype").dump());
  size_t count = 1;
  for (const json& n : ref.at("shape")) count *= n.get<size_t>();
  const auto offset = ref.at("offset").get<size_t>();
  CHECK(offset + count * sizeof(float) <= blob.size(), "a vector beyond the end of the file");
  std::vector<float> values(count);
  std::memcpy(values.data(), blob.data() + offset, count * sizeof(float));
  return values;
}

Checksums ReadChecksums(const json& j) {
  return {j.at("n").get<int64_t>(), j.at("sum").get<double>(), j.at("l2").get<double>(),
          j.at("wsum").get<double>()};
}

GoldenPrompt ReadPrompt(const json& j, const std::string& blob) {
  GoldenPrompt p;
  p.tokens = j.at("tokens").get<Tokens>();
  p.wide_margin = j.at("wide_margin").get<bool>();
  p.argmax = j.at("argmax").get<Tokens>();
  p.logits_checks = ReadChecksums(j.at("logits_checks"));
  for (const json& at : j.at("positions")) {
    p.positions.push_back({at.at("pos").get<int64_t>(), ReadVector(at.at("logits"), blob),
                           at.at("top").get<std::vector<std::pair<TokenId, double>>>()});
  }
  for (const json& layer : j.at("state")) {
    for (const char* name : {"S", "conv", "latent", "k_rope"}) {
      const std::string checks = std::string(name) + "_checks";
      if (!layer.contains(checks)) continue;
      GoldenTensor t{name, layer.at("layer").get<int64_t>(), ReadChecksums(layer.at(checks)), {}};
      if (layer.contains(name)) t.values = ReadVector(layer.at(name), blob);
      p.state.push_back(std::move(t));
    }
  }
  return p;
}

}  // namespace

Checksums ChecksumsOf(std::span<const float> values) {
  Checksums c;
  c.n = static_cast<int64_t>(values.size());
  double squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double v = values[i];
    const auto hash = static_cast<uint32_t>(uint64_t{i} * 2654435761u);
    c.sum += v;
    squares += v * v;
    c.wsum += v * (static_cast<double>(hash) / 4294967296.0 - 0.5);
  }
  c.l2 = std::sqrt(squares);
  return c;
}

std::string Disagreement(const Checksums& want, const Checksums& got, double error) {
  if (want.n != got.n) return absl::StrFormat("%d values, not %d", got.n, want.n);
  const auto n = static_cast<double>(want.n);
  const auto off = [](const char* name, double w, double g, double bound) {
    return std::abs(g - w) <= bound  // false for NaN too
               ? std::string()
               : absl::StrFormat("%s is %.9g, not %.9g (bound %.2g); ", name, g, w, bound);
  };
  return off("sum", want.sum, got.sum, n * error) +
         off("l2", want.l2, got.l2, std::sqrt(n) * error) +
         off("wsum", want.wsum, got.wsum, n * error / 2);
}

GoldenFile GoldenFile::Load(const std::string& folder) {
  const json doc = json::parse(ReadAll(folder + "/golden.json"));
  const std::string blob = ReadAll(folder + "/" + doc.at("vectors").get<std::string>());
  GoldenFile file;
  for (const json& p : doc.at("prompts")) file.prompts.push_back(ReadPrompt(p, blob));
  for (const json& g : doc.at("greedy")) {
    file.greedy.push_back({g.at("prompt").get<Tokens>(), g.at("tokens").get<Tokens>(),
                           ReadVector(g.at("last_logits"), blob)});
  }
  return file;
}

}  // namespace deltamesh
