// all_reduce over peer memory in one kernel: the algorithms of algorithms/*.h, each block on a
// strip of the tensor. tests/cuda_on_cpu runs this same source on the CPU.
#pragma once

#include "../algorithms/one_shot.h"
#include "../algorithms/ring.h"
#include "../algorithms/two_shot.h"
#include "peer_math.cuh"
#include "peer_slots.cuh"

namespace pycomm {

struct PeerReduceCall {
  PeerGroup group;
  PeerReductionType type;
  const char* input;
  char* output;  // may be the input
  int64_t count;
};

// The grid is the same on all ranks, all its blocks are resident, and a block has a thread for each
// rank. The operation is looked up where a chunk is reduced: a kernel for each would take nvcc
// minutes.
template <Algorithm kAlgorithm, DType kDType, class T, class Slots>
__global__ void __launch_bounds__(kPeerThreads, 1)
    all_reduce_kernel(const __grid_constant__ PeerReduceCall call) {
  Slots slots(call.group);
  const PeerMath<kDType, T, Slots> math(slots, call.type);
  const Shard strip = shard_of(call.count, static_cast<int>(gridDim.x),
                               static_cast<int>(blockIdx.x), math.granule());
  const int64_t offset = strip.begin * math.element_bytes();
  const char* input = call.input + offset;
  char* output = call.output + offset;
  if constexpr (kAlgorithm == Algorithm::kOneShot)
    slots.advance(one_shot_all_reduce(slots, math, input, output, strip.count));
  else if constexpr (kAlgorithm == Algorithm::kRing)
    slots.advance(ring_all_reduce(slots, math, input, output, strip.count));
  else
    slots.advance(two_shot_all_reduce(slots, math, input, output, strip.count));
}

}  // namespace pycomm
