// The few CUDA runtime functions that ordering operations on streams takes, as a table filled at
// run time, so that pycomm loads where there is no CUDA, and tests put their own in its place.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../error.h"
#include "nccl_types.h"

namespace pycomm::nccl {

// X(member, symbol, parameters), all returning cudaError_t
#define PYCOMM_CUDA_FUNCTIONS(X)                                                         \
  X(get_device, cudaGetDevice, (int*))                                                   \
  X(set_device, cudaSetDevice, (int))                                                    \
  X(get_device_count, cudaGetDeviceCount, (int*))                                        \
  X(stream_create_with_priority, cudaStreamCreateWithPriority, (Stream*, unsigned, int)) \
  X(stream_priority_range, cudaDeviceGetStreamPriorityRange, (int*, int*))               \
  X(stream_destroy, cudaStreamDestroy, (Stream))                                         \
  X(stream_wait_event, cudaStreamWaitEvent, (Stream, Event, unsigned))                   \
  X(stream_is_capturing, cudaStreamIsCapturing, (Stream, int*))                          \
  X(exchange_capture_mode, cudaThreadExchangeStreamCaptureMode, (int*))                  \
  X(event_create_with_flags, cudaEventCreateWithFlags, (Event*, unsigned))               \
  X(event_record, cudaEventRecord, (Event, Stream))                                      \
  X(event_query, cudaEventQuery, (Event))                                                \
  X(event_destroy, cudaEventDestroy, (Event))                                            \
  X(memcpy_async, cudaMemcpyAsync, (void*, const void*, size_t, int, Stream))            \
  X(malloc, cudaMalloc, (void**, size_t))                                                \
  X(free, cudaFree, (void*))                                                             \
  X(malloc_host, cudaMallocHost, (void**, size_t))                                       \
  X(free_host, cudaFreeHost, (void*))                                                    \
  X(pointer_get_attributes, cudaPointerGetAttributes, (PointerAttributes*, const void*)) \
  X(get_last_error, cudaGetLastError, ())

class CudaApi {
 public:
  // As NcclApi::load, of libcudart.
  static std::shared_ptr<const CudaApi> load(const std::string& path,
                                             const std::vector<std::string>& candidates);

#define PYCOMM_MEMBER(member, symbol, parameters) int(*member) parameters = nullptr;
  PYCOMM_CUDA_FUNCTIONS(PYCOMM_MEMBER)
#undef PYCOMM_MEMBER
  const char* (*get_error_string)(int) = nullptr;

  const std::string& path() const { return path_; }
  // Throws NcclError with CUDA's words for the result.
  void check(int result, const char* call) const;
  // How many devices there are. Throws Error in words where there is no driver, or too old a one.
  int devices() const;

 private:
  std::string path_;
};

// Makes a device the calling thread's for a while.
class DeviceGuard {
 public:
  DeviceGuard(const CudaApi& cuda, int device) : cuda_(cuda) {
    cuda_.check(cuda_.get_device(&before_), "cudaGetDevice");
    if (before_ != device) cuda_.check(cuda_.set_device(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cuda_.set_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const CudaApi& cuda_;
  int before_ = 0;
  bool changed_ = false;
};

// The events of one device, used again and again.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<const CudaApi> cuda) : cuda_(std::move(cuda)) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Its device must be the current one. It comes back when the pointer goes.
  std::shared_ptr<void> take();
  // From now on events are left to the process's end.
  void abandon() { abandoned_ = true; }

 private:
  void give_back(Event event);

  const std::shared_ptr<const CudaApi> cuda_;
  std::atomic<bool> abandoned_{false};
  std::mutex mutex_;
  std::vector<Event> free_;
};

}  // namespace pycomm::nccl
