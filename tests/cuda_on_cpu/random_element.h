// What tests of kernels reduce. Behind cuda_on_cpu.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>

#include "../../csrc/kernels/device_types.cuh"

namespace checks {

using namespace pycomm;

// Any bits at all: integers that wrap; among floats NaNs, infinities, subnormals and -0, mixed with
// tame values.
template <class T>
T random_element(std::mt19937_64& generator) {
  const uint64_t word = generator();
  if constexpr (kIs16BitFloat<T>) {
    const float tame = static_cast<float>(static_cast<int>(word >> 32) % 1000) / 64;
    if (word % 4 == 0) return T{static_cast<uint16_t>(word >> 16)};
    return from_accumulator<T>(tame);
  } else if constexpr (kIsFloat8<T> || std::is_same_v<T, Bool>) {
    return T{static_cast<uint8_t>(word % 4 == 0 ? 0 : word >> 16)};
  } else if constexpr (std::is_floating_point_v<T>) {
    T value = static_cast<T>(static_cast<int64_t>(word)) / static_cast<T>(1 << 30);
    if (word % 4 == 0) std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return static_cast<T>(word);
  }
}

}  // namespace checks
