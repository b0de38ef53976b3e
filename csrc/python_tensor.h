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
// With `gpu`, memory of any device is taken: the communicator looks where it is.
TensorView view_of(const pybind11::handle& object, const Caller& caller, bool gpu = false);

}  // namespace pycomm
