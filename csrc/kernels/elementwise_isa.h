// The CPU drivers of elementwise.h for one instruction set; a part of isa_all.h.

// How far ahead sources are fetched: the hardware's own prefetching starts anew with every page.
// Worth 6 % of an all-reduce of 64 MiB, and nothing in the caches.
inline constexpr int64_t kPrefetchBytes = 4096;

template <class T, ReduceOp kOp>
struct Reducer {
  using Acc = typename Accumulator<T, kOp>::type;
  using Functor = FunctorOf<T, kOp>;
  using P = Pack<T, Acc>;
  static constexpr int kLanes = P::kLanes;

  const ReduceCall& call;

  // What source s contributes.
  PYCOMM_ALWAYS_INLINE Vector<Acc> contribution(int s, int64_t at) const {
    const Vector<Acc> value = P::load(static_cast<const T*>(call.sources[s]) + at);
    if constexpr (kOp == ReduceOp::kPremulSum)
      return scaled(value, static_cast<Acc>(call.scales[s]));
    else
      return value;
  }

  PYCOMM_ALWAYS_INLINE Vector<Acc> first(int64_t at) const {
    if constexpr (!std::is_same_v<T, Acc> || kOp == ReduceOp::kPremulSum) {
      if (call.first_is_partial)
        return load_unaligned<Vector<Acc>>(static_cast<const Acc*>(call.sources[0]) + at);
    }
    return contribution(0, at);
  }

  // kSources 0 means: as many as the call says.
  template <int kSources>
  PYCOMM_ALWAYS_INLINE Vector<Acc> accumulate(int64_t at) const {
    Vector<Acc> value = first(at);
    const int sources = kSources ? kSources : call.num_sources;
    for (int s = 1; s < sources; ++s) value = Functor::apply(value, contribution(s, at));
    return value;
  }

  PYCOMM_ALWAYS_INLINE void finish_and_store(Vector<Acc> value, int64_t at) const {
    if (call.leave_partial) {
      store(static_cast<Acc*>(call.slot) + at, value);
      return;
    }
    if constexpr (kOp == ReduceOp::kAvg) value = value / static_cast<Acc>(call.divisor);
    const auto elements = P::narrow(value);
    if (call.slot) store(static_cast<T*>(call.slot) + at, elements);
    if (call.output)
      __builtin_memcpy(static_cast<T*>(call.output) + at, &elements, sizeof elements);
  }

  template <class V>
  PYCOMM_ALWAYS_INLINE void store(void* to, const V& value) const {
    if (call.stream_to_slot)
      stream_store(to, value);
    else
      __builtin_memcpy(to, &value, sizeof value);
  }

  template <int kSources>
  void body(int64_t end) const {
    for (int64_t at = 0; at < end; at += kLanes) {
      for (int s = 0; s < kSources; ++s)
        __builtin_prefetch(static_cast<const T*>(call.sources[s]) + at +
                           kPrefetchBytes / static_cast<int64_t>(sizeof(T)));
      finish_and_store(accumulate<kSources>(at), at);
    }
  }

  // The last, incomplete pack goes through zero-padded copies of its sources.
  void tail(int64_t at) const {
    const size_t count = static_cast<size_t>(call.count - at);
    alignas(kVectorBytes) char padded[kMaxRanks][kVectorBytes];
    alignas(kVectorBytes) char slot[kVectorBytes], output[kVectorBytes];
    const void* sources[kMaxRanks];
    for (int s = 0; s < call.num_sources; ++s) {
      const size_t bytes = s == 0 && call.first_is_partial ? sizeof(Acc) : sizeof(T);
      __builtin_memset(padded[s], 0, kVectorBytes);
      __builtin_memcpy(padded[s], static_cast<const char*>(call.sources[s]) + at * bytes,
                       count * bytes);
      sources[s] = padded[s];
    }
    ReduceCall rest = call;
    rest.sources = sources;
    rest.stream_to_slot = false;
    rest.slot = call.slot ? slot : nullptr;
    rest.output = call.output ? output : nullptr;
    Reducer<T, kOp>{rest}.template body<0>(1);
    const size_t slot_bytes = call.leave_partial ? sizeof(Acc) : sizeof(T);
    if (call.slot)
      __builtin_memcpy(static_cast<char*>(call.slot) + at * slot_bytes, slot, count * slot_bytes);
    if (call.output) __builtin_memcpy(static_cast<T*>(call.output) + at, output, count * sizeof(T));
  }

  void run() const {
    const int64_t whole = call.count / kLanes * kLanes;
    if (call.num_sources == 2)
      body<2>(whole);
    else
      body<0>(whole);
    if (whole < call.count) tail(whole);
  }
};

void reduce(const ReduceCall& call) {
  visit_reduction(call.dtype, call.op, [&](auto type, auto reduction) {
    Reducer<typename decltype(type)::type, decltype(reduction)::op>{call}.run();
  });
  if (call.stream_to_slot) stream_fence();
}

// Copies whole blocks of 128 bytes; returns how many bytes that were.
template <bool kStream>
PYCOMM_ALWAYS_INLINE int64_t copy_blocks(char* to, const char* from, int64_t bytes) {
  using Block = Vector<uint64_t>;
  constexpr int kBlocks = 128 / sizeof(Block), kBytes = sizeof(Block);
  int64_t at = 0;
  for (; at + 128 <= bytes; at += 128) {
    for (int line = 0; line < 2; ++line)
      __builtin_prefetch(from + at + line * kLineBytes + kPrefetchBytes);
    Block blocks[kBlocks];
    for (int b = 0; b < kBlocks; ++b) blocks[b] = load_unaligned<Block>(from + at + b * kBytes);
    for (int b = 0; b < kBlocks; ++b) {
      if constexpr (kStream)
        stream_store(to + at + b * kBytes, blocks[b]);
      else
        __builtin_memcpy(to + at + b * kBytes, &blocks[b], kBytes);
    }
  }
  return at;
}

void copy(void* destination, const void* source, int64_t bytes, bool stream) {
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  int64_t at = 0;
  if (stream) {
    at = -reinterpret_cast<intptr_t>(to) & (kLineBytes - 1);  // streaming stores must be aligned
    if (at > bytes) at = bytes;
    __builtin_memcpy(to, from, static_cast<size_t>(at));
    at += copy_blocks<true>(to + at, from + at, bytes - at);
    stream_fence();
  } else {
    at = copy_blocks<false>(to, from, bytes);
  }
  if (at < bytes) __builtin_memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}
