// What an algorithm computes with: the element type and operation of one collective, bound to the
// CPU kernels.
#pragma once

#include <cstdint>

#include "../common.h"
#include "../kernels/dispatch.h"
#include "../kernels/elementwise.h"

namespace pycomm {

class Math {
 public:
  // `stream`: write slots past the caches. A complex type is computed as pairs of its real type.
  // `scales`: every rank's, of kPremulSum, and `rank`, whose own contribution a step of a ring
  // adds.
  Math(DType dtype, ReduceOp op, int world_size, bool stream, const double* scales = nullptr,
       int rank = 0)
      : dtype_(real_view(dtype).dtype),
        op_(op),
        world_size_(world_size),
        stream_(stream),
        scales_(scales),
        rank_(rank) {}

  int64_t element_bytes() const { return bytes_of(dtype_); }
  int64_t partial_bytes() const { return accumulator_bytes(dtype_, op_); }
  // Elements in a cache line: shards begin at multiples of it, so that ranks never write the same
  // line.
  int64_t granule() const { return static_cast<int64_t>(kLineBytes) / element_bytes(); }

  void copy_to_slot(char* slot, const char* source, int64_t count) const {
    copy(slot, source, count * element_bytes(), stream_);
  }
  void copy_to_output(char* output, const char* source, int64_t count) const {
    if (output != source) copy(output, source, count * element_bytes(), stream_output_);
  }
  // Whether outputs, too, are written past the caches: for moved data that would not stay in them.
  void set_stream_output(bool stream) { stream_output_ = stream; }

  // slot (may be null) = output = the sum of world_size contributions, in rank order.
  void reduce_all(const char* const* sources, char* slot, char* output, int64_t count) const {
    ReduceCall call = base(count);
    call.sources = reinterpret_cast<const void* const*>(sources);
    call.num_sources = world_size_;
    call.scales = scales_;
    call.slot = slot;
    call.stream_to_slot = slot && stream_;
    call.output = output;
    reduce(call);
  }

  // The same for an output alone.
  void reduce_to_output(const char* const* sources, char* output, int64_t count) const {
    const bool aligned = reinterpret_cast<uintptr_t>(output) % kLineBytes == 0;
    ReduceCall call = base(count);
    call.sources = reinterpret_cast<const void* const*>(sources);
    call.num_sources = world_size_;
    call.scales = scales_;
    call.stream_to_slot = stream_output_ && aligned;
    (call.stream_to_slot ? call.slot : call.output) = output;
    reduce(call);
  }

  // One step along a ring: partial (null at rank 0) op contribution -> `next_partial`, or the
  // finished result.
  void reduce_partial(const char* partial, const char* contribution, char* next_partial,
                      int64_t count) const {
    step(partial, contribution, next_partial, nullptr, true, count);
  }
  void reduce_final(const char* partial, const char* contribution, char* slot, char* output,
                    int64_t count) const {
    step(partial, contribution, slot, output, false, count);
  }

 private:
  ReduceCall base(int64_t count) const {
    ReduceCall call;
    call.dtype = dtype_;
    call.op = op_;
    call.divisor = world_size_;
    call.count = count;
    return call;
  }
  void step(const char* partial, const char* contribution, char* slot, char* output,
            bool leave_partial, int64_t count) const {
    const void* sources[2] = {partial ? partial : contribution, contribution};
    const double own = scales_ ? scales_[rank_] : 1;
    const double scales[2] = {own, own};  // the first counts only if it is not a partial
    ReduceCall call = base(count);
    call.sources = sources;
    call.scales = scales_ ? scales : nullptr;
    call.num_sources = partial ? 2 : 1;
    call.first_is_partial = partial != nullptr;
    call.leave_partial = leave_partial;
    call.slot = slot;
    call.stream_to_slot = stream_;
    call.output = output;
    reduce(call);
  }

  DType dtype_;
  ReduceOp op_;
  int world_size_;
  bool stream_;
  bool stream_output_ = false;
  const double* scales_;
  int rank_;
};

}  // namespace pycomm
