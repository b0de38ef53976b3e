// The CPU driver of codec.h for one instruction set; a part of isa_all.h.
//
// It works block by block in a buffer that stays in the first cache: contributions are summed
// there, the largest magnitude gives the scale, and the sum goes out as wire, residual and output.
// So memory is read and written once, however many steps there are.

template <WireFormat format>
using WireValue = typename FormatOf<format>::Value;

#if PYCOMM_ISA_LEVEL > 0
PYCOMM_ALWAYS_INLINE Floats widen_value(const int8_t* from) {
#if PYCOMM_ISA_LEVEL == 2
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_unaligned<__m128i>(from)));
#else
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#endif
}
#else
PYCOMM_ALWAYS_INLINE Floats widen_value(const int8_t* from) {
  const auto bytes = load_unaligned<typename NarrowVectorOf<int8_t, kFloats>::type>(from);
  return __builtin_convertvector(bytes, Floats);
}
#endif
template <class T>
PYCOMM_ALWAYS_INLINE Floats widen_value(const T* from) {
  return Pack<T, float>::load(from);
}
template <class T>
PYCOMM_ALWAYS_INLINE auto narrow_value(Floats value) {
  if constexpr (std::is_same_v<T, int8_t>)
    return narrow_bytes(convert<Ints32>(round_to_whole(value)) & 0xff);
  else
    return Pack<T, float>::narrow(value);
}

// The lanes of a vector, or the first of them.
template <class V>
PYCOMM_ALWAYS_INLINE void store_lanes(void* to, const V& value, int64_t lanes) {
  if (__builtin_expect(lanes >= kFloats, 1))
    __builtin_memcpy(to, &value, sizeof(V));
  else
    __builtin_memcpy(to, &value, static_cast<size_t>(lanes) * (sizeof(V) / kFloats));
}
template <class T>
PYCOMM_ALWAYS_INLINE Floats widen_lanes(const T* from, int64_t lanes) {
  if (__builtin_expect(lanes >= kFloats, 1)) return widen_value(from);
  T padded[kFloats] = {};
  __builtin_memcpy(padded, from, static_cast<size_t>(lanes) * sizeof(T));
  return widen_value(padded);
}

template <class V>
PYCOMM_ALWAYS_INLINE auto sum_of_lanes(const V& value) {
  decltype(value[0] + 0.0) sum = 0;
  for (int lane = 0; lane < kFloats; ++lane) sum += value[lane];
  return sum;
}

// Walks through tensors that lie one behind the other in a common numbering.
template <class SpanType>
struct Cursor {
  const SpanType* span;
  int64_t at;  // in it

  Cursor(const SpanType* spans, int64_t first) : span(spans), at(first) {
    while (span && at >= span->count) at -= span++->count;
  }
  // visit(pointer into a tensor, begin, count) for each part of the next `count` elements.
  template <class T, class Visit>
  PYCOMM_ALWAYS_INLINE void advance(int64_t count, Visit&& visit) {
    for (int64_t done = 0; done < count;) {
      while (at == span->count) ++span, at = 0;
      const int64_t part = count - done < span->count - at ? count - done : span->count - at;
      visit(static_cast<T*>(span->data) + at, done, part);
      at += part;
      done += part;
    }
  }
};

// T: of the tensors.
template <WireFormat kFormat, class T>
class Transcoder {
 public:
  explicit Transcoder(const TranscodeCall& call)
      : call_(call), inputs_(call.inputs, call.first), outputs_(call.outputs, call.first) {}

  void run() {
    const int64_t length = call_.codec.block > 0 ? call_.codec.block : kUnscaledLength;
    for (int64_t begin = 0; begin < call_.count; begin += length) {
      begin_ = begin;
      count_ = call_.count - begin < length ? call_.count - begin : length;
      int32_t largest = sum();
      if (call_.divisor != 1) largest = divide(largest);
      if (call_.values) encode(largest);
      if (call_.outputs) write_outputs();
    }
  }

 private:
  using Format = FormatOf<kFormat>;
  using Value = WireValue<kFormat>;
  static constexpr int64_t kUnscaledLength = 1024;

  // Calls step(at, lanes) for each vector of the block.
  template <class Step>
  PYCOMM_ALWAYS_INLINE void for_each_vector(Step&& step) const {
    for (int64_t at = 0; at < count_; at += kFloats) step(at, count_ - at);
  }
  PYCOMM_ALWAYS_INLINE Floats buffered(int64_t at) const {
    return load_unaligned<Floats>(buffer_ + at);
  }
  PYCOMM_ALWAYS_INLINE void buffer(int64_t at, Floats value) {
    __builtin_memcpy(buffer_ + at, &value, sizeof value);
  }
  PYCOMM_ALWAYS_INLINE float scale_up(const Wire& wire) const {
    return call_.codec.block > 0 ? wire.scales[begin_ / call_.codec.block] : 1.0f;
  }

  // ---- contributions

