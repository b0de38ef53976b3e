// Host launchers of the kernels over peer memory. Every rank makes the same calls in the same
// order, each on a stream (a cudaStream_t) of its device, with the same layout, counts and types.
#pragma once

#include <cstdint>
#include <vector>

#include "../algorithms/compression.h"
#include "../common.h"
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

// Throws kInvalidArgument for what the launcher refuses; asks no device.
void check_peer_compression(const PeerGroup& group, const Compression& call);
// Tensors = the reduction of all ranks' tensors, which travel encoded. Pointers are to device
// memory; `counts` is added to atomically. Of several tensors, what the kernel
// finds them by is copied ahead of it, which a stream that is being captured cannot do.
void launch_peer_compressed(const PeerGroup& group, Algorithm algorithm, const Compression& call,
                            void* stream);

}  // namespace pycomm
