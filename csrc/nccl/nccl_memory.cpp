#include "nccl_memory.h"

#include <algorithm>

namespace pycomm::nccl {

NcclMemory& NcclMemory::instance() {
  static auto* const instance = new NcclMemory;
  return *instance;
}

void* NcclMemory::allocate(const Apis& apis, int64_t bytes, int device, const std::string& what) {
  const DeviceGuard guard(*apis.second, device);
  void* data = nullptr;
  apis.first->check(
      apis.first->mem_alloc(&data, static_cast<size_t>(bytes)),
      concat(what, ": allocating ", bytes, " bytes on cuda:", device, " with ncclMemAlloc"));
  std::lock_guard<std::mutex> lock(mutex_);
  held_[data] = {{data, bytes, device, ++made_}, apis, {}};
  return data;
}

void NcclMemory::free(void* data) {
  Held held;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = held_.find(data);
    if (found == held_.end()) return;
    held = std::move(found->second);
    held_.erase(found);
  }
  for (const auto& weak : held.registrations)
    if (const auto registration = weak.lock()) registration->undo();
  // Called by destructors, and at the process's end, when CUDA may have gone before.
  const CudaApi& cuda = *held.apis.second;
  int before = 0;
  const bool known = cuda.get_device(&before) == kCudaSuccess;
  cuda.set_device(held.segment.device);
  held.apis.first->mem_free(data);
  if (known) cuda.set_device(before);
}

void NcclMemory::note(const void* data, const std::shared_ptr<Registration>& registration) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto after = held_.upper_bound(data);
  if (after == held_.begin()) return;
  Held& held = (--after)->second;
  if (static_cast<const char*>(data) >= static_cast<char*>(held.segment.data) + held.segment.bytes)
    return;
  auto& all = held.registrations;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }),
            all.end());
  all.push_back(registration);
}

std::vector<NcclMemory::Segment> NcclMemory::segments() const {
  std::vector<Segment> segments;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [data, held] : held_) segments.push_back(held.segment);
  }
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return a.number < b.number; });
  return segments;
}

void NcclMemory::serve_pools(Apis apis) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_pools_ = std::move(apis);
}

void* NcclMemory::allocate_for_pool(int64_t bytes, int device) {
  Apis apis;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    apis = for_pools_;
  }
  try {
    PYCOMM_CHECK(apis.first && apis.second, kError,
                 "a pool of NCCL's memory was used before pycomm.gpu_pool() was called");
    return allocate(apis, bytes, device, "a memory pool");
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_failure_ = error.what();
    return nullptr;
  }
}

std::string NcclMemory::last_failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_failure_;
}

}  // namespace pycomm::nccl

// What torch.cuda.CUDAPluggableAllocator takes by name (see pycomm/gpu_memory.py).
#define PYCOMM_EXPORT extern "C" __attribute__((visibility("default")))

PYCOMM_EXPORT void* pycomm_nccl_allocate(ssize_t bytes, int device, void*) {
  return pycomm::nccl::NcclMemory::instance().allocate_for_pool(bytes, device);
}

PYCOMM_EXPORT void pycomm_nccl_free(void* data, ssize_t, int, void*) {
  pycomm::nccl::NcclMemory::instance().free(data);
}
