// Tensors in a CUDA device's memory, read from Python's arguments.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "error.h"
#include "kernels/codec.h"
#include "python_tensor.h"

namespace pycomm {

// Of a kernel that no group calls.
inline const Caller kDeviceCaller{0, Operation::kAllReduce};

// Reads the tensors of a call, which all are on one device.
class DeviceReader {
 public:
  explicit DeviceReader(uintptr_t stream, const Caller& caller = kDeviceCaller)
      : stream_([stream](int) { return reinterpret_cast<void*>(stream); }), caller_(caller) {}

  TensorView read(const pybind11::handle& tensor) {
    const TensorView view = view_of(tensor, caller_, Memory::kCuda, stream_);
    if (device_ < 0) device_ = view.cuda_device;
    PYCOMM_CHECK(view.cuda_device == device_, kInvalidArgument, caller_,
                 ": tensors on CUDA devices ", device_, " and ", view.cuda_device, " together");
    return view;
  }
  int device() const { return device_; }

 private:
  const StreamOf stream_;
  const Caller caller_;
  int device_ = -1;
};

inline void* as_stream(uintptr_t stream) { return reinterpret_cast<void*>(stream); }

inline CodecCounts* read_counts(DeviceReader& reader, const pybind11::object& tensor) {
  const TensorView view = reader.read(tensor);
  PYCOMM_CHECK(view.dtype == DType::kInt64 && view.bytes() == sizeof(CodecCounts), kInvalidArgument,
               "transcode: counts are ", sizeof(CodecCounts) / sizeof(int64_t), " int64, not ",
               view.count, " ", name_of(view.dtype));
  return static_cast<CodecCounts*>(view.data);
}

}  // namespace pycomm
