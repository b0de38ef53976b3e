#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cuda/atomic>

#include "../kernels/cuda_launch.cuh"
#include "../kernels/lists_on_stream.cuh"
#include "compressed_kernel.cuh"
#include "peer_cuda.h"
#include "resident.cuh"

namespace pycomm {
namespace {

using Kernel = void (*)(PeerCompressedCall);

// What a block should have to do at least, before another one shares it.
constexpr int64_t kBlockValues = 16 << 10;

template <Algorithm kAlgorithm, WireFormat kFormat>
Kernel kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return compressed_kernel<kAlgorithm, kFormat, Half, PeerSlots>;
    case DType::kBFloat16:
      return compressed_kernel<kAlgorithm, kFormat, BFloat16, PeerSlots>;
    default:
      return compressed_kernel<kAlgorithm, kFormat, float, PeerSlots>;
  }
}
template <Algorithm kAlgorithm>
Kernel kernel_for(WireFormat format, DType dtype) {
  switch (format) {
#define PYCOMM_CASE(enumerator, ...) \
  case WireFormat::enumerator:       \
    return kernel_for<kAlgorithm, WireFormat::enumerator>(dtype);
    PYCOMM_WIRE_FORMATS(PYCOMM_CASE)
#undef PYCOMM_CASE
  }
  return nullptr;  // not reached: check(codec) knows all formats
}
Kernel kernel_for(Algorithm algorithm, WireFormat format, DType dtype) {
  switch (algorithm) {
    case Algorithm::kOneShot:
      return kernel_for<Algorithm::kOneShot>(format, dtype);
    case Algorithm::kRing:
      return kernel_for<Algorithm::kRing>(format, dtype);
    default:
      return kernel_for<Algorithm::kTwoShot>(format, dtype);
  }
}

}  // namespace

void check_peer_compression(const PeerGroup& group, const PeerCompressionCall& call) {
  check_peer_group(group);
  check(call.codec);
  PYCOMM_CHECK(can_transcode(call.dtype), kInvalidArgument,
               "only float32, float16 and bfloat16 are compressed, not ", name_of(call.dtype));
  PYCOMM_CHECK(call.codec.block <= kMostPeerCodecBlock, kInvalidArgument,
               "compressed all_reduce in peer memory: up to ", kMostPeerCodecBlock,
               " values share a scale, not ", call.codec.block);
  // The ring's part of a slot, which is the smallest.
  const int64_t bytes = group.layout.slot_bytes / 2;
  PYCOMM_CHECK(call.codec.capacity(bytes) > 0, kInvalidArgument,
               "compressed all_reduce in peer memory: slots of ", group.layout.slot_bytes,
               " bytes are too small for twice ", call.codec.granule(), " values of ",
               name_of(call.codec.format));
}

void launch_peer_compressed(const PeerGroup& group, Algorithm algorithm,
                            const PeerCompressionCall& call, void* stream) {
  check_peer_compression(group, call);
  PeerCompressedCall device_call{};
  for (const Span& tensor : call.tensors) device_call.count += tensor.count;
  if (device_call.count == 0) return;
  const ListsOnStream lists(call.tensors, {}, static_cast<cudaStream_t>(stream));
  device_call.group = group;
  device_call.compression = {call.codec,   lists.inputs(), call.factor,
                             call.divisor, call.residual,  call.counts,
                             call.seed,    call.infinite,  call.stochastic};
  const int64_t wanted = (device_call.count + kBlockValues - 1) / kBlockValues;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, group.layout.blocks));
  const Kernel kernel = kernel_for(algorithm, call.codec.format, call.dtype);
  check_resident(kernel, static_cast<int>(blocks), kPeerThreads, "compressed all_reduce");
  kernel<<<blocks, kPeerThreads, 0, static_cast<cudaStream_t>(stream)>>>(device_call);
  check_cuda(cudaGetLastError(), "launch of compressed_kernel");
}

}  // namespace pycomm
