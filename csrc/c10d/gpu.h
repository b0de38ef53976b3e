// CUDA streams and futures through torch's device guard: nothing here is linked with CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "../worker.h"

namespace pycomm {

// The handle of the caller's current stream on a CUDA device (index -1: the current one). Tensors
// of other devices come to a communicator of GPUs only in tests, which name the stream below.
void* current_stream(c10::Device device);
void set_stand_in_stream(void* stream);

// A future of an operation that is on its way on a CUDA device: complete already, with an event, so
// that callbacks and waits are ordered after the operation and the host goes on.
c10::intrusive_ptr<c10::ivalue::Future> future_on_stream(c10::Device device, Pending& pending,
                                                         const std::vector<at::Tensor>& outputs);

}  // namespace pycomm
