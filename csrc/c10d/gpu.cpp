#include "gpu.h"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

namespace pycomm {
namespace {

std::atomic<void*> stand_in_stream{nullptr};

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

}  // namespace

void set_stand_in_stream(void* stream) { stand_in_stream.store(stream); }

void* current_stream(c10::Device device) {
  if (!device.is_cuda()) return stand_in_stream.load();
  if (!device.has_index()) device = cuda().getDevice();
  return cuda().getStream(device).native_handle();
}

// The event is of a stream of torch's that only waits for the operation.
c10::intrusive_ptr<c10::ivalue::Future> future_on_stream(c10::Device device, Pending& pending,
                                                         const std::vector<at::Tensor>& outputs) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
  const c10::Stream side = cuda().getStreamFromGlobalPool(device, true);
  pending.order(side.native_handle());
  const c10::StreamGuard guard(side);
  future->markCompleted(c10::IValue(outputs));
  return future;
}

}  // namespace pycomm