  // The sum is in the buffer afterwards; returns the bits of its largest magnitude.
  int32_t sum() {
    Ints32 largest = {};
    bool any = false;
    for (int wire = 0; wire <= call_.num_wires; ++wire) {
      if (wire == call_.own)
        largest = std::exchange(any, true) ? add_own<true>() : add_own<false>();
      if (wire == call_.num_wires) break;
      const Wire& other = call_.wires[wire];
      largest = std::exchange(any, true) ? add<true>(other) : add<false>(other);
    }
    int32_t result = 0;
    for (int lane = 0; lane < kFloats; ++lane)
      result = largest[lane] > result ? largest[lane] : result;
    return result;
  }

  // Both return the largest magnitudes so far, lane by lane. kToOthers: something is there already.
  template <bool kToOthers>
  PYCOMM_ALWAYS_INLINE void put(int64_t at, Floats value, int64_t lanes, Ints32& largest) {
    if constexpr (kToOthers) value = widen_lanes(buffer_ + at, lanes) + value;
    const Ints32 magnitude = bits_as<Ints32>(value) & 0x7fffffff;
    largest = largest > magnitude ? largest : magnitude;
    store_lanes(buffer_ + at, value, lanes);
  }

  template <bool kToOthers>
  Ints32 add(const Wire& wire) {
    const Value* values = static_cast<const Value*>(wire.values) + begin_;
    const float up = scale_up(wire);
    Ints32 largest = {};
    for_each_vector([&](int64_t at, int64_t lanes) {
      Floats value = scaled(widen_lanes(values + at, lanes), up);
      if (lanes < kFloats) value = first_lanes(value, lanes);  // a scale may be NaN
      put<kToOthers>(at, value, lanes, largest);
    });
    return largest;
  }

  template <bool kToOthers>
  Ints32 add_own() {
    const float* residual = call_.residual ? call_.residual + begin_ : nullptr;
    Ints32 largest = {};
    inputs_.template advance<const T>(count_, [&](const T* from, int64_t begin, int64_t count) {
      for (int64_t at = 0; at < count; at += kFloats) {
        const int64_t lanes = count - at;
        __builtin_prefetch(from + at + kPrefetchBytes / static_cast<int64_t>(sizeof(T)));
        Floats value = scaled(widen_lanes(from + at, lanes), call_.factor);
        if (lanes < kFloats) value = first_lanes(value, lanes);  // the factor may be infinite
        if (residual) {
          __builtin_prefetch(residual + begin + at +
                             kPrefetchBytes / static_cast<int64_t>(sizeof(float)));
          value = value + widen_lanes(residual + begin + at, lanes);
        }
        put<kToOthers>(begin + at, value, lanes, largest);
      }
    });
    return largest;
  }

  // Division keeps the order of magnitudes, whatever the divisor's sign.
  int32_t divide(int32_t largest) {
    for_each_vector([&](int64_t at, int64_t) { buffer(at, buffered(at) / call_.divisor); });
    return bits_as<int32_t>(bits_as<float>(largest) / call_.divisor) & 0x7fffffff;
  }

  // ---- the sum's ways out

  void encode(int32_t largest) {
    Scale scale{1, 1};
    float limit = Format::kLargest;
    if (call_.codec.block > 0) {
      if (largest >= kInfinityBits) return mark_block();
      scale = choose_scale<Format>(largest);
      limit = scaled_limit<Format>(largest);
      call_.scales[begin_ / call_.codec.block] = scale.up;
    }
    const bool fits =
        bits_as<int32_t>(scaled(bits_as<float>(largest), scale.down)) <= bits_as<int32_t>(limit);
    if (!fits)
      encode_values<false, true>(scale, limit);
    else if (call_.stochastic)
      encode_values<true, true>(scale, limit);
    else
      encode_values<true, false>(scale, limit);
  }

  // Decodes to NaN; the residual stays as it was.
  void mark_block() {
    call_.scales[begin_ / call_.codec.block] = bits_as<float>(0x7fc00000);
    __builtin_memset(static_cast<Value*>(call_.values) + begin_, 0,
                     static_cast<size_t>(count_) * sizeof(Value));
    int64_t non_finite = 0;
    for_each_vector([&](int64_t at, int64_t lanes) {
      for (int64_t lane = 0; lane < lanes && lane < kFloats; ++lane)
        non_finite += (bits_as<int32_t>(buffer_[at + lane]) & 0x7fffffff) >= kInfinityBits;
      buffer(at, Floats{} + bits_as<float>(0x7fc00000));
    });
    if (!call_.counts) return;
    call_.counts->values += count_;
    call_.counts->non_finite += non_finite;
  }

