// How an element type travels with NCCL, and what it knows of the reduce operations: the mapping of
// the table in common.h.
#pragma once

#include <string>

#include "../common.h"
#include "nccl_api.h"

namespace pycomm::nccl {

struct Wire {
  DataType type;
  int per_element;  // NCCL's elements in one of ours
};
// To be moved only: every type can be.
Wire to_move(DType dtype);

struct Reduction {
  Wire wire;
  RedOp op;
  bool scaled = false;  // op is to be made, of the rank's factor
};
// Throws InvalidArgument for what NCCL cannot reduce; `what` begins the message.
Reduction to_reduce(DType dtype, ReduceOp op, const NcclApi& api, const std::string& what);

// A factor as an element of the type, for ncclRedOpCreatePreMulSum.
struct Scalar {
  alignas(8) unsigned char bytes[8];
};
Scalar to_scalar(double value, DataType type);

}  // namespace pycomm::nccl
