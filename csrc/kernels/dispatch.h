// From the runtime's (dtype, op) to types: how elements are stored, what they accumulate in.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common.h"

namespace pycomm {

// Storage of the types that C++ does not have. The arithmetic of 16-bit and 8-bit floats happens in
// float, that of truth values with 0 and 1; a stored byte that is not zero is true.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};
struct Bool {
  uint8_t bits;
};

template <class T>
inline constexpr bool kIs16BitFloat = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;
template <class T>
inline constexpr bool kIsFloat8 = std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>;

// What partial results are held in: 16-bit and 8-bit floats accumulate in float, averaged integers
// in 64 bits (so that the mean of int8 values is right although their sum would not fit),
// everything else in its own type.
template <class T, ReduceOp op, class = void>
struct Accumulator {
  using type = T;
};
template <class T, ReduceOp op>
struct Accumulator<T, op, std::enable_if_t<kIs16BitFloat<T> || kIsFloat8<T>>> {
  using type = float;
};
template <ReduceOp op>
struct Accumulator<Bool, op> {
  using type = uint8_t;
};
template <class T, ReduceOp op>
struct Accumulator<T, op, std::enable_if_t<std::is_integral_v<T> && op == ReduceOp::kAvg>> {
  using type = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
};

// Calls visit(Type<T>{}, Op<op>{}) for the storage type of `dtype` and `op`; false if the pair is
// not reducible.
template <class T>
struct Type {
  using type = T;
};
template <ReduceOp value>
struct Op {
  static constexpr ReduceOp op = value;
};
template <DType dtype, class T, class Visit>
bool visit_op(ReduceOp op, Visit&& visit) {
#define PYCOMM_CASE(enumerator, ...)                         \
  case ReduceOp::enumerator:                                 \
    if constexpr (can_reduce(dtype, ReduceOp::enumerator)) { \
      visit(Type<T>{}, Op<ReduceOp::enumerator>{});          \
      return true;                                           \
    }                                                        \
    return false;
  switch (op) { PYCOMM_REDUCE_OPS(PYCOMM_CASE) }
#undef PYCOMM_CASE
  return false;
}
// X(enumerator, storage type). A complex type is reduced as twice as many of its real_view.
#define PYCOMM_REDUCED_TYPES(X) \
  X(kInt8, int8_t)              \
  X(kUInt8, uint8_t)            \
  X(kInt16, int16_t)            \
  X(kUInt16, uint16_t)          \
  X(kInt32, int32_t)            \
  X(kUInt32, uint32_t)          \
  X(kInt64, int64_t)            \
  X(kUInt64, uint64_t)          \
  X(kFloat16, Half)             \
  X(kBFloat16, BFloat16)        \
  X(kFloat32, float)            \
  X(kFloat64, double)           \
  X(kBool, Bool)                \
  X(kFloat8E4M3, Float8E4M3)    \
  X(kFloat8E5M2, Float8E5M2)

template <class Visit>
bool visit_reduction(DType dtype, ReduceOp op, Visit&& visit) {
#define PYCOMM_CASE(enumerator, T) \
  case DType::enumerator:          \
    return visit_op<DType::enumerator, T>(op, visit);
  switch (dtype) {
    PYCOMM_REDUCED_TYPES(PYCOMM_CASE)
    default:
      return false;
  }
#undef PYCOMM_CASE
}

// Bytes of one partial result; 0 if the pair is not reducible.
inline int64_t accumulator_bytes(DType dtype, ReduceOp op) {
  int64_t bytes = 0;
  visit_reduction(dtype, op, [&](auto type, auto reduction) {
    using T = typename decltype(type)::type;
    bytes = sizeof(typename Accumulator<T, decltype(reduction)::op>::type);
  });
  return bytes;
}

}  // namespace pycomm
