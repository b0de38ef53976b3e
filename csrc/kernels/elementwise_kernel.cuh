// The reduction of elementwise.h as a CUDA kernel. tests/cuda_on_cpu runs this same source on the
// CPU.
//
// Memory-bound: every thread moves 16 bytes per source at a time, the grid is sized to the chip by
// the launcher.
#pragma once

#include <cstdint>

#include "device_types.cuh"

namespace pycomm {

inline constexpr int kMaxDeviceSources = 16;
inline constexpr int kMostReduceThreads = 256;
inline constexpr int kSourcesAtOnce = 4;

struct DeviceReduceCall {
  const void* sources[kMaxDeviceSources];
  double scales[kMaxDeviceSources];  // of kPremulSum
  void* output;
  int64_t count;
  int num_sources;
  int divisor;
};

// dispatch.h's accumulator, or a cheaper one that gives the same bits. Integers of 8 and 16 bits:
// an average of kMaxDeviceSources needs no more than 32, and of the least and largest the
// compiler's bytewise code spills.
template <class T, ReduceOp kOp>
struct DeviceAccumulator {
  static constexpr bool kIsWord =
      std::is_integral_v<T> && sizeof(T) <= 2 &&
      (kOp == ReduceOp::kAvg || kOp == ReduceOp::kMin || kOp == ReduceOp::kMax);
  using Word = std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>;
  using type = std::conditional_t<kIsWord, Word, typename Accumulator<T, kOp>::type>;
};

// The accumulators of kLanes elements, combined source by source: they stay in registers.
template <class T, ReduceOp kOp, int kLanes>
struct ReduceLanes {
  using Acc = typename DeviceAccumulator<T, kOp>::type;
  Acc lanes[kLanes];

  __device__ PYCOMM_ALWAYS_INLINE Acc contribution(const DeviceReduceCall& call, int source,
                                                   T element) const {
    const Acc value = static_cast<Acc>(to_accumulator(element));
    if constexpr (kOp == ReduceOp::kPremulSum)
      return scaled(value, static_cast<Acc>(call.scales[source]));
    else
      return value;
  }
  __device__ PYCOMM_ALWAYS_INLINE void begin(const DeviceReduceCall& call,
                                             const T (&elements)[kLanes]) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = contribution(call, 0, elements[lane]);
  }
  __device__ PYCOMM_ALWAYS_INLINE void add(const DeviceReduceCall& call, int source,
                                           const T (&elements)[kLanes]) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] =
          FunctorOf<T, kOp>::apply(lanes[lane], contribution(call, source, elements[lane]));
  }
  __device__ PYCOMM_ALWAYS_INLINE void finish(const DeviceReduceCall& call,
                                              T (&elements)[kLanes]) const {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      Acc value = lanes[lane];
      if constexpr (kOp == ReduceOp::kAvg) value = value / static_cast<Acc>(call.divisor);
      elements[lane] = from_accumulator<T>(value);
    }
  }
};

// Of pack `at`. Sources are loaded kSourcesAtOnce at a time before the first is needed, so that as
// many loads are in flight.
template <class T, ReduceOp kOp, class Pack>
__device__ PYCOMM_ALWAYS_INLINE void reduce_pack(const DeviceReduceCall& call, int64_t at) {
  const auto load = [&](int source) { return static_cast<const Pack*>(call.sources[source])[at]; };
  ReduceLanes<T, kOp, Pack::kLanes> sum;
  sum.begin(call, load(0).lanes);
  int source = 1;
  for (; source + kSourcesAtOnce <= call.num_sources; source += kSourcesAtOnce) {
    Pack packs[kSourcesAtOnce];
#pragma unroll
    for (int one = 0; one < kSourcesAtOnce; ++one) packs[one] = load(source + one);
#pragma unroll
    for (int one = 0; one < kSourcesAtOnce; ++one) sum.add(call, source + one, packs[one].lanes);
  }
  for (; source < call.num_sources; ++source) sum.add(call, source, load(source).lanes);
  Pack result;
  sum.finish(call, result.lanes);
  static_cast<Pack*>(call.output)[at] = result;
}

// One element, as a pack.
template <class T>
struct SinglePack {
  static constexpr int kLanes = 1;
  T lanes[kLanes];
};

template <class T, ReduceOp kOp>
__global__ void __launch_bounds__(kMostReduceThreads)
    reduce_kernel(const __grid_constant__ DeviceReduceCall call) {
  constexpr int kLanes = DevicePack<T>::kLanes;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t packs = call.count / kLanes;
  for (int64_t at = thread; at < packs; at += threads) reduce_pack<T, kOp, DevicePack<T>>(call, at);
  for (int64_t tail = packs * kLanes + thread; tail < call.count; tail += threads)
    reduce_pack<T, kOp, SinglePack<T>>(call, tail);
}

}  // namespace pycomm
