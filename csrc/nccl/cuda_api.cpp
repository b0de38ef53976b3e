#include "cuda_api.h"

#include <dlfcn.h>

#include "library.h"
#include "nccl_api.h"

namespace pycomm::nccl {
std::shared_ptr<const CudaApi> CudaApi::load(const std::string& path,
                                             const std::vector<std::string>& candidates) {
  auto api = std::make_shared<CudaApi>();
  // Of several that are loaded any: each carries the state of its own version only, and the devices
  // are the driver's.
  api->path_ = find_library(path, loaded_libraries("libcudart.so"), candidates);
  PYCOMM_CHECK(!api->path_.empty(), kError,
               "no CUDA runtime is loaded in this process. Install a CUDA build of torch, or set "
               "PYCOMM_CUDART_LIB to libcudart.so.");
  void* library = open_library(api->path_, "the CUDA runtime");
#define PYCOMM_FIND(member, symbol, parameters)                                   \
  api->member = reinterpret_cast<decltype(api->member)>(dlsym(library, #symbol)); \
  PYCOMM_CHECK(api->member, kError, api->path_,                                   \
               " has no function " #symbol ": it is no CUDA runtime, or an old one");
  PYCOMM_CUDA_FUNCTIONS(PYCOMM_FIND)
#undef PYCOMM_FIND
  api->get_error_string =
      reinterpret_cast<decltype(api->get_error_string)>(dlsym(library, "cudaGetErrorString"));
  PYCOMM_CHECK(api->get_error_string, kError, api->path_, " has no cudaGetErrorString");
  return api;
}

void CudaApi::check(int result, const char* call) const {
  if (__builtin_expect(result == kCudaSuccess, 1)) return;
  get_last_error();  // so that the next caller does not take it for its own
  throw Error(ErrorKind::kNccl,
              concat(call, " failed with CUDA error ", result, ", ", get_error_string(result), ". ",
                     advice_for(Result::kUnhandledCudaError)));
}

int CudaApi::devices() const {
  int count = 0;
  const int result = get_device_count(&count);
  if (result != kCudaSuccess) get_last_error();
  PYCOMM_CHECK(result == kCudaSuccess && count > 0, kError, "no GPU can be used: ",
               result == kCudaSuccess ? "none is visible" : get_error_string(result),
               " (CUDA error ", result,
               "). Install a driver that is new enough (nvidia-smi shows it), look at "
               "CUDA_VISIBLE_DEVICES, or use CPU tensors.");
  return count;
}

EventPool::~EventPool() {
  if (abandoned_) return;
  for (const Event event : free_) cuda_->event_destroy(event);
}

std::shared_ptr<void> EventPool::take() {
  Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (!event)
    cuda_->check(cuda_->event_create_with_flags(&event, kEventDisableTiming),
                 "cudaEventCreateWithFlags");
  return {event, [pool = shared_from_this()](void* used) { pool->give_back(used); }};
}

void EventPool::give_back(Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(event);
}

}  // namespace pycomm::nccl
