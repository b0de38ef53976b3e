// Host launcher of the codec kernel (codec.h's transcode() on CUDA).
#pragma once

#include <cstdint>
#include <vector>

#include "codec.h"

namespace pycomm {

// A tensor in device memory, as the kernel finds it: where it is, and the number that its first
// element has among all elements of the list.
struct DeviceSpan {
  void* data;
  int64_t begin;
};
// Tensors that lie one behind the other in a common numbering, as TranscodeCall's are. Of one
// alone, `data`; of several `list`, in device memory: as fill_device_spans makes it.
struct DeviceSpans {
  int count = 0;
  void* data = nullptr;
  const DeviceSpan* list = nullptr;
};

// Writes what belongs into a DeviceSpans' list, count + 1 entries, the last of which ends the last
// tensor. The caller copies it to the device, once for as long as the tensors stay where they are.
inline void fill_device_spans(const Span* spans, int count, DeviceSpan* list) {
  int64_t begin = 0;
  for (int at = 0; at < count; ++at) {
    list[at] = {spans[at].data, begin};
    begin += spans[at].count;
  }
  list[count] = {nullptr, begin};
}

// Throws kInvalidArgument for a call that the launcher refuses; asks no device.
void check_launch(const TranscodeCall& call);

// transcode(call) on a stream (a cudaStream_t), in one launch however many tensors there are. All
// pointers in `call` are device memory, wires and values aligned to 16 bytes, but for the array of
// wires, which is read before this returns; `inputs` and `outputs` stand in place of the call's
// own, which are not looked at, and may be empty. `counts` is added to atomically.
void launch_transcode(const TranscodeCall& call, const DeviceSpans& inputs,
                      const DeviceSpans& outputs, void* stream);

// The same with lists on the host, read before this returns. Of several tensors, what the kernel
// finds them by is copied ahead of it, on the stream, into memory that the stream takes and gives
// back; nothing waits for the device. A stream that is being captured cannot do that: use the
// function above.
void launch_transcode(const TranscodeCall& call, const std::vector<Span>& inputs,
                      const std::vector<Span>& outputs, void* stream);

}  // namespace pycomm
