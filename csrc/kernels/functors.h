// The reductions, once: host vectors, host scalars and CUDA lanes all go through these.
//
// `V` is a scalar or a GCC vector: the expressions mean the same for both, which is why they avoid
// && and std::min. Always inlined, since a 64-byte vector is passed differently under different
// instruction sets.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common.h"

namespace pycomm {

// Storage of 16-bit floats on the host; the arithmetic happens in float.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

struct Sum {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return a * b;
  }
};
// A NaN on either side wins: `a != a` keeps a's, and a comparison with b's is false and takes b.
struct Min {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class V>
  PYCOMM_HOST_DEVICE PYCOMM_ALWAYS_INLINE static V apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

// Average is a sum that is divided at the end, once: by IEEE division, or truncated for integers.
template <ReduceOp op>
using FunctorOf = std::conditional_t<
    op == ReduceOp::kMin, Min,
    std::conditional_t<op == ReduceOp::kMax, Max,
                       std::conditional_t<op == ReduceOp::kProduct, Product, Sum>>>;

template <class T>
inline constexpr bool kIs16BitFloat = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// What partial results are held in: 16-bit floats accumulate in float, averaged integers in 64 bits
// (so that the mean of int8 values is right although their sum would not fit), everything else in
// its own type.
template <class T, ReduceOp op, class = void>
struct Accumulator {
  using type = T;
};
template <class T, ReduceOp op>
struct Accumulator<T, op, std::enable_if_t<kIs16BitFloat<T>>> {
  using type = float;
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
template <class T, class Visit>
bool visit_op(ReduceOp op, Visit&& visit) {
  switch (op) {
    case ReduceOp::kSum:
      visit(Type<T>{}, Op<ReduceOp::kSum>{});
      return true;
    case ReduceOp::kAvg:
      visit(Type<T>{}, Op<ReduceOp::kAvg>{});
      return true;
    case ReduceOp::kMin:
      visit(Type<T>{}, Op<ReduceOp::kMin>{});
      return true;
    case ReduceOp::kMax:
      visit(Type<T>{}, Op<ReduceOp::kMax>{});
      return true;
    case ReduceOp::kProduct:
      visit(Type<T>{}, Op<ReduceOp::kProduct>{});
      return true;
  }
  return false;
}
template <class Visit>
bool visit_reduction(DType dtype, ReduceOp op, Visit&& visit) {
  switch (dtype) {
    case DType::kInt8:
      return visit_op<int8_t>(op, visit);
    case DType::kUInt8:
      return visit_op<uint8_t>(op, visit);
    case DType::kInt16:
      return visit_op<int16_t>(op, visit);
    case DType::kUInt16:
      return visit_op<uint16_t>(op, visit);
    case DType::kInt32:
      return visit_op<int32_t>(op, visit);
    case DType::kUInt32:
      return visit_op<uint32_t>(op, visit);
    case DType::kInt64:
      return visit_op<int64_t>(op, visit);
    case DType::kUInt64:
      return visit_op<uint64_t>(op, visit);
    case DType::kFloat16:
      return visit_op<Half>(op, visit);
    case DType::kBFloat16:
      return visit_op<BFloat16>(op, visit);
    case DType::kFloat32:
      return visit_op<float>(op, visit);
    case DType::kFloat64:
      return visit_op<double>(op, visit);
    default:
      return false;
  }
}

// Bytes of one partial result.
inline int64_t accumulator_bytes(DType dtype, ReduceOp op) {
  int64_t bytes = 0;
  visit_reduction(dtype, op, [&](auto type, auto reduction) {
    using T = typename decltype(type)::type;
    bytes = sizeof(typename Accumulator<T, decltype(reduction)::op>::type);
  });
  return bytes;
}

}  // namespace pycomm
