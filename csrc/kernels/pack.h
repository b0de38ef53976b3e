// A pack: one vector register of accumulators, loaded from and stored to elements of any type.
//
// This header is compiled once per instruction set (see elementwise_isa.h), inside `namespace
// PYCOMM_ISA` and under that set's target options, so it has no include guard and includes nothing.
// Vectors are GCC's, exactly as wide as a register: wider ones are legal, but GCC 12 takes their
// comparisons, selections and conversions apart lane by lane. So only conversions that GCC does
// badly and streaming stores differ by set.

inline constexpr int kVectorBytes = 16 << PYCOMM_ISA_LEVEL;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T, int kLanes>
struct NarrowVectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};

using Floats = Vector<float>;
using Ints32 = Vector<int32_t>;
using Bits32 = Vector<uint32_t>;
inline constexpr int kFloats = kVectorBytes / sizeof(float);
using Bits16 = NarrowVectorOf<uint16_t, kFloats>::type;
using Bits8 = NarrowVectorOf<uint8_t, kFloats>::type;

template <class V>
PYCOMM_ALWAYS_INLINE V load_unaligned(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

// ---- 16-bit floats

#if PYCOMM_ISA_LEVEL == 2
PYCOMM_ALWAYS_INLINE Floats floats_of_halves(Bits16 halves) {
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
}
PYCOMM_ALWAYS_INLINE Bits16 narrow_half(Floats value) {
  return (Bits16)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif PYCOMM_ISA_LEVEL == 1
PYCOMM_ALWAYS_INLINE Floats floats_of_halves(Bits16 halves) {
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
}
PYCOMM_ALWAYS_INLINE Bits16 narrow_half(Floats value) {
  return (Bits16)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
PYCOMM_ALWAYS_INLINE Floats floats_of_halves(Bits16 halves) {
  Floats value;
  for (int lane = 0; lane < kFloats; ++lane) value[lane] = half_to_float(halves[lane]);
  return value;
}
PYCOMM_ALWAYS_INLINE Bits16 narrow_half(Floats value) {
  Bits16 bits;
  for (int lane = 0; lane < kFloats; ++lane) bits[lane] = float_to_half(value[lane]);
  return bits;
}
#endif
PYCOMM_ALWAYS_INLINE Floats widen_half(const Half* from) {
  return floats_of_halves(load_unaligned<Bits16>(from));
}

PYCOMM_ALWAYS_INLINE Floats widen_bfloat16(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load_unaligned<Bits16>(from), Bits32) << 16);
}
// Rounds to nearest, ties to even, by the carry out of the dropped half; a NaN stays one (quiet,
// payload kept). AVX-512's own conversion flushes subnormals, so it would not give the same bits.
PYCOMM_ALWAYS_INLINE Bits16 narrow_bfloat16(Floats value) {
  const Bits32 bits = (Bits32)value;
  const Bits32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits32 quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector((Bits32)(value == value ? rounded : quiet), Bits16);
}

// ---- 8-bit floats: narrowed by functors.h; widened by it too, or faster as halves in hardware

#if PYCOMM_ISA_LEVEL > 0
using Words = NarrowVectorOf<int16_t, kFloats>::type;
#if PYCOMM_ISA_LEVEL == 2
PYCOMM_ALWAYS_INLINE Words load_signed_bytes(const void* from) {
  return (Words)_mm256_cvtepi8_epi16(load_unaligned<__m128i>(from));
}
PYCOMM_ALWAYS_INLINE Bits8 narrow_bytes(Ints32 value) {
  return (Bits8)_mm512_cvtepi32_epi8((__m512i)value);
}
#else
PYCOMM_ALWAYS_INLINE Words load_signed_bytes(const void* from) {
  return (Words)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
PYCOMM_ALWAYS_INLINE Bits8 narrow_bytes(Ints32 value) {  // of values that are bytes already
  const __m128i low = _mm256_castsi256_si128((__m256i)value);
  const __m128i high = _mm256_extracti128_si256((__m256i)value, 1);
  const __m128i words = _mm_packus_epi32(low, high);
  return bits_as<Bits8>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
}
#endif
PYCOMM_ALWAYS_INLINE Floats widen_float8(const Float8E5M2* from) {
  return floats_of_halves((Bits16)(load_signed_bytes(from) << 8));  // a half's upper byte
}
PYCOMM_ALWAYS_INLINE Floats widen_float8(const Float8E4M3* from) {
  // Sign and magnitude in the places of a half's, whose exponents are worth 2^8 less. A NaN alone
  // is carried out of, into the exponent's highest bit, which together with its own ones is a NaN.
  Words half = (load_signed_bytes(from) << 7) & int16_t(0xbf80);
  half |= (half + int16_t(0x80)) & int16_t(0x4000);
  return floats_of_halves((Bits16)half) * 256.0f;
}
#else
PYCOMM_ALWAYS_INLINE Bits8 narrow_bytes(Ints32 value) {
  return __builtin_convertvector(value, Bits8);
}
template <class T>
PYCOMM_ALWAYS_INLINE Floats widen_float8(const T* from) {
  return widen_float8<T, Floats>(__builtin_convertvector(load_unaligned<Bits8>(from), Ints32));
}
#endif

// ---- streaming stores: past the caches, for data that another core will read next; less than 16
// bytes (8-bit floats without AVX-512, 16-bit ones without AVX2) take the ordinary way

template <class V>
PYCOMM_ALWAYS_INLINE void stream_store(void* to, const V& value) {
#if PYCOMM_ISA_LEVEL == 2
  if constexpr (sizeof(V) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
    return;
  }
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) % 16 == 0) {
    for (size_t part = 0; part < sizeof(V) / 16; ++part) {
      __m128i piece;
      __builtin_memcpy(&piece, reinterpret_cast<const char*>(&value) + 16 * part, 16);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + part, piece);
    }
    return;
  }
