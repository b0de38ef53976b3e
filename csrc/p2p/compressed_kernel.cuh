// The compressed all_reduce over peer memory in one kernel: the algorithms of
// algorithms/compressed.h, each block on a strip of the values. tests/cuda_on_cpu runs this same
// source on the CPU.
#pragma once

#include "../algorithms/compressed.h"
#include "peer_encoder.cuh"
#include "peer_slots.cuh"

namespace pycomm {

// The longest codec block that a block of threads has lanes for. Threads for longer ones would have
// fewer registers than the kernel needs.
inline constexpr int kMostPeerCodecBlock = kPeerThreads * kTranscodeLanes;

struct PeerCompressedCall {
  PeerGroup group;
  PeerCompression compression;
  int64_t count;  // of all values
};

// As all_reduce_kernel; a block has whole warps, with lanes for one codec block at least.
template <Algorithm kAlgorithm, WireFormat kFormat, class T, class Slots>
__global__ void __launch_bounds__(kPeerThreads, 1)
    compressed_kernel(const __grid_constant__ PeerCompressedCall call) {
  alignas(PeerTranscode) __shared__ char memory[sizeof(PeerTranscode)];
  Slots slots(call.group);
  const Shard strip = shard_of(call.count, static_cast<int>(gridDim.x),
                               static_cast<int>(blockIdx.x), call.compression.codec.granule());
  const PeerEncoder<kFormat, T, Slots> encoder(
      slots, call.compression, reinterpret_cast<PeerTranscode&>(memory), strip.begin);
  if constexpr (kAlgorithm == Algorithm::kOneShot)
    slots.advance(compressed_one_shot(slots, encoder, strip.count));
  else if constexpr (kAlgorithm == Algorithm::kRing)
    slots.advance(compressed_ring(slots, encoder, strip.count));
  else
    slots.advance(compressed_two_shot(slots, encoder, strip.count));
}

}  // namespace pycomm
