// Any Python tensor (torch, numpy, or whatever speaks DLPack) as pointer, count and dtype.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <ostream>

#include "common.h"
#include "recorder.h"

namespace pycomm {

struct TensorView {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  Shape shape;
  int cuda_device = -1;  // -1: in memory that the CPU reads

  int64_t bytes() const { return count * bytes_of(dtype); }
};

// Who calls, for the beginning of an error message; text is only made when there is an error.
struct Caller {
  int rank;
  Operation operation;
};
std::ostream& operator<<(std::ostream& stream, const Caller& caller);

// Raises InvalidArgument for a tensor that is not on the CPU, not contiguous (row-major), or of an
// unknown dtype. The view is valid while the object lives.
TensorView view_of(const pybind11::handle& object, const Caller& caller);

// The same for a tensor in a CUDA device's memory, whose address must be a multiple of its
// elements' size. `stream` is the one that will work on it, for libraries that hand tensors over in
// stream order; torch's tensors are the caller's to order.
TensorView cuda_view_of(const pybind11::handle& object, const Caller& caller, uintptr_t stream);

}  // namespace pycomm
