// What the CUDA kernels share: the arithmetic of functors.h, elements to and from accumulators, and
// packs of 16 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dispatch.h"

namespace pycomm {

#include "functors.h"

inline constexpr int kPackBytes = 16;

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

}  // namespace pycomm