  // kFits: all values are in the format's range. Otherwise those that are not are saturated or,
  // without scales, stay infinite or NaN, and their residual as it was.
  template <bool kFits, bool kByChance>
  void encode_values(Scale scale, float limit) {
    Value* values = static_cast<Value*>(call_.values) + begin_;
    float* residual = call_.residual ? call_.residual + begin_ : nullptr;
    const Ints32 limit_bits = Ints32{} + bits_as<int32_t>(limit);
    const bool streams = call_.stream && count_ % kFloats == 0;
    Ints32 overflows = {}, underflows = {}, non_finite = {};
    Floats squares = {}, error_squares = {};
    for_each_vector([&](int64_t at, int64_t lanes) {
      Floats value = buffered(at);
      if (lanes < kFloats) value = first_lanes(value, lanes);
      Floats down = scaled(value, scale.down);
      Ints32 is_marked = {};
      if constexpr (!kFits) {
        const Ints32 magnitude = bits_as<Ints32>(down) & 0x7fffffff;
        const Ints32 is_over = is_less(limit_bits, magnitude);
        const Ints32 is_infinite = is_less(Ints32(Ints32{} + (kInfinityBits - 1)), magnitude);
        is_marked = call_.infinite ? is_over : is_infinite;
        non_finite -= is_infinite;
        if (call_.codec.block == 0) overflows -= is_over & ~is_infinite;
        down = saturated(down, is_over, limit);
      }
      if constexpr (kByChance)
        if (kFits || call_.stochastic)
          down = round_by_chance<Format>(down, random_bits(begin_ + at));
      if constexpr (!kFits) down = select(is_marked, mark(value), down);
      const auto narrow = narrow_value<Value>(down);
      if (streams)
        stream_store(values + at, narrow);
      else
        store_lanes(values + at, narrow, lanes);

      const Floats decoded = scaled(widen_value(reinterpret_cast<const Value*>(&narrow)), scale.up);
      Floats error = value - decoded;
      if constexpr (!kFits) {
        const Floats kept = residual ? widen_lanes(residual + at, lanes) : Floats{};
        if (residual) store_lanes(residual + at, select(is_marked, kept, error), lanes);
        error = select(is_marked, Floats{}, error);
        value = select(is_marked, Floats{}, value);
      } else if (residual) {
        store_lanes(residual + at, error, lanes);
      }
      underflows -= (decoded == 0) & (value != 0);
      squares += value * value;
      error_squares += error * error;
      buffer(at, decoded);
    });
    if (!call_.counts) return;
    call_.counts->values += count_;
    call_.counts->overflows += static_cast<int64_t>(sum_of_lanes(overflows));
    call_.counts->underflows += static_cast<int64_t>(sum_of_lanes(underflows));
    call_.counts->non_finite += static_cast<int64_t>(sum_of_lanes(non_finite));
    call_.counts->squares += sum_of_lanes(squares);
    call_.counts->error_squares += sum_of_lanes(error_squares);
  }

  // What stands for a value that cannot be sent: itself, infinity of its sign, or NaN in the format
  // that has no infinity.
  PYCOMM_ALWAYS_INLINE Floats mark(Floats value) const {
    if constexpr (kFormat == WireFormat::kFloat8E4M3) return Floats{} + bits_as<float>(0x7fc00000);
    const Ints32 bits = bits_as<Ints32>(value);
    const Floats infinity = bits_as<Floats>(Ints32((bits & ~0x7fffffff) | kInfinityBits));
    return select(Ints32((Ints32)(value == value)), infinity, value);
  }
  PYCOMM_ALWAYS_INLINE Floats first_lanes(Floats value, int64_t lanes) const {
    for (int64_t lane = lanes; lane < kFloats; ++lane) value[lane] = 0;
    return value;
  }
  PYCOMM_ALWAYS_INLINE Ints32 random_bits(int64_t at) const {
    const uint64_t number = static_cast<uint64_t>(call_.first + at);
    const Bits32 first = Bits32{} + static_cast<uint32_t>(number);
    Bits32 numbers = first;
    for (int lane = 0; lane < kFloats; ++lane) numbers[lane] += static_cast<uint32_t>(lane);
    const Bits32 carries =
        (Bits32)(numbers < first);  // all ones in lanes behind a multiple of 2^32
    const Bits32 high = Bits32{} + static_cast<uint32_t>(number >> 32) - carries;
    return (Ints32)random_24_bits(numbers, high, call_.seed);
  }

  void write_outputs() {
    outputs_.template advance<T>(count_, [&](T* to, int64_t begin, int64_t count) {
      for (int64_t at = 0; at < count; at += kFloats)
        store_lanes(to + at, Pack<T, float>::narrow(load_unaligned<Floats>(buffer_ + begin + at)),
                    count - at);
    });
  }

  const TranscodeCall& call_;
  Cursor<ConstSpan> inputs_;
  Cursor<Span> outputs_;
  int64_t begin_ = 0, count_ = 0;  // of the block
  alignas(kVectorBytes) float buffer_[kMaxBlock + kFloats] = {};
};

template <WireFormat kFormat>
void transcode_to(const TranscodeCall& call) {
  switch (call.dtype) {
    case DType::kFloat16:
      return Transcoder<kFormat, Half>(call).run();
    case DType::kBFloat16:
      return Transcoder<kFormat, BFloat16>(call).run();
    default:
      return Transcoder<kFormat, float>(call).run();
  }
}

void transcode(const TranscodeCall& call) {
  switch (call.codec.format) {
#define PYCOMM_CASE(enumerator, ...)            \
  case WireFormat::enumerator:                  \
    transcode_to<WireFormat::enumerator>(call); \
    break;
    PYCOMM_WIRE_FORMATS(PYCOMM_CASE)
#undef PYCOMM_CASE
  }
  if (call.stream) stream_fence();
}
