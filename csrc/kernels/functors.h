// The arithmetic, once: host vectors, host scalars and CUDA lanes all go through these.
//
// `V` (`F` of floats, `I` of 32-bit integers) is a scalar or a GCC vector: the expressions mean the
// same for both, which is why they avoid && and std::min.
//
// Like pack.h, this has no include guard and is included inside a namespace, once per instruction
// set and after its target options: GCC splits vector comparisons and selections into single lanes
// in a function that was parsed for a processor without such vectors, even if it is inlined into
// one for a better processor later. Include dispatch.h before.

struct Sum {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a * b;
  }
};
// A NaN on either side wins: `a != a` keeps a's, and a comparison with b's is false and takes b.
// Of two zeros, which compare equal, b wins.
struct Min {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};
struct And {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a ^ b;
  }
};

// What combines two accumulators. An average is a sum that is divided at the end, once: by IEEE
// division, or truncated for integers. Truth values are 0 and 1: their sum is an or; minimum,
// maximum and product are right as they are.
template <class T, ReduceOp op>
struct ChooseFunctor {
  using type = Sum;  // kSum, kAvg, kPremulSum
};
template <class T>
struct ChooseFunctor<T, ReduceOp::kMin> {
  using type = Min;
};
template <class T>
struct ChooseFunctor<T, ReduceOp::kMax> {
  using type = Max;
};
template <class T>
struct ChooseFunctor<T, ReduceOp::kProduct> {
  using type = Product;
};
template <class T>
struct ChooseFunctor<T, ReduceOp::kBand> {
  using type = And;
};
template <class T>
struct ChooseFunctor<T, ReduceOp::kBor> {
  using type = Or;
};
template <class T>
struct ChooseFunctor<T, ReduceOp::kBxor> {
  using type = Xor;
};
template <>
struct ChooseFunctor<Bool, ReduceOp::kSum> {
  using type = Or;
};
template <class T, ReduceOp op>
using FunctorOf = typename ChooseFunctor<T, op>::type;

// value * scale, rounded before anything is added to it: a fused multiply-add would give other bits
// than the processors and compilers that do not fuse. Here that is said to nvcc; elementwise_isa.h
// says it to the host's compiler.
template <class V, class S>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE V scaled(V value, S scale) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<V, float>)
    return __fmul_rn(value, scale);
  else
    return __dmul_rn(value, scale);
#else
  return value * scale;
#endif
}

// ---- 8-bit floats

template <class To, class From>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// The patterns of a format that widen_float8 and narrow_float8 need; the sign is bit 7 of both.
template <class T>
struct Float8Format;
template <>
struct Float8Format<Float8E4M3> {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr int32_t kLargest = 0x7e;         // finite; above it are infinity and NaN, or NaN
  static constexpr int32_t kOverflow = 0x43e00000;  // float bits of 448, the largest value
};
template <>
struct Float8Format<Float8E5M2> {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr int32_t kLargest = 0x7b;
  static constexpr int32_t kOverflow = 0x47800000;  // float bits of 65536, where infinity would be
};

// An 8-bit pattern (0 to 255 in an `I`) as a float, exactly. Without selections and without float
// subnormals, which a thread may have told its processor to take for zero.
template <class T, class F, class I>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE F widen_float8(I pattern) {
  using Format = Float8Format<T>;
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr int32_t kRebias = (127 - Format::kBias) << 23;
  constexpr int32_t kLeastNormal = kRebias + (1 << 23);
  const I magnitude = pattern & 0x7f;
  const I is_subnormal = (magnitude - (1 << Format::kMantissaBits)) >> 31;  // all ones if so
  const I is_special = (Format::kLargest - magnitude) >> 31;
  // A subnormal is read as least normal * 1.mantissa, and the 1 that it does not have taken off.
  const I bits =
      ((magnitude << kShift) + kRebias + (is_subnormal & (1 << 23))) | (is_special & 0x7f800000);
  const F value = bits_as<F>(bits) - bits_as<F>(I(is_subnormal & kLeastNormal));
  const I negative = -(pattern >> 7);  // all ones if so
  return bits_as<F>(I(bits_as<I>(value) | (negative & ~0x7fffffff)));
}

// The nearest 8-bit pattern, ties to even, as torch (2.14) converts: a float8_e4m3fn beyond 448 and
// infinity become 448, a float8_e5m2 beyond 61440 infinity; NaN is 0x7f; all keep their sign.
template <class T, class I, class F>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE I narrow_float8(F value) {
  using Format = Float8Format<T>;
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr int32_t kRebias = (127 - Format::kBias) << 23;
  const I overflow = I{} + Format::kOverflow, least_normal = I{} + (kRebias + (1 << 23));
  const I bits = bits_as<I>(value);
  const I magnitude = bits & 0x7fffffff;
  // As if there were no subnormals: half a unit less one is added, and one more if that is odd.
  const I bounded = magnitude < overflow ? magnitude : overflow;
  const I normal =
      (bounded - kRebias + ((1 << (kShift - 1)) - 1) + ((bounded >> kShift) & 1)) >> kShift;
  // As if the least normal were the largest: the sum with a power of two whose last bit is worth
  // the least subnormal is rounded to it.
  constexpr int32_t kAligner = kRebias + ((1 + kShift) << 23);
  const I small = magnitude < least_normal ? magnitude : least_normal;
  const I subnormal = bits_as<I>(F(bits_as<F>(small) + bits_as<F>(I(I{} + kAligner)))) - kAligner;
  // Each is at most the other where the other is right.
  const I rounded = normal > subnormal ? normal : subnormal;
  const I is_nan = (0x7f800000 - magnitude) >> 31;
  return rounded | (is_nan & 0x7f) | ((bits >> 24) & 0x80);
}
