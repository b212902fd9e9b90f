#include "kernels/base/simd_targets.h"
#include "kernels/probe/probe.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/probe/probe_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kAhead = 3072 / 8;  // words, like the kernels that stream weights

uint64_t ReadCpu(const std::byte* data, int64_t bytes, int streams) {
  const hn::CappedTag<uint64_t, 8> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t words = bytes / 8 / streams / 32 * 32;  // of one stream, in steps of 256 bytes
  auto a = hn::Zero(d), b = hn::Zero(d), c = hn::Zero(d), e = hn::Zero(d);
  const auto* base = reinterpret_cast<const uint64_t*>(data);
  for (int64_t i = 0; i + 4 * lanes <= words; i += 4 * lanes) {
    for (int s = 0; s < streams; ++s) {
      const uint64_t* p = base + s * words + i;
      for (int64_t ahead = kAhead; ahead < kAhead + 4 * lanes; ahead += 8) {
        __builtin_prefetch(p + ahead, 0, 3);
      }
      a = hn::Or(a, hn::LoadU(d, p));
      b = hn::Or(b, hn::LoadU(d, p + lanes));
      c = hn::Or(c, hn::LoadU(d, p + 2 * lanes));
      e = hn::Or(e, hn::LoadU(d, p + 3 * lanes));
    }
  }
  return hn::GetLane(hn::Or(hn::Or(a, b), hn::Or(c, e)));
}

// Twelve chains hide the latency of two units.
double FmaCpu(int64_t rounds, float* sink) {
  const hn::CappedTag<float, 16> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kChains = 12;
  V acc[kChains];
  for (V& v : acc) v = hn::Set(d, 1.0f);
  const V x = hn::Set(d, 1.0000001f), y = hn::Set(d, 1e-9f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = hn::MulAdd(acc[i], x, y);
  }
  V sum = acc[0];
  for (int i = 1; i < kChains; ++i) sum = hn::Add(sum, acc[i]);
  *sink = hn::GetLane(sum);
  return static_cast<double>(rounds) * kChains * 2 * static_cast<double>(hn::Lanes(d));
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(ReadCpu);
HWY_EXPORT(FmaCpu);

uint64_t ReadProbe(const std::byte* data, int64_t bytes, int streams) {
  return HWY_DYNAMIC_DISPATCH(ReadCpu)(data, bytes, streams);
}
double FmaProbe(int64_t rounds, float* sink) { return HWY_DYNAMIC_DISPATCH(FmaCpu)(rounds, sink); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE
