// codec.h's transcode() as one CUDA kernel. tests/cuda_on_cpu runs this same source on the CPU.
//
// A thread block takes tiles: as many whole codec blocks as it has lanes for, kTranscodeLanes
// values a thread. The values stay in registers from their sum, over the largest magnitude of their
// block, to the narrowing, so memory is read and written once and there is one barrier per tile.
// Accesses are of 16 bytes where addresses allow it, of one element otherwise.
#pragma once

#include <cmath>

#include "codec_cuda.h"
#include "device_types.cuh"

namespace pycomm {

#include "codec_format.h"

inline constexpr int kTranscodeLanes = 8;  // consecutive values of a thread
inline constexpr int kMostTranscodeThreads = kMaxBlock / kTranscodeLanes;
// What the registers of a processor are enough for, at 64 a thread.
inline constexpr int kTranscodeThreadsPerProcessor = 1024;
inline constexpr int kMostDeviceWires = kMaxRanks - 1;
inline constexpr int kWarpThreads = 32;
static_assert(kBlockGranule % kTranscodeLanes == 0, "a thread's values share a scale");

// As TranscodeCall, with pointers to device memory, but for `wires`.
struct DeviceTranscodeCall {
  int64_t count;
  int64_t first;
  Wire wires[kMostDeviceWires];
  DeviceSpans inputs, outputs;
  float* residual;
  void* values;
  float* scales;
  CodecCounts* counts;
  uint64_t seed;
  float factor;
  float divisor;
  int block;
  int num_wires;
  int own;
  bool infinite;
  bool stochastic;
};

// ---- access -------------------------------------------------------------------------------------

template <class T>
inline constexpr int kAccessBytes =
    sizeof(T) * kTranscodeLanes < kPackBytes ? sizeof(T) * kTranscodeLanes : kPackBytes;
template <class T>
struct alignas(kAccessBytes<T>) Access {
  static constexpr int kLanes = kAccessBytes<T> / sizeof(T);
  T lanes[kLanes];
};
template <class T>
__device__ inline bool is_aligned(const T* at) {
  return reinterpret_cast<uintptr_t>(at) % kAccessBytes<T> == 0;
}

__device__ inline float to_accumulator(int8_t value, float) { return static_cast<float>(value); }
template <class T>
__device__ inline float to_accumulator(T value, float) {
  return to_accumulator(value);
}

// Calls visit(lane, element) for the first `lanes` of a thread's elements.
template <class T, class Visit>
__device__ PYCOMM_ALWAYS_INLINE void load_lanes(const T* from, int lanes, Visit&& visit) {
  if (lanes == kTranscodeLanes && is_aligned(from)) {
    Access<T> parts[kTranscodeLanes / Access<T>::kLanes];
#pragma unroll
    for (int part = 0; part < kTranscodeLanes / Access<T>::kLanes; ++part)
      parts[part] = reinterpret_cast<const Access<T>*>(from)[part];
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane)
      visit(lane, parts[lane / Access<T>::kLanes].lanes[lane % Access<T>::kLanes]);
  } else {
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane)
      if (lane < lanes) visit(lane, from[lane]);
  }
}
// Stores element(lane) to the first `lanes` of a thread's elements.
template <class T, class Element>
__device__ PYCOMM_ALWAYS_INLINE void store_lanes(T* to, int lanes, Element&& element) {
  if (lanes == kTranscodeLanes && is_aligned(to)) {
#pragma unroll
    for (int part = 0; part < kTranscodeLanes / Access<T>::kLanes; ++part) {
      Access<T> elements;
#pragma unroll
      for (int lane = 0; lane < Access<T>::kLanes; ++lane)
        elements.lanes[lane] = element(part * Access<T>::kLanes + lane);
      reinterpret_cast<Access<T>*>(to)[part] = elements;
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane)
      if (lane < lanes) to[lane] = element(lane);
  }
}

// The tensor that element `number` is in: of those that begin at or before it, the last.
__device__ inline int find_span(const DeviceSpans& spans, int64_t number) {
  int low = 0, high = spans.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (spans.list[middle].begin <= number)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}
// Where a thread's elements are, [number, number + lanes) of the tensors' numbering: together, from
// `together` on, or one by one, from tensor `span` on.
template <class T>
struct LanePlace {
  T* together = nullptr;
  int span = 0;

  __device__ PYCOMM_ALWAYS_INLINE LanePlace(const DeviceSpans& spans, int64_t number, int lanes) {
    if (spans.count == 1) {
      together = static_cast<T*>(spans.data) + number;
      return;
    }
    span = find_span(spans, number);
    const DeviceSpan found = spans.list[span];
    if (number + lanes <= spans.list[span + 1].begin)
      together = static_cast<T*>(found.data) + (number - found.begin);
  }
  // Of element `number`, behind the last that this was asked for.
  __device__ PYCOMM_ALWAYS_INLINE T* next(const DeviceSpans& spans, int64_t number) {
    while (spans.list[span + 1].begin <= number) ++span;
    return static_cast<T*>(spans.list[span].data) + (number - spans.list[span].begin);
  }
};

// ---- the parts of a tile ------------------------------------------------------------------------

__device__ inline int32_t magnitude_bits(float value) {
  return bits_as<int32_t>(value) & 0x7fffffff;
}

// A thread's encoded values of one wire, which is aligned to kPackBytes, and their scale.
template <class Value>
struct WireLanes {
  static constexpr int kLanes = Access<Value>::kLanes, kParts = kTranscodeLanes / kLanes;
  Access<Value> parts[kParts];
  float up;

  __device__ PYCOMM_ALWAYS_INLINE void load(const Value* from, float scale) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      parts[part] = reinterpret_cast<const Access<Value>*>(from)[part];
    up = scale;
  }
  __device__ PYCOMM_ALWAYS_INLINE void add_to(float (&sum)[kTranscodeLanes]) const {
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane) {
      const Value value = parts[lane / kLanes].lanes[lane % kLanes];
      sum[lane] = sum[lane] + scaled(to_accumulator(value, 0.0f), up);
    }
  }
};

// Adds wires [from, to), in this order; the loads of kAtOnce are on their way before the first
// is needed. `block`: the codec block that the values are in.
template <class Format>
__device__ PYCOMM_ALWAYS_INLINE void add_wires(const DeviceTranscodeCall& call, int from, int to,
                                               int64_t block, int64_t at, int lanes,
                                               float (&sum)[kTranscodeLanes]) {
  using Value = typename Format::Value;
  constexpr int kAtOnce = sizeof(Value) < sizeof(float) ? 2 : 1;  // what registers are enough for
  const auto values = [&](int wire) {
    return static_cast<const Value*>(call.wires[wire].values) + at;
  };
  const auto scale = [&](int wire) {
    if (std::is_same_v<Value, float>) return 1.0f;  // fp32 has none
    return call.block > 0 ? call.wires[wire].scales[block] : 1.0f;
  };
  if (lanes < kTranscodeLanes) {
    for (int wire = from; wire < to; ++wire)
#pragma unroll
      for (int lane = 0; lane < kTranscodeLanes; ++lane)
        if (lane < lanes)
          sum[lane] = sum[lane] + scaled(to_accumulator(values(wire)[lane], 0.0f), scale(wire));
    return;
  }
  int wire = from;
  for (; wire + kAtOnce <= to; wire += kAtOnce) {
    WireLanes<Value> several[kAtOnce];
#pragma unroll
    for (int one = 0; one < kAtOnce; ++one)
      several[one].load(values(wire + one), scale(wire + one));
#pragma unroll
    for (int one = 0; one < kAtOnce; ++one) several[one].add_to(sum);
  }
  if constexpr (kAtOnce > 1)
    for (; wire < to; ++wire) {
      WireLanes<Value> one;
      one.load(values(wire), scale(wire));
      one.add_to(sum);
    }
}

template <class T>
__device__ PYCOMM_ALWAYS_INLINE void add_own(const DeviceTranscodeCall& call, int64_t at, int lanes,
                                             float (&sum)[kTranscodeLanes]) {
  float kept[kTranscodeLanes] = {};
  if (call.residual)
    load_lanes(call.residual + at, lanes, [&](int lane, float value) { kept[lane] = value; });
  const auto add = [&](int lane, T element) {
    float value = scaled(to_accumulator(element), call.factor);
    if (call.residual) value = value + kept[lane];
    sum[lane] = sum[lane] + value;
  };
  const int64_t number = call.first + at;
  LanePlace<const T> place(call.inputs, number, lanes);
  if (place.together) {
    load_lanes(place.together, lanes, add);
  } else {
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane)
      if (lane < lanes) add(lane, *place.next(call.inputs, number + lane));
  }
}

template <class T>
__device__ PYCOMM_ALWAYS_INLINE void write_outputs(const DeviceTranscodeCall& call, int64_t at,
                                                   int lanes,
                                                   const float (&values)[kTranscodeLanes]) {
  const int64_t number = call.first + at;
  LanePlace<T> place(call.outputs, number, lanes);
  if (place.together) {
    store_lanes(place.together, lanes, [&](int lane) { return from_accumulator<T>(values[lane]); });
  } else {
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane)
      if (lane < lanes)
        *place.next(call.outputs, number + lane) = from_accumulator<T>(values[lane]);
  }
}

// The largest magnitudes of a tile's codec blocks. Three sets of them take turns: while one is
// filled, that of the tile before may still be read, and that of the next must be zero already.
struct BlockMaxima {
  static constexpr int kSets = 3, kBlocks = kMaxBlock / kBlockGranule;
  int32_t results[kSets * kBlocks];

  // All threads call these. `turn` counts 0, 1, 2, 0 ...; `block` is the one of the tile's codec
  // blocks that the thread's values are in.
  __device__ PYCOMM_ALWAYS_INLINE void clear() {
    for (int at = threadIdx.x; at < kSets * kBlocks; at += blockDim.x) results[at] = 0;
    __syncthreads();
  }
  __device__ PYCOMM_ALWAYS_INLINE int32_t of(int turn, int block, int block_length,
                                             int32_t largest) {
    // Lanes that surely share a codec block: those of a granule, or the whole warp.
    const int together = block_length % (kWarpThreads * kTranscodeLanes) == 0
                             ? kWarpThreads
                             : kBlockGranule / kTranscodeLanes;
    for (int distance = 1; distance < together; distance *= 2) {
      const int32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
      largest = largest > other ? largest : other;
    }
    int32_t* set = results + turn * kBlocks;
    int32_t* after_next = results + (turn + 2) % kSets * kBlocks;
    if (threadIdx.x % together == 0 && largest > 0) atomicMax(&set[block], largest);
    __syncthreads();
    for (int at = threadIdx.x; at < kBlocks; at += blockDim.x) after_next[at] = 0;
    return set[block];
  }
};

// What one thread encoded.
struct ThreadCounts {
  int overflows = 0, underflows = 0, non_finite = 0;
  double squares = 0, error_squares = 0;
};

template <WireFormat kFormat>
struct LaneEncoder {
  using Format = FormatOf<kFormat>;
  using Value = typename Format::Value;

  const DeviceTranscodeCall& call;
  ThreadCounts& counts;
  Scale scale{1, 1};
  float limit = Format::kLargest;

  __device__ PYCOMM_ALWAYS_INLINE Value narrow(float value) const {
    if constexpr (kFormat == WireFormat::kInt8)
      return static_cast<int8_t>(convert<int32_t>(round_to_whole(value)));
    else
      return from_accumulator<Value>(value);
  }
  // As the CPU's.
  __device__ PYCOMM_ALWAYS_INLINE float mark(float value) const {
    if (kFormat == WireFormat::kFloat8E4M3) return bits_as<float>(0x7fc00000);
    const int32_t sign = bits_as<int32_t>(value) & ~0x7fffffff;
    return value == value ? bits_as<float>(sign | kInfinityBits) : value;
  }
  __device__ PYCOMM_ALWAYS_INLINE int32_t random_bits(int64_t at) const {
    const uint64_t number = static_cast<uint64_t>(call.first + at);
    return static_cast<int32_t>(random_24_bits(static_cast<uint32_t>(number),
                                               static_cast<uint32_t>(number >> 32), call.seed));
  }

  // Encodes value `at` of the call, which becomes what it decodes to; false if it is marked as
  // infinite or NaN and its residual stays.
  __device__ PYCOMM_ALWAYS_INLINE bool encode(int64_t at, float& value, Value& narrowed,
                                              float& error) {
    float down = scaled(value, scale.down);
    const int32_t magnitude = magnitude_bits(down);
    const bool is_over = magnitude > bits_as<int32_t>(limit);
    const bool is_infinite = magnitude >= kInfinityBits;
    const bool is_marked = call.infinite ? is_over : is_infinite;
    down = saturated(down, -static_cast<int32_t>(is_over), limit);
    if (call.stochastic) down = round_by_chance<Format>(down, random_bits(at));
    if (is_marked) down = mark(value);
    narrowed = narrow(down);
    const float decoded = scaled(to_accumulator(narrowed, 0.0f), scale.up);
    counts.non_finite += is_infinite;
    counts.overflows += call.block == 0 && is_over && !is_infinite;
    if (!is_marked) {
      error = value - decoded;
      counts.underflows += decoded == 0 && value != 0;
      counts.squares = fma(double{value}, double{value}, counts.squares);
      counts.error_squares = fma(double{error}, double{error}, counts.error_squares);
    }
    value = decoded;
    return !is_marked;
  }
};

