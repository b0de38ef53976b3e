// The arithmetic of the wire formats, once: host vectors, host scalars and CUDA lanes.
//
// As functors.h: no include guard, included inside a namespace after functors.h, once per
// instruction set. `F` is a float or a vector of them, `I` an int32_t or a vector of as many.

template <WireFormat format>
struct FormatOf;
// kMantissaBits and kLeastExponent (of normal numbers) give the distance between neighbours;
// kScaledExponent is where a scale brings the block's largest magnitude.
template <>
struct FormatOf<WireFormat::kFloat32> {
  using Value = float;
  static constexpr int kMantissaBits = 23, kLeastExponent = -126, kScaledExponent = 0;
  static constexpr float kLargest = 0x1.fffffep127f;
};
template <>
struct FormatOf<WireFormat::kFloat16> {
  using Value = Half;
  static constexpr int kMantissaBits = 10, kLeastExponent = -14, kScaledExponent = 14;
  static constexpr float kLargest = 65504.0f;
};
template <>
struct FormatOf<WireFormat::kBFloat16> {
  using Value = BFloat16;
  static constexpr int kMantissaBits = 7, kLeastExponent = -126, kScaledExponent = 100;
  static constexpr float kLargest = 0x1.fep127f;
};
template <>
struct FormatOf<WireFormat::kFloat8E4M3> {
  using Value = Float8E4M3;
  static constexpr int kMantissaBits = 3, kLeastExponent = -6, kScaledExponent = 7;
  static constexpr float kLargest = 448.0f;
};
template <>
struct FormatOf<WireFormat::kFloat8E5M2> {
  using Value = Float8E5M2;
  static constexpr int kMantissaBits = 2, kLeastExponent = -14, kScaledExponent = 14;
  static constexpr float kLargest = 57344.0f;
};
template <>
struct FormatOf<WireFormat::kInt8> {
  using Value = int8_t;
  static constexpr float kLargest = 127.0f;
};

inline constexpr int32_t kInfinityBits = 0x7f800000;

// What a block is multiplied by before it is narrowed, and after it was widened.
struct Scale {
  float down, up;
};
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE float power_of_two(int exponent) {
  return bits_as<float>((exponent + 127) << 23);
}
// `largest`: the bits of the block's largest magnitude, which is finite.
template <class Format>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE Scale choose_scale(int32_t largest) {
  if constexpr (std::is_same_v<typename Format::Value, int8_t>) {
    const float magnitude = bits_as<float>(largest);
    if (magnitude < 0x1p-100f) return {0, 0};  // its inverse would overflow
    // Of the last binade a little less, lest 127 times it be infinite.
    const float whole = largest >= 254 << 23 ? magnitude * 0x1.fffffcp-1f : magnitude;
    return {127.0f / magnitude, whole / 127.0f};
  } else {
    const int exponent = (largest >> 23) - 127;  // -127 for zero and subnormals
    int down = Format::kScaledExponent - exponent;
    down = down > 126 ? 126 : down;  // both must be normal
    return {power_of_two(down), power_of_two(-down)};
  }
}

// The largest magnitude that a scaled value may have. In the last binade of floats rounding up
// would make infinity of what is decoded; an int8 is rounded to 127 all the same.
template <class Format>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE float scaled_limit(int32_t largest) {
  if constexpr (std::is_same_v<typename Format::Value, int8_t>)
    return 127.25f;
  else if (largest >= 254 << 23)
    return (2.0f - power_of_two(-Format::kMantissaBits)) * power_of_two(Format::kScaledExponent);
  else
    return Format::kLargest;
}

// Uniformly distributed 24 bits from the two halves of a number and a seed: two rounds of
// multiplication and shift, as in the finaliser of MurmurHash3 (Appleby, public domain).
template <class U>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE U random_24_bits(U low, U high, uint64_t seed) {
  U mixed = (low ^ static_cast<uint32_t>(seed)) * 0x9e3779b9u;
  mixed = (mixed ^ (mixed >> 16)) + (high + static_cast<uint32_t>(seed >> 32));
  mixed = mixed * 0x85ebca6bu;
  mixed = (mixed ^ (mixed >> 13)) * 0xc2b2ae35u;
  return (mixed ^ (mixed >> 16)) >> 8;
}

// All ones where a < b, of integers that are not negative, as the bits of magnitudes are.
template <class I>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE I is_less(I a, I b) {
  return (a - b) >> 31;
}
template <class F, class I>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE F select(I lanes, F yes, F no) {
  return bits_as<F>(I((lanes & bits_as<I>(yes)) | (~lanes & bits_as<I>(no))));
}
template <class To, class From>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE To convert(From from) {
#if !defined(__CUDACC__)
  if constexpr (!std::is_arithmetic_v<From>)
    return __builtin_convertvector(from, To);
  else
#endif
    return static_cast<To>(from);
}

// The value or, where it is over, the limit with its sign.
template <class F, class I>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE F saturated(F value, I is_over, float limit) {
  const I sign = bits_as<I>(value) & ~0x7fffffff;
  return select(is_over, bits_as<F>(I(sign | bits_as<int32_t>(limit))), value);
}

// The nearest whole number, ties to even, of magnitudes below 2^22: the sum with 1.5 * 2^23 has no
// room for a fraction.
template <class F>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE F round_to_whole(F value) {
  return (value + 0x1.8p23f) - 0x1.8p23f;
}

// The value or one of its two neighbours in the format, the nearer the likelier; of magnitudes up
// to the format's largest. `random`: 24 bits.
template <class Format, class F, class I>
PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE F round_by_chance(F value, I random) {
  const I sign = bits_as<I>(value) & ~0x7fffffff, magnitude = bits_as<I>(value) & 0x7fffffff;
  if constexpr (std::is_same_v<typename Format::Value, float>) {
    return value;
  } else if constexpr (std::is_same_v<typename Format::Value, BFloat16>) {
    return bits_as<F>(I(sign | ((magnitude + (random & 0xffff)) & ~0xffff)));
  } else {
    const F chance = scaled(convert<F>(random), 0x1p-24f);
    I binade = I{} + (127 << 23);
    int mantissa_bits = 0;
    if constexpr (!std::is_same_v<typename Format::Value, int8_t>) {
      // The power of two at or below the magnitude, but at least the least normal one.
      const I least = I{} + ((Format::kLeastExponent + 127) << 23);
      binade = magnitude & kInfinityBits;
      binade = binade + ((least - binade) & is_less(binade, least));
      mantissa_bits = Format::kMantissaBits;
    }
    // In units of the distance between neighbours.
    const F per_unit = bits_as<F>(I((254 << 23) - binade)) * power_of_two(mantissa_bits);
    const F units = convert<F>(convert<I>(F(scaled(bits_as<F>(magnitude), per_unit) + chance)));
    const F rounded = units * power_of_two(-mantissa_bits) * bits_as<F>(binade);
    return bits_as<F>(I(bits_as<I>(rounded) | sign));
  }
}
