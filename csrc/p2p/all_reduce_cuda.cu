#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cuda/atomic>

#include "../kernels/cuda_launch.cuh"
#include "all_reduce_kernel.cuh"
#include "peer_cuda.h"
#include "resident.cuh"

namespace pycomm {
namespace {

using Kernel = void (*)(PeerReduceCall);

// What a block should have to do at least, before another one shares it.
constexpr int64_t kBlockBytes = 16 << 10;

template <Algorithm kAlgorithm>
Kernel kernel_for(DType dtype) {
  switch (dtype) {
#define PYCOMM_CASE(enumerator, T) \
  case DType::enumerator:          \
    return all_reduce_kernel<kAlgorithm, DType::enumerator, T, PeerSlots>;
    PYCOMM_REDUCED_TYPES(PYCOMM_CASE)
#undef PYCOMM_CASE
    default:
      return nullptr;  // not reached: can_reduce knows all types
  }
}
Kernel kernel_for(Algorithm algorithm, DType dtype) {
  switch (algorithm) {
    case Algorithm::kOneShot:
      return kernel_for<Algorithm::kOneShot>(dtype);
    case Algorithm::kRing:
      return kernel_for<Algorithm::kRing>(dtype);
    default:
      return kernel_for<Algorithm::kTwoShot>(dtype);
  }
}

}  // namespace

// Their launch bounds let each of them have a multiprocessor for a block.
int resident_peer_blocks() { return processors(); }

void check_peer_group(const PeerGroup& group) {
  const PeerLayout& layout = group.layout;
  PYCOMM_CHECK(group.world_size >= 1 && group.world_size <= kMostPeers, kInvalidArgument,
               "peer memory holds 1 to ", kMostPeers, " ranks, not ", group.world_size);
  PYCOMM_CHECK(group.rank >= 0 && group.rank < group.world_size, kInvalidArgument, "rank ",
               group.rank, " of ", group.world_size, " in peer memory");
  PYCOMM_CHECK(layout.blocks >= 1 && layout.slots >= kFewestPeerSlots &&
                   (layout.slots & (layout.slots - 1)) == 0 &&
                   layout.slot_bytes >= kLeastPeerSlotBytes &&
                   layout.slot_bytes % PeerLayout::kPartBytes == 0,
               kInvalidArgument, "peer memory of ", layout.blocks, " blocks with ", layout.slots,
               " slots of ", layout.slot_bytes, " bytes: slots are a power of two, at least ",
               kFewestPeerSlots, ", of at least ", kLeastPeerSlotBytes, " bytes, a multiple of ",
               PeerLayout::kPartBytes);
  PYCOMM_CHECK(group.status && group.most_polls > 0, kInvalidArgument, "peer memory of rank ",
               group.rank, " needs a status and a bound for its waits");
}

void launch_peer_all_reduce(const PeerGroup& group, Algorithm algorithm, DType dtype, ReduceOp op,
                            const void* input, void* output, int64_t count, void* stream,
                            const double* scales) {
  check_peer_group(group);
  PYCOMM_CHECK(can_reduce(dtype, op), kInvalidArgument, "all_reduce in peer memory: dtype ",
               name_of(dtype), " has no op ", name_of(op));
  PYCOMM_CHECK(op != ReduceOp::kPremulSum || scales, kInvalidArgument,
               "all_reduce in peer memory: premul_sum needs a scale for each rank");
  const RealView real = real_view(dtype);
  PeerReduceCall call{};
  call.group = group;
  call.type.op = op;
  if (scales) std::copy(scales, scales + group.world_size, call.type.scales);
  call.input = static_cast<const char*>(input);
  call.output = static_cast<char*>(output);
  call.count = count * real.components;
  if (call.count == 0) return;
  const int64_t element = bytes_of(real.dtype);
  PYCOMM_CHECK((reinterpret_cast<uintptr_t>(input) | reinterpret_cast<uintptr_t>(output)) %
                       static_cast<uintptr_t>(element) ==
                   0,
               kInvalidArgument, "all_reduce in peer memory: tensors of ", name_of(dtype),
               " must be aligned to ", element, " bytes");
  const int64_t wanted = (call.count * element + kBlockBytes - 1) / kBlockBytes;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, group.layout.blocks));
  const Kernel kernel = kernel_for(algorithm, real.dtype);
  check_resident(kernel, static_cast<int>(blocks), kPeerThreads, "all_reduce");
  kernel<<<blocks, kPeerThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  check_cuda(cudaGetLastError(), "launch of all_reduce_kernel");
}

}  // namespace pycomm
