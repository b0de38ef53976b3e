// transcode() (kernels/codec.h) in a stream's order.
#pragma once

#include <memory>
#include <vector>

#include "../kernels/codec.h"
#include "cuda_api.h"

namespace pycomm::nccl {

class DeviceCodec {
 public:
  virtual ~DeviceCodec() = default;
  // Enqueues it. `tensors` are what the call's inputs and outputs, where it has them, point to.
  virtual void run(const TranscodeCall& call, const std::vector<FloatSpan>& tensors,
                   Stream stream) = 0;
};

// By the CUDA kernel; null in a build without CUDA.
std::shared_ptr<DeviceCodec> kernel_codec();
// By the CPU, when the stream comes to it, on memory that it can read: for tests.
std::shared_ptr<DeviceCodec> host_codec(std::shared_ptr<const CudaApi> cuda);

}  // namespace pycomm::nccl
