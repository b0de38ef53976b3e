// Any Python tensor (torch, numpy, or whatever speaks DLPack) as pointer, count and dtype.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
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

// Where a call works.
enum class Memory { kCpu, kCuda, kAny };
// The handle of the stream that will work on a device's tensors.
using StreamOf = std::function<void*(int device)>;

// Raises InvalidArgument for a tensor that is elsewhere, not contiguous (row-major), or of an
// unknown dtype; on a CUDA device also where its address is no multiple of its elements' size. The
// view is valid while the object lives. `stream`, needed beyond the CPU, is for libraries that hand
// tensors over in stream order; torch's tensors are the caller's to order.
TensorView view_of(const pybind11::handle& object, const Caller& caller,
                   Memory memory = Memory::kCpu, const StreamOf& stream = {});

}  // namespace pycomm