// A block with infinity or NaN in it, as the CPU does: its residual stays as it was.
template <class Value>
__device__ inline void mark_lanes(const DeviceTranscodeCall& call, ThreadCounts& counts, int64_t at,
                                  int lanes, float (&sum)[kTranscodeLanes]) {
  store_lanes(static_cast<Value*>(call.values) + at, lanes, [](int) { return Value{}; });
#pragma unroll
  for (int lane = 0; lane < kTranscodeLanes; ++lane) {
    counts.non_finite += lane < lanes && magnitude_bits(sum[lane]) >= kInfinityBits;
    sum[lane] = bits_as<float>(0x7fc00000);
  }
}

// `block`: the codec block, whose largest magnitude is `largest`; of codecs with scales.
template <WireFormat kFormat>
__device__ PYCOMM_ALWAYS_INLINE void encode_lanes(const DeviceTranscodeCall& call,
                                                  ThreadCounts& counts, int64_t block,
                                                  int32_t largest, int64_t at, int lanes,
                                                  float (&sum)[kTranscodeLanes]) {
  using Format = FormatOf<kFormat>;
  using Value = typename Format::Value;
  LaneEncoder<kFormat> encoder{call, counts};
  if (call.block > 0) {
    const bool is_first = at == block * call.block;
    if (largest >= kInfinityBits) {
      if (is_first) call.scales[block] = bits_as<float>(0x7fc00000);
      return mark_lanes<Value>(call, counts, at, lanes, sum);
    }
    encoder.scale = choose_scale<Format>(largest);
    encoder.limit = scaled_limit<Format>(largest);
    if (is_first) call.scales[block] = encoder.scale.up;
  }
  Value narrowed[kTranscodeLanes] = {};
  float errors[kTranscodeLanes] = {};
  unsigned kept = 0;  // a bit for each lane whose residual stays
#pragma unroll
  for (int lane = 0; lane < kTranscodeLanes; ++lane)
    if (lane < lanes && !encoder.encode(at + lane, sum[lane], narrowed[lane], errors[lane]))
      kept |= 1u << lane;
  store_lanes(static_cast<Value*>(call.values) + at, lanes,
              [&](int lane) { return narrowed[lane]; });
  if (!call.residual) return;
  if (kept == 0)
    return store_lanes(call.residual + at, lanes, [&](int lane) { return errors[lane]; });
#pragma unroll
  for (int lane = 0; lane < kTranscodeLanes; ++lane)
    if (lane < lanes && !(kept >> lane & 1)) call.residual[at + lane] = errors[lane];
}

// ---- counts -------------------------------------------------------------------------------------

using DeviceCount = unsigned long long;  // what atomicAdd knows

// The thread block's counts, of all its tiles, are added to the call's once.
struct BlockCounts {
  DeviceCount overflows, underflows, non_finite;
  double squares, error_squares;
};

template <class V>
__device__ PYCOMM_ALWAYS_INLINE V sum_of_warp(V value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2)
    value = value + __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// All threads call this. `with_values`: also how many values the whole call has.
