#include "wire.h"

#include <cmath>
#include <cstring>

#include "../kernels/isa.h"

namespace pycomm::nccl {
namespace {

template <class T>
Scalar pack(T value) {
  Scalar scalar{};
  std::memcpy(scalar.bytes, &value, sizeof value);
  return scalar;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return DataType::kInt8;
    case DType::kInt32:
      return DataType::kInt32;
    case DType::kUInt32:
      return DataType::kUInt32;
    case DType::kInt64:
      return DataType::kInt64;
    case DType::kUInt64:
      return DataType::kUInt64;
    case DType::kFloat16:
      return DataType::kFloat16;
    case DType::kBFloat16:
      return DataType::kBFloat16;
    case DType::kFloat32:
    case DType::kComplex64:
      return DataType::kFloat32;
    case DType::kFloat64:
    case DType::kComplex128:
      return DataType::kFloat64;
    case DType::kFloat8E4M3:
      return DataType::kFloat8E4M3;
    case DType::kFloat8E5M2:
      return DataType::kFloat8E5M2;
    default:  // uint8, bool
      return DataType::kUInt8;
  }
}

bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// Truth values are 0 and 1: the sum is true where any is, the product where all are.
RedOp op_of_bool(ReduceOp op, const std::string& what) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return kMax;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return kMin;
    default:
      throw Error(ErrorKind::kInvalidArgument,
                  concat(what, ": NCCL has no bitwise operations, so op '", pycomm::name_of(op),
                         "' of bool cannot be done on a GPU; reduce integers by 'sum' and take "
                         "the lowest bit"));
  }
}

}  // namespace

Wire to_move(DType dtype) {
  if (dtype == DType::kInt16 || dtype == DType::kUInt16) return {DataType::kUInt8, 2};
  if (is_float8(dtype)) return {DataType::kUInt8, 1};  // also where NCCL does not know the type
  return {type_of(dtype), real_view(dtype).components};
}

Reduction to_reduce(DType dtype, ReduceOp op, const NcclApi& api, const std::string& what) {
  PYCOMM_CHECK(dtype != DType::kInt16 && dtype != DType::kUInt16, kInvalidArgument, what,
               ": NCCL has no 16-bit integers, so they can be moved but not reduced on a GPU; "
               "convert to int32");
  if (is_float8(dtype)) api.require(pycomm::nccl::kFloat8, what + ": reducing 8-bit floats");
  const Wire wire{type_of(dtype), real_view(dtype).components};
  if (dtype == DType::kBool) return {wire, op_of_bool(op, what)};
  switch (op) {
    case ReduceOp::kSum:
      return {wire, kSum};
    case ReduceOp::kAvg:
      return {wire, kAvg};
    case ReduceOp::kMin:
      return {wire, kMin};
    case ReduceOp::kMax:
      return {wire, kMax};
    case ReduceOp::kProduct:
      return {wire, kProd};
    case ReduceOp::kPremulSum:
      PYCOMM_CHECK(!is_float8(dtype), kInvalidArgument, what,
                   ": NCCL would round the factor to 8 bits; scale the tensor instead");
      return {wire, kSum, true};
    default:
      throw Error(ErrorKind::kInvalidArgument,
                  concat(what, ": NCCL has no bitwise operations, so op '", pycomm::name_of(op),
                         "' cannot be done on a GPU"));
  }
}

Scalar to_scalar(double value, DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return pack(float_to_half(static_cast<float>(value)));
    case DataType::kBFloat16:
      return pack(to_bfloat16(static_cast<float>(value)));
    case DataType::kFloat32:
      return pack(static_cast<float>(value));
    default:  // no other type has the operation
      return pack(value);
  }
}

}  // namespace pycomm::nccl