#endif
  __builtin_memcpy(to, &value, sizeof(V));
}

// Orders streamed data before the flag that announces it.
PYCOMM_ALWAYS_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- elements <-> accumulators

template <class T, class Acc>
struct Pack {
  static constexpr int kLanes = kVectorBytes / sizeof(Acc);
  using Elements = typename NarrowVectorOf<T, kLanes>::type;
  PYCOMM_ALWAYS_INLINE static Vector<Acc> load(const T* from) {
    if constexpr (std::is_same_v<T, Acc>)
      return load_unaligned<Vector<Acc>>(from);
    else
      return __builtin_convertvector(load_unaligned<Elements>(from), Vector<Acc>);
  }
  PYCOMM_ALWAYS_INLINE static Elements narrow(Vector<Acc> value) {
    if constexpr (std::is_same_v<T, Acc>)
      return (Elements)value;
    else
      return __builtin_convertvector(value, Elements);
  }
};
template <>
struct Pack<Half, float> {
  static constexpr int kLanes = kFloats;
  PYCOMM_ALWAYS_INLINE static Floats load(const Half* from) { return widen_half(from); }
  PYCOMM_ALWAYS_INLINE static Bits16 narrow(Floats value) { return narrow_half(value); }
};
template <>
struct Pack<BFloat16, float> {
  static constexpr int kLanes = kFloats;
  PYCOMM_ALWAYS_INLINE static Floats load(const BFloat16* from) { return widen_bfloat16(from); }
  PYCOMM_ALWAYS_INLINE static Bits16 narrow(Floats value) { return narrow_bfloat16(value); }
};
template <class T>
struct Float8Pack {
  static constexpr int kLanes = kFloats;
  PYCOMM_ALWAYS_INLINE static Floats load(const T* from) { return widen_float8(from); }
  PYCOMM_ALWAYS_INLINE static Bits8 narrow(Floats value) {
    return narrow_bytes(narrow_float8<T, Ints32>(value));
  }
};
template <>
struct Pack<Float8E4M3, float> : Float8Pack<Float8E4M3> {};
template <>
struct Pack<Float8E5M2, float> : Float8Pack<Float8E5M2> {};
template <>
struct Pack<Bool, uint8_t> {
  static constexpr int kLanes = kVectorBytes;
  using Bytes = Vector<uint8_t>;
  PYCOMM_ALWAYS_INLINE static Bytes load(const Bool* from) {
    return (Bytes)(load_unaligned<Bytes>(from) != 0) & 1;
  }
  PYCOMM_ALWAYS_INLINE static Bytes narrow(Bytes value) { return value; }
};
