// Runs CUDA kernels that have no barriers on the CPU: include this, then the kernel's source, and
// call launch().
//
// A launch calls the kernel once for every thread of the grid, one after another, in an order that
// a seed permutes: what depends on the order of threads gives another result. Needs no CUDA
// toolkit; the conversions below are written from the formats' definitions, not from the code under
// test. Nothing is said about speed or memory order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__

// ---- the built-in variables ---------------------------------------------------------------------

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

// The order in which a launch's threads run: as numbered, from the last to the first, or shuffled
// by a seed.
enum class Order { kForward, kBackward, kShuffled };

template <class Kernel, class... Arguments>
void launch(unsigned blocks, unsigned threads, Order order, unsigned seed, Kernel&& kernel,
            const Arguments&... arguments) {
  std::vector<unsigned> sequence(size_t{blocks} * threads);
  std::iota(sequence.begin(), sequence.end(), 0u);
  if (order == Order::kBackward) std::reverse(sequence.begin(), sequence.end());
  if (order == Order::kShuffled) {
    std::mt19937 generator(seed);
    std::shuffle(sequence.begin(), sequence.end(), generator);
  }
  gridDim = dim3{blocks};
  blockDim = dim3{threads};
  for (const unsigned number : sequence) {
    blockIdx = dim3{number / threads, 0, 0};
    threadIdx = dim3{number % threads, 0, 0};
    kernel(arguments...);
  }
}

// ---- 16-bit floats ------------------------------------------------------------------------------

// A binary float of 1 + kExponentBits + kMantissaBits = 16 bits.
template <int kExponentBits, int kMantissaBits>
struct Format {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kHidden = 1 << kMantissaBits;  // the mantissa's implied leading bit
  static constexpr uint16_t kInfinity =
      static_cast<uint16_t>(((1 << kExponentBits) - 1) << kMantissaBits);

  static float widen(uint16_t bits) {
    const int exponent = (bits & 0x7fff) >> kMantissaBits, mantissa = bits & (kHidden - 1);
    double magnitude = std::ldexp(mantissa, 1 - kBias - kMantissaBits);  // zero or subnormal
    if ((bits & 0x7fff) >= kInfinity)
      magnitude = mantissa ? NAN : INFINITY;
    else if (exponent)
      magnitude = std::ldexp(mantissa + kHidden, exponent - kBias - kMantissaBits);
    return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
  }

  // To nearest, ties to even; every NaN becomes 0x7fff, as the device's conversions do.
  static uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7fff;
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude == 0) return static_cast<uint16_t>(sign);
    const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
    if (exponent > kBias) return static_cast<uint16_t>(sign | kInfinity);
    const int units =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent)));
    // The hidden bit adds one to the exponent field, and a carry out of the mantissa another: also
    // into infinity.
    return static_cast<uint16_t>(sign | (((exponent + kBias - 1) << kMantissaBits) + units));
  }
};
using Binary16 = Format<5, 10>;
using Brain16 = Format<8, 7>;

}  // namespace cuda_on_cpu

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return cuda_on_cpu::Binary16::widen(value.bits); }
inline __half __float2half_rn(float value) { return {cuda_on_cpu::Binary16::narrow(value)}; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __bfloat162float(__nv_bfloat16 value) {
  return cuda_on_cpu::Brain16::widen(value.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {cuda_on_cpu::Brain16::narrow(value)};
}
