// Vector versions of kernels/base/math.h, operation for operation. Included once per Highway
// target.
#if defined(DELTAMESH_KERNELS_BASE_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_BASE_MATH_INL_H_
#undef DELTAMESH_KERNELS_BASE_MATH_INL_H_
#else
#define DELTAMESH_KERNELS_BASE_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/base/math.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <int N, class D, class V = hn::Vec<D>>
HWY_INLINE V Horner(D d, const float (&c)[N], V x) {
  V p = hn::Set(d, c[N - 1]);
  for (int i = N - 2; i >= 0; --i) p = hn::MulAdd(p, x, hn::Set(d, c[i]));
  return p;
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V x) {
  using namespace math_internal;
  const hn::RebindToSigned<D> di;
  const V high = hn::Set(d, kExpHigh), low = hn::Set(d, kExpLow), one = hn::Set(d, 1.0f);
  const V magic = hn::Set(d, kRoundMagic);
  x = hn::IfThenElse(hn::Gt(x, high), high, x);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  const V shifted = hn::MulAdd(x, hn::Set(d, kLog2E), magic);
  const V n = hn::Sub(shifted, magic);
  V r = hn::MulAdd(n, hn::Set(d, -kLn2High), x);
  r = hn::MulAdd(n, hn::Set(d, -kLn2Low), r);
  V p = Horner(d, kExpPoly, r);
  p = hn::MulAdd(p, r, one);
  p = hn::MulAdd(p, r, one);
  const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  const auto half = hn::ShiftRight<1>(exponent);
  const auto rest = hn::Sub(exponent, half);
  const auto bias = hn::Set(di, 127);
  p = hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias))));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(rest, bias))));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V e = Exp(d, hn::Neg(hn::Abs(x)));
  const V numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  using namespace math_internal;
  const V one = hn::Set(d, 1.0f);
  const V a = hn::Abs(x);
  const V z = hn::Mul(a, a);
  const V small = hn::MulAdd(hn::Mul(a, z), Horner(d, kTanhPoly, z), a);
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(Exp(d, hn::Add(a, a)), one)));
  return hn::CopySign(hn::IfThenElse(hn::Lt(a, hn::Set(d, kTanhSmall)), small, large), x);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Softplus(D d, V x) {
  using namespace math_internal;
  const V e = Exp(d, hn::Neg(hn::Abs(x)));
  const V t = hn::Div(hn::Add(e, e), hn::Add(hn::Set(d, 2.0f), e));
  const V z = hn::Mul(t, t);
  const V log1p = hn::MulAdd(hn::Mul(t, z), Horner(d, kLog1pPoly, z), t);
  return hn::Add(hn::IfThenElseZero(hn::Gt(x, hn::Zero(d)), x), log1p);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Silu(D d, V x) {
  const V low = hn::Set(d, math_internal::kSiluLow);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  return hn::Mul(x, Sigmoid(d, x));
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
