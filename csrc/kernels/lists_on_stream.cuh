// Lists of tensors as the kernels want them, copied to the device ahead of a launch.
#pragma once

#include <vector>

#include "codec_cuda.h"
#include "cuda_launch.cuh"

namespace pycomm {

// The lists of a call in device memory, which belongs to the stream.
class ListsOnStream {
 public:
  ListsOnStream(const std::vector<Span>& inputs, const std::vector<Span>& outputs,
                cudaStream_t stream)
      : stream_(stream) {
    std::vector<DeviceSpan> entries;
    const size_t first = add(inputs, entries), second = add(outputs, entries);
    if (!entries.empty()) copy(entries);
    inputs_ = spans(inputs, first);
    outputs_ = spans(outputs, second);
  }
  ~ListsOnStream() {
    if (memory_) cudaFreeAsync(memory_, stream_);  // of an error the next call will tell
  }
  ListsOnStream(const ListsOnStream&) = delete;
  ListsOnStream& operator=(const ListsOnStream&) = delete;

  const DeviceSpans& inputs() const { return inputs_; }
  const DeviceSpans& outputs() const { return outputs_; }

 private:
  // Returns where in `entries` the list begins.
  static size_t add(const std::vector<Span>& tensors, std::vector<DeviceSpan>& entries) {
    const size_t begin = entries.size();
    if (tensors.size() < 2) return begin;
    entries.resize(begin + tensors.size() + 1);
    fill_device_spans(tensors.data(), static_cast<int>(tensors.size()), entries.data() + begin);
    return begin;
  }
  void copy(const std::vector<DeviceSpan>& entries) {
    cudaStreamCaptureStatus status{};
    check_cuda(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    PYCOMM_CHECK(status == cudaStreamCaptureStatusNone, kInvalidArgument,
                 "a list of tensors cannot be captured into a graph; pass one "
                 "tensor");
    const size_t bytes = entries.size() * sizeof(DeviceSpan);
    check_cuda(cudaMallocAsync(&memory_, bytes, stream_), "memory for a list of tensors");
    // From pageable memory: the driver has its own copy when this returns.
    check_cuda(cudaMemcpyAsync(memory_, entries.data(), bytes, cudaMemcpyHostToDevice, stream_),
               "copy of a list of tensors");
  }
  DeviceSpans spans(const std::vector<Span>& tensors, size_t begin) const {
    const int count = static_cast<int>(tensors.size());
    if (count < 2) return {count, count == 1 ? tensors[0].data : nullptr, nullptr};
    return {count, nullptr, static_cast<const DeviceSpan*>(memory_) + begin};
  }

  const cudaStream_t stream_;
  void* memory_ = nullptr;
  DeviceSpans inputs_, outputs_;
};

}  // namespace pycomm
