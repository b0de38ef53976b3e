// Host launchers of the kernels over peer memory. Every rank makes the same calls in the same
// order, each on a stream (a cudaStream_t) of its device, with the same layout, counts and types.
#pragma once

#include <cstdint>
#include <vector>

#include "../common.h"
#include "../kernels/codec.h"
#include "peer_layout.h"

namespace pycomm {

// The blocks that a rank's device holds of any of these kernels at once: layout.blocks may be at
// most the least of all ranks', divided by the ranks that share a device.
int resident_peer_blocks();

// Throws kInvalidArgument for a group that the kernels cannot work with.
void check_peer_group(const PeerGroup& group);

// output = the reduction of all ranks' inputs, which may be in the same place. `scales`: every
// rank's, of kPremulSum. kAuto is two_shot.
void launch_peer_all_reduce(const PeerGroup& group, Algorithm algorithm, DType dtype, ReduceOp op,
                            const void* input, void* output, int64_t count, void* stream,
                            const double* scales = nullptr);

// One rank's part of a compressed all_reduce; see encoder.h: Compression. Pointers are to device
// memory; `counts` is added to atomically.
struct PeerCompressionCall {
  Codec codec;
  DType dtype = DType::kFloat32;
  std::vector<Span> tensors;  // read, and overwritten with the result
  float factor = 1;
  float divisor = 1;
  float* residual = nullptr;
  CodecCounts* counts = nullptr;
  uint64_t seed = 0;
  bool infinite = false, stochastic = false;
};
// Throws kInvalidArgument for what the launcher refuses; asks no device.
void check_peer_compression(const PeerGroup& group, const PeerCompressionCall& call);
// Tensors = the reduction of all ranks' tensors, which travel encoded. Of several, what the kernel
// finds them by is copied ahead of it, which a stream that is being captured cannot do.
void launch_peer_compressed(const PeerGroup& group, Algorithm algorithm,
                            const PeerCompressionCall& call, void* stream);

}  // namespace pycomm
