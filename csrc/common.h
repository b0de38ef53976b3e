// Vocabulary shared by host and device code: element types, reduce operations, collective
// operations.
//
// Every enum is an X-macro table, so that names, sizes and bindings come from one place.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define PYCOMM_HOST_DEVICE __host__ __device__
#else
#define PYCOMM_HOST_DEVICE
#endif
// Of what runs in kernels where nvcc compiles it, and on the host elsewhere: algorithms/*.h.
#if defined(__CUDACC__)
#define PYCOMM_ON_DEVICE __device__
#else
#define PYCOMM_ON_DEVICE
#endif

#define PYCOMM_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace pycomm {

// The most ranks one shared-memory communicator can hold: a bound for arrays on the stack.
inline constexpr int kMaxRanks = 64;

// A cache line, and the distance at which two ranks' writes never meet (adjacent-line prefetch).
inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kSeparationBytes = 128;

// X(enumerator, name as in torch, bytes of an element)
#define PYCOMM_DTYPES(X)             \
  X(kInt8, "int8", 1)                \
  X(kUInt8, "uint8", 1)              \
  X(kInt16, "int16", 2)              \
  X(kUInt16, "uint16", 2)            \
  X(kInt32, "int32", 4)              \
  X(kUInt32, "uint32", 4)            \
  X(kInt64, "int64", 8)              \
  X(kUInt64, "uint64", 8)            \
  X(kFloat16, "float16", 2)          \
  X(kBFloat16, "bfloat16", 2)        \
  X(kFloat32, "float32", 4)          \
  X(kFloat64, "float64", 8)          \
  X(kComplex64, "complex64", 8)      \
  X(kComplex128, "complex128", 16)   \
  X(kBool, "bool", 1)                \
  X(kFloat8E4M3, "float8_e4m3fn", 1) \
  X(kFloat8E5M2, "float8_e5m2", 1)

// X(enumerator, name)
#define PYCOMM_REDUCE_OPS(X) \
  X(kSum, "sum")             \
  X(kAvg, "avg")             \
  X(kMin, "min")             \
  X(kMax, "max")             \
  X(kProduct, "product")     \
  X(kBand, "band")           \
  X(kBor, "bor")             \
  X(kBxor, "bxor")           \
  X(kPremulSum, "premul_sum")

#define PYCOMM_OPERATIONS(X)                \
  X(kBarrier, "barrier")                    \
  X(kAllReduce, "all_reduce")               \
  X(kBroadcast, "broadcast")                \
  X(kAllGather, "all_gather")               \
  X(kReduceScatter, "reduce_scatter")       \
  X(kReduce, "reduce")                      \
  X(kGather, "gather")                      \
  X(kScatter, "scatter")                    \
  X(kAllToAll, "all_to_all")                \
  X(kMonitoredBarrier, "monitored_barrier") \
  X(kSend, "send")                          \
  X(kRecv, "recv")                          \
  X(kMeasureLatency, "flag_latency")

#define PYCOMM_ALGORITHMS(X) \
  X(kAuto, "auto")           \
  X(kOneShot, "one_shot")    \
  X(kTwoShot, "two_shot")    \
  X(kRing, "ring")

#define PYCOMM_ENUMERATOR(enumerator, ...) enumerator,
enum class DType : uint8_t { PYCOMM_DTYPES(PYCOMM_ENUMERATOR) };
enum class ReduceOp : uint8_t { PYCOMM_REDUCE_OPS(PYCOMM_ENUMERATOR) };
enum class Operation : uint8_t { PYCOMM_OPERATIONS(PYCOMM_ENUMERATOR) };
enum class Algorithm : uint8_t { PYCOMM_ALGORITHMS(PYCOMM_ENUMERATOR) };
#undef PYCOMM_ENUMERATOR

#define PYCOMM_ONE(...) +1
inline constexpr int kOperations = 0 PYCOMM_OPERATIONS(PYCOMM_ONE);
#undef PYCOMM_ONE

#define PYCOMM_CASE(enumerator, text, ...) \
  case Enum::enumerator:                   \
    return text;
inline const char* name_of(DType value) {
  using Enum = DType;
  switch (value) { PYCOMM_DTYPES(PYCOMM_CASE) }
  return "unknown dtype";
}
inline const char* name_of(ReduceOp value) {
  using Enum = ReduceOp;
  switch (value) { PYCOMM_REDUCE_OPS(PYCOMM_CASE) }
  return "unknown op";
}
inline const char* name_of(Operation value) {
  using Enum = Operation;
  switch (value) { PYCOMM_OPERATIONS(PYCOMM_CASE) }
  return "unknown operation";
}
inline const char* name_of(Algorithm value) {
  using Enum = Algorithm;
  switch (value) { PYCOMM_ALGORITHMS(PYCOMM_CASE) }
  return "unknown algorithm";
}
#undef PYCOMM_CASE

// Bytes of one element.
inline int64_t bytes_of(DType dtype) {
#define PYCOMM_CASE(enumerator, text, bytes) \
  case DType::enumerator:                    \
    return bytes;
  switch (dtype) { PYCOMM_DTYPES(PYCOMM_CASE) }
#undef PYCOMM_CASE
  return 0;
}

// The real type that a complex sum works in, and how many of them one element holds.
struct RealView {
  DType dtype;
  int components;
};
inline RealView real_view(DType dtype) {
  if (dtype == DType::kComplex64) return {DType::kFloat32, 2};
  if (dtype == DType::kComplex128) return {DType::kFloat64, 2};
  return {dtype, 1};
}

// Which (dtype, op) pairs can be reduced: the one table behind the checks, the kernels, the tests
// and the documentation.
PYCOMM_HOST_DEVICE constexpr bool can_reduce(DType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  switch (dtype) {
    case DType::kBool:
      return op != ReduceOp::kAvg && op != ReduceOp::kPremulSum;
    case DType::kComplex64:
    case DType::kComplex128:
      return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return !bitwise;
    default:  // integers
      return op != ReduceOp::kPremulSum;
  }
}

// Some elements in memory, of a dtype that is known otherwise.
struct ConstSpan {
  const void* data = nullptr;
  int64_t count = 0;
};
struct Span {
  void* data = nullptr;
  int64_t count = 0;
};

PYCOMM_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace pycomm
