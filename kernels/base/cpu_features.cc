#include "kernels/base/cpu_features.h"

#include "hwy/highway.h"

namespace deltamesh::kernels {
namespace {

// The targets that simd_targets.h leaves enabled.
constexpr int64_t kUsable = HWY_AVX3 | HWY_AVX2 | HWY_NEON;

const char* NameOf(int64_t target) {
  switch (target) {
    case HWY_AVX3:
      return "AVX3";
    case HWY_AVX2:
      return "AVX2";
    default:
      return "NEON";
  }
}

int64_t Supported() {
  // Lower bits are better targets; a CPU with AVX3 always has AVX2.
  return hwy::SupportedTargets() & kUsable;
}

}  // namespace

bool CpuCanRun() { return Supported() != 0; }

std::string CpuRequirement() {
#if HWY_ARCH_X86
  return "an x86-64 CPU with AVX2, FMA, F16C and BMI2";
#else
  return "an Arm CPU with NEON and fused multiply-add";
#endif
}

std::vector<std::string> CpuTargets() {
  std::vector<std::string> names;
  for (int64_t targets = Supported(); targets != 0; targets &= targets - 1) {
    names.push_back(NameOf(targets & -targets));
  }
  return names;
}

bool ForceCpuTarget(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  int64_t chosen = name.empty() ? hwy::SupportedTargets() : 0;
  for (int64_t targets = Supported(); targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    if (name == NameOf(target)) chosen = target;
  }
  if (chosen == 0) return false;
  if (!name.empty()) hwy::SetSupportedTargetsForTest(chosen);
  hwy::GetChosenTarget().Update(chosen);
  return true;
}

}  // namespace deltamesh::kernels
