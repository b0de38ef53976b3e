// What a compressed all_reduce computes with in a kernel: as algorithms/encoder.h, by all threads
// of a block together. The codec is that of kernels/codec_kernel.cuh.
#pragma once

#include <cstdint>

#include "../kernels/codec_kernel.cuh"
#include "peer_layout.h"
#include "peer_math.cuh"

namespace pycomm {

// One rank's part of it; see encoder.h: Compression. Pointers are to device memory.
struct PeerCompression {
  Codec codec;
  DeviceSpans tensors;
  float factor;
  float divisor;
  float* residual;
  CodecCounts* counts;
  uint64_t seed;
  bool infinite;
  bool stochastic;
};

// A call in the making, in memory that the block's threads share.
struct PeerTranscode {
  DeviceTranscodeCall call;
  TranscodeShared shared;
};

// The call's wires: the first thread writes them, and all count them.
class PeerWires {
 public:
  __device__ explicit PeerWires(Wire* list) : list_(list) {}
  __device__ void clear() { count_ = 0; }
  __device__ void push_back(const Wire& wire) {
    if (threadIdx.x == 0) list_[count_] = wire;
    ++count_;
  }
  __device__ int size() const { return count_; }

 private:
  Wire* list_;
  int count_ = 0;
};

// `begin`: the number among all values of the first that this block works on; the algorithm counts
// from there. An operation that has failed touches no more memory.
template <WireFormat kFormat, class T, class Slots>
class PeerEncoder {
 public:
  __device__ PeerEncoder(const Slots& slots, const PeerCompression& compression,
                         PeerTranscode& transcode, int64_t begin)
      : slots_(slots), compression_(compression), transcode_(transcode), begin_(begin) {
    if (threadIdx.x != 0) return;
    DeviceTranscodeCall& call = transcode_.call;
    call.inputs = call.outputs = compression.tensors;
    call.counts = compression.counts;
    call.seed = compression.seed;
    call.factor = compression.factor;
    call.block = compression.codec.block;
    call.infinite = compression.infinite;
    call.stochastic = compression.stochastic;
  }

  __device__ Codec codec() const { return {kFormat, compression_.codec.block}; }
  __device__ int64_t capacity(int64_t bytes) const { return codec().capacity(bytes); }
  __device__ PeerWires wires() const { return PeerWires(transcode_.call.wires); }
  __device__ Place place(char* memory, int64_t capacity, int64_t begin) const {
    return place_of(codec(), memory, capacity, begin);
  }
  __device__ Wire wire(const char* memory, int64_t capacity, int64_t begin) const {
    const Place there = place(const_cast<char*>(memory), capacity, begin);
    return {there.values, there.scales};
  }

  __device__ void encode(int64_t first, int64_t count, const Place& to) const {
    run(0, 0, first, count, to, false);
  }
  __device__ void reduce(const PeerWires& others, int own, int64_t first, int64_t count,
                         const Place& to, bool finished) const {
    run(others.size(), own, first, count, to, finished);
  }
  __device__ void decode(const Wire& wire, int64_t first, int64_t count) const {
    __syncthreads();  // the call before has read its wires
    wires().push_back(wire);
    run(1, -1, first, count, {}, true, 1);
  }
  __device__ void sum(const PeerWires& wires, int64_t first, int64_t count) const {
    run(wires.size(), -1, first, count, {}, true);
  }
  __device__ void pass_on(const char* from, char* to, int64_t capacity, int64_t count) const {
    if (slots_.failed()) return;
    const int64_t scales = codec().scales_offset(capacity);
    copy_by_block<uint8_t>(to, from, count * codec().value_bytes());
    copy_by_block<float>(to + scales, from + scales, codec().scales(count));
  }

 private:
  __device__ void run(int num_wires, int own, int64_t first, int64_t count, const Place& to,
                      bool finished) const {
    run(num_wires, own, first, count, to, finished, finished ? compression_.divisor : 1);
  }
  // The call with what changes from one to the next.
  __device__ void run(int num_wires, int own, int64_t first, int64_t count, const Place& to,
                      bool finished, float divisor) const {
    if (slots_.failed() || count <= 0) return;
    __syncthreads();  // the call before is done
    if (threadIdx.x == 0) {
      DeviceTranscodeCall& call = transcode_.call;
      call.count = count;
      call.first = begin_ + first;
      call.num_wires = num_wires;
      call.own = own;
      call.residual =
          own >= 0 && compression_.residual ? compression_.residual + call.first : nullptr;
      call.values = to.values;
      call.scales = to.scales;
      call.divisor = divisor;
      call.outputs.count = finished ? compression_.tensors.count : 0;
    }
    __syncthreads();
    work(transcode_);
  }
  // Once in a kernel, whoever calls.
  __device__ __attribute__((noinline)) static void work(PeerTranscode& transcode) {
    transcode_part<kFormat, T>(transcode.call, transcode.shared, 0, 1);
  }

  const Slots& slots_;
  const PeerCompression& compression_;
  PeerTranscode& transcode_;
  const int64_t begin_;
};

}  // namespace pycomm