__device__ PYCOMM_ALWAYS_INLINE void add_counts(const DeviceTranscodeCall& call,
                                                const ThreadCounts& counts, BlockCounts& block,
                                                bool with_values) {
  if (threadIdx.x == 0) block = BlockCounts{};
  __syncthreads();
  const int overflows = sum_of_warp(counts.overflows), underflows = sum_of_warp(counts.underflows);
  const int non_finite = sum_of_warp(counts.non_finite);
  const double squares = sum_of_warp(counts.squares);
  const double error_squares = sum_of_warp(counts.error_squares);
  if (threadIdx.x % kWarpThreads == 0) {
    atomicAdd(&block.overflows, static_cast<DeviceCount>(overflows));
    atomicAdd(&block.underflows, static_cast<DeviceCount>(underflows));
    atomicAdd(&block.non_finite, static_cast<DeviceCount>(non_finite));
    atomicAdd(&block.squares, squares);
    atomicAdd(&block.error_squares, error_squares);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto add = [](int64_t* to, DeviceCount count) {
    if (count) atomicAdd(reinterpret_cast<DeviceCount*>(to), count);
  };
  if (with_values) add(&call.counts->values, static_cast<DeviceCount>(call.count));
  add(&call.counts->overflows, block.overflows);
  add(&call.counts->underflows, block.underflows);
  add(&call.counts->non_finite, block.non_finite);
  atomicAdd(&call.counts->squares, block.squares);
  atomicAdd(&call.counts->error_squares, block.error_squares);
}

// ---- the kernel ---------------------------------------------------------------------------------

// What a block of threads shares while it works on a call.
struct TranscodeShared {
  BlockMaxima maxima;
  BlockCounts counts;
};

// One of `parts` parts of a call, by a block of threads: whole warps, with lanes for one codec
// block, at least. T: of the tensors.
template <WireFormat kFormat, class T>
__device__ PYCOMM_ALWAYS_INLINE void transcode_part(const DeviceTranscodeCall& call,
                                                    TranscodeShared& shared, int part, int parts) {
  using Format = FormatOf<kFormat>;
  const int length = call.block > 0 ? call.block : kBlockGranule;
  const int tile_blocks = static_cast<int>(blockDim.x) * kTranscodeLanes / length;
  const int at_in_tile = static_cast<int>(threadIdx.x) * kTranscodeLanes;
  const int block_in_tile = at_in_tile / length;  // beyond the last: no lanes
  const bool scales = call.values && call.block > 0;
  ThreadCounts counts;
  if (scales) shared.maxima.clear();

  const int64_t blocks = (call.count + length - 1) / length;
  int turn = 0;
  for (int64_t first_block = int64_t{part} * tile_blocks; first_block < blocks;
       first_block += int64_t{parts} * tile_blocks) {
    const int64_t begin = first_block * length, at = begin + at_in_tile;
    const int64_t left = block_in_tile < tile_blocks ? call.count - at : 0;
    const int lanes = left >= kTranscodeLanes ? kTranscodeLanes
                      : left > 0              ? static_cast<int>(left)
                                              : 0;
    const int64_t block = first_block + block_in_tile;

    float sum[kTranscodeLanes];
    int32_t largest = 0;
    // -0, which leaves whatever is added to it as it was.
#pragma unroll
    for (int lane = 0; lane < kTranscodeLanes; ++lane) sum[lane] = -0.0f;
    if (lanes > 0) {
      const int before = call.own < 0 ? call.num_wires : call.own;
      add_wires<Format>(call, 0, before, block, at, lanes, sum);
      if (call.own >= 0) {
        add_own<T>(call, at, lanes, sum);
        add_wires<Format>(call, before, call.num_wires, block, at, lanes, sum);
      }
      if (call.divisor != 1) {
#pragma unroll
        for (int lane = 0; lane < kTranscodeLanes; ++lane) sum[lane] = sum[lane] / call.divisor;
      }
#pragma unroll
      for (int lane = 0; lane < kTranscodeLanes; ++lane)
        largest = largest > magnitude_bits(sum[lane]) ? largest : magnitude_bits(sum[lane]);
    }
    if (scales) {
      const int slot = block_in_tile < tile_blocks ? block_in_tile : 0;
      largest = shared.maxima.of(turn, slot, length, largest);
      turn = (turn + 1) % BlockMaxima::kSets;
    }
    if (lanes == 0) continue;
    if (call.values) encode_lanes<kFormat>(call, counts, block, largest, at, lanes, sum);
    if (call.outputs.count > 0) write_outputs<T>(call, at, lanes, sum);
  }
  if (call.counts && call.values) add_counts(call, counts, shared.counts, part == 0);
}

template <WireFormat kFormat, class T>
__global__ void __launch_bounds__(kMostTranscodeThreads,
                                  kTranscodeThreadsPerProcessor / kMostTranscodeThreads)
    transcode_kernel(const __grid_constant__ DeviceTranscodeCall call) {
  __shared__ TranscodeShared shared;
  transcode_part<kFormat, T>(call, shared, static_cast<int>(blockIdx.x),
                             static_cast<int>(gridDim.x));
}

}  // namespace pycomm
