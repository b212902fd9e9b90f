#include "services/plan/sizes.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<double> BytesOfType(const std::string& what, const std::string& type) {
  if (type == "f32") return 4;
  if (type == "bf16") return 2;
  if (type == "fp8") return 1;
  return InvalidArgument("%s: \"%s\" is not known; use f32, bf16 or fp8", what, type);
}

double SequenceSizes::latents(int64_t tokens) const {
  return per_block * static_cast<double>((tokens + kBlockTokens - 1) / kBlockTokens);
}

SequenceSizes SizesOf(const ModelShape& shape, const CacheWidths& widths) {
  const StateLayout& l = shape.layout;
  const auto layers = static_cast<double>(l.kda_layers);
  SequenceSizes sizes;
  // One matrix [key, value] per head and recurrent layer, whatever the length (StateLayout::s_floats).
  sizes.state = layers * static_cast<double>(l.s_floats()) * widths.state;
  // The last taps - 1 inputs of the three streams q, k, v.
  sizes.conv = layers * static_cast<double>(l.conv_floats()) * widths.conv;
  // Decay, decayed keys and u rows of the tile that is not folded yet: always float.
  sizes.open_tile =
      layers * static_cast<double>(l.decay_floats() + l.khat_floats() + l.u_floats()) * 4;
  // One latent row and its extra key per attention layer; there is no separate key and value.
  sizes.per_token = static_cast<double>(l.mla_layers * l.latent_width()) * widths.latent;
  sizes.per_block = sizes.per_token * static_cast<double>(kBlockTokens);
  return sizes;
}

int64_t BreakEvenTokens(const SequenceSizes& sizes) {
  return sizes.per_token > 0 ? static_cast<int64_t>(sizes.snapshot() / sizes.per_token) : 0;
}

std::vector<CacheVariant> CompareCaches(const ModelShape& shape, const CacheWidths& widths,
                                        const VariantOptions& o) {
  const StateLayout& l = shape.layout;
  const auto layers = static_cast<double>(shape.layers());
  const auto tokens = static_cast<double>(o.tokens);
  CacheWidths compared = widths;
  compared.latent = o.value_bytes;
  const SequenceSizes own = SizesOf(shape, compared);
  std::vector<CacheVariant> out;
  const auto add = [&](std::string name, std::string how, double per_token, double fixed) {
    out.push_back({.name = std::move(name),
                   .how = std::move(how),
                   .per_token = per_token,
                   .fixed = fixed,
                   .bytes = per_token * tokens + fixed});
  };
  add("this model",
      absl::StrFormat("%d recurrent states, %d layers of latents", l.kda_layers, l.mla_layers),
      own.per_token, own.snapshot());
  // DeepSeek-V2 (arXiv 2405.04434), table 1: MLA keeps d_c + d_R values per token and layer, multi-head
  // attention 2 n_h d_h, grouped-query attention 2 n_g d_h.
  add("all MLA", absl::StrFormat("%d layers of %d latent values", shape.layers(), l.latent_width()),
      layers * static_cast<double>(l.latent_width()) * o.value_bytes, 0);
  const double head = static_cast<double>(shape.key_dim + shape.value_dim) * o.value_bytes;
  add("multi-head", absl::StrFormat("%d heads of keys and values", shape.heads),
      layers * static_cast<double>(shape.heads) * head, 0);
  const int64_t groups = std::min(o.groups, shape.heads);
  const double grouped = static_cast<double>(groups) * head;
  add("grouped-query", absl::StrFormat("%d heads of keys and values", groups), layers * grouped, 0);
  // The recurrent layers slide, the others keep all; without recurrent layers three of four slide.
  const int64_t full = l.kda_layers > 0 ? l.mla_layers : (l.mla_layers + 3) / 4;
  const int64_t kept = std::min(o.window, o.tokens);
  add("sliding window",
      absl::StrFormat("%d of %d layers keep %d tokens, grouped-query", shape.layers() - full,
                      shape.layers(), kept),
      static_cast<double>(full) * grouped,
      static_cast<double>(shape.layers() - full) * static_cast<double>(kept) * grouped);
  return out;
}

}  // namespace deltamesh
