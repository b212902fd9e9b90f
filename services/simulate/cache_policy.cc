#include "services/simulate/cache_policy.h"

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int64_t kAll = int64_t{1} << 40;
constexpr int64_t kGridTokensMax = int64_t{1} << 24;

// Nothing is learned and nothing replaced; what is taken is up to the caller.
CachePolicy Plain(const std::string& name) {
  CachePolicy policy;
  policy.name = name;
  policy.tails = policy.ends = policy.junctions = policy.breakpoints = false;
  policy.learning.grid_blocks = 0;
  policy.tails_kept = policy.ends_kept = policy.left_kept = kAll;
  return policy;
}

absl::StatusOr<CachePolicy> Grid(const std::string& name, absl::string_view tokens) {
  CachePolicy policy = Plain(name);
  int64_t step = 0;
  if (!absl::SimpleAtoi(tokens, &step) || step < kPrefixBlockTokens ||
      step % kPrefixBlockTokens != 0 || step > kGridTokensMax) {
    return InvalidArgument("policy: \"%s\": the step must be a multiple of %d tokens, at most %d",
                           name, kPrefixBlockTokens, kGridTokensMax);
  }
  policy.plan.grid_blocks = step / kPrefixBlockTokens;
  policy.plan.cuts_max = kAll;
  return policy;
}

}  // namespace

absl::StatusOr<CachePolicy> PolicyNamed(const std::string& name) {
  CachePolicy policy = Plain(name);
  if (name == "ours") {
    policy = CachePolicy();
    policy.name = name;
    const PrefixTreeOptions defaults;
    policy.tails_kept = defaults.tails_kept;
    policy.ends_kept = defaults.ends_kept;
    policy.left_kept = defaults.left_kept;
    return policy;
  }
  if (name == "bound") {
    policy.free_state = true;
    return policy;
  }
  absl::string_view step = name;
  if (absl::ConsumePrefix(&step, "grid:")) return Grid(name, step);
  policy.tails = true;
  if (name == "tail") return policy;
  policy.junctions = true;
  if (name == "tail+junction") return policy;
  policy.ends = true;
  if (name == "tail+junction+end") return policy;
  if (name == "two-tails") {
    policy.tails_kept = 2;
    policy.ends_kept = 1;
    return policy;
  }
  return InvalidArgument(
      "policy: \"%s\" is not known; use ours, bound, grid:TOKENS, tail, tail+junction, "
      "tail+junction+end or two-tails",
      name);
}

std::vector<std::string> DefaultPolicies() {
  return {"bound", "grid:512",      "grid:2048",         "grid:8192", "grid:16384",
          "tail",  "tail+junction", "tail+junction+end", "two-tails", "ours"};
}

}  // namespace deltamesh
