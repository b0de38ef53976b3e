// What the tests of kernels on the CPU share: checks that are counted, arrays that end where they
// end, and equality of elements.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>

#include "../../csrc/kernels/dispatch.h"

namespace checks {

using namespace pycomm;

inline int64_t passed = 0, failures = 0;

template <class... Arguments>
void check(bool condition, const char* format, Arguments... arguments) {
  ++passed;
  if (condition) return;
  std::fprintf(stderr, "FAILED: ");
  std::fprintf(stderr, format, arguments...);
  std::fprintf(stderr, "\n");
  if (++failures >= 20) std::exit(1);
}

// Exactly as large as asked, so that AddressSanitizer sees the first byte past the end; aligned
// like device memory.
template <class T>
class Array {
 public:
  explicit Array(int64_t count) : count_(count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, static_cast<size_t>(count) * sizeof(T)) != 0) std::abort();
    data_.reset(static_cast<T*>(memory));
    std::memset(memory, 0x55, static_cast<size_t>(count) * sizeof(T));
  }
  T* data() { return data_.get(); }
  T& operator[](int64_t at) { return data_.get()[at]; }
  void assign(Array& other) {
    std::memcpy(data(), other.data(), static_cast<size_t>(count_) * sizeof(T));
  }

 private:
  int64_t count_;
  std::unique_ptr<T, decltype(&std::free)> data_{nullptr, std::free};
};

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_same_v<T, Half>)
    return (value.bits & 0x7fff) > 0x7c00;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return (value.bits & 0x7fff) > 0x7f80;
  else if constexpr (std::is_same_v<T, Float8E4M3>)
    return (value.bits & 0x7f) == 0x7f;
  else if constexpr (std::is_same_v<T, Float8E5M2>)
    return (value.bits & 0x7f) > 0x7c;
  else if constexpr (std::is_floating_point_v<T>)
    return value != value;
  else
    return false;
}

// Bit for bit, but that any NaN stands for any other: the processors differ in which one an
// operation gives.
template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (is_nan(a) && is_nan(b));
}

// Of main().
inline int report() {
  if (failures > 0) return 1;
  std::printf("%lld checks passed\n", static_cast<long long>(passed));
  return 0;
}

}  // namespace checks
