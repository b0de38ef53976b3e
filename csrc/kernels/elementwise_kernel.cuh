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

struct DeviceReduceCall {
  const void* sources[kMaxDeviceSources];
  double scales[kMaxDeviceSources];  // of kPremulSum
  void* output;
  int64_t count;
  int num_sources;
  int divisor;
};

template <class T, ReduceOp kOp>
__device__ inline T reduce_lane(const DeviceReduceCall& call, const T* contributions, int stride) {
  using Acc = typename Accumulator<T, kOp>::type;
  const auto contribution = [&](int s) {
    const Acc value = static_cast<Acc>(to_accumulator(contributions[s * stride]));
    if constexpr (kOp == ReduceOp::kPremulSum)
      return scaled(value, static_cast<Acc>(call.scales[s]));
    else
      return value;
  };
  Acc value = contribution(0);
  for (int s = 1; s < call.num_sources; ++s)
    value = FunctorOf<T, kOp>::apply(value, contribution(s));
  if constexpr (kOp == ReduceOp::kAvg) value = value / static_cast<Acc>(call.divisor);
  return from_accumulator<T>(value);
}

template <class T, ReduceOp kOp>
__global__ void reduce_kernel(DeviceReduceCall call) {
  using Pack = DevicePack<T>;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t packs = call.count / Pack::kLanes;

  for (int64_t at = thread; at < packs; at += threads) {
    Pack contributions[kMaxDeviceSources];
    for (int s = 0; s < call.num_sources; ++s)
      contributions[s] = static_cast<const Pack*>(call.sources[s])[at];
    Pack result;
    for (int lane = 0; lane < Pack::kLanes; ++lane)
      result.lanes[lane] = reduce_lane<T, kOp>(call, &contributions[0].lanes[lane], Pack::kLanes);
    static_cast<Pack*>(call.output)[at] = result;
  }
  for (int64_t tail = packs * Pack::kLanes + thread; tail < call.count; tail += threads) {
    T contributions[kMaxDeviceSources];
    for (int s = 0; s < call.num_sources; ++s)
      contributions[s] = static_cast<const T*>(call.sources[s])[tail];
    static_cast<T*>(call.output)[tail] = reduce_lane<T, kOp>(call, contributions, 1);
  }
}

}  // namespace pycomm
