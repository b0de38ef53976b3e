// The reduction of elementwise.h as a CUDA kernel. tests/cuda_on_cpu runs this same source on the
// CPU.
//
// Memory-bound: every thread moves 16 bytes per source at a time, the grid is sized to the chip by
// the launcher.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dispatch.h"

namespace pycomm {

#include "functors.h"

inline constexpr int kMaxDeviceSources = 16;
inline constexpr int kPackBytes = 16;

struct DeviceReduceCall {
  const void* sources[kMaxDeviceSources];
  double scales[kMaxDeviceSources];  // of kPremulSum
  void* output;
  int64_t count;
  int num_sources;
  int divisor;
};

// 16-bit floats are plain bits in dispatch.h; these convert with the device's own instructions.
// 8-bit ones go through functors.h, since the device's instructions overflow in another way than
// torch.
template <class T>
__device__ inline T to_accumulator(T value) {
  return value;
}
__device__ inline float to_accumulator(Half value) {
  return __half2float(__ushort_as_half(value.bits));
}
__device__ inline float to_accumulator(BFloat16 value) {
  return __bfloat162float(__ushort_as_bfloat16(value.bits));
}
__device__ inline float to_accumulator(Float8E4M3 value) {
  return widen_float8<Float8E4M3, float>(int32_t{value.bits});
}
__device__ inline float to_accumulator(Float8E5M2 value) {
  return widen_float8<Float8E5M2, float>(int32_t{value.bits});
}
__device__ inline uint8_t to_accumulator(Bool value) { return value.bits != 0; }

template <class T, class Acc>
__device__ inline T from_accumulator(Acc value) {
  if constexpr (std::is_same_v<T, Half>)
    return Half{__half_as_ushort(__float2half_rn(value))};
  else if constexpr (std::is_same_v<T, BFloat16>)
    return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  else if constexpr (kIsFloat8<T>)
    return T{static_cast<uint8_t>(narrow_float8<T, int32_t>(value))};
  else if constexpr (std::is_same_v<T, Bool>)
    return Bool{value};
  else
    return static_cast<T>(value);
}

template <class T>
struct alignas(kPackBytes) DevicePack {
  static constexpr int kLanes = kPackBytes / sizeof(T);
  T lanes[kLanes];
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
