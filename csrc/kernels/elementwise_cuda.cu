#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda_launch.cuh"
#include "elementwise_cuda.h"
#include "elementwise_kernel.cuh"

namespace pycomm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;

int blocks_for(int64_t count) {
  const int64_t wanted = (count + kThreads - 1) / kThreads;
  return static_cast<int>(std::min<int64_t>(wanted, int64_t{processors()} * kBlocksPerProcessor));
}

}  // namespace

void launch_reduce(DType dtype, ReduceOp op, const void* const* sources, int num_sources,
                   void* output, int64_t count, void* stream, const double* scales) {
  PYCOMM_CHECK(num_sources >= 1 && num_sources <= kMaxDeviceSources, kInvalidArgument,
               "reduce on CUDA takes 1 to ", kMaxDeviceSources, " sources, not ", num_sources);
  PYCOMM_CHECK(op != ReduceOp::kPremulSum || scales, kInvalidArgument,
               "reduce on CUDA: premul_sum needs a scale for each source");
  if (count == 0) return;
  DeviceReduceCall call{};
  std::copy(sources, sources + num_sources, call.sources);
  if (scales) std::copy(scales, scales + num_sources, call.scales);
  call.output = output;
  call.count = count;
  call.num_sources = num_sources;
  call.divisor = num_sources;
  const int blocks = blocks_for(count);
  const bool known = visit_reduction(dtype, op, [&](auto type, auto reduction) {
    using T = typename decltype(type)::type;
    reduce_kernel<T, decltype(reduction)::op>
        <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  });
  PYCOMM_CHECK(known, kInvalidArgument, "reduce on CUDA: dtype ", name_of(dtype), " has no op ",
               name_of(op));
  check_cuda(cudaGetLastError(), "launch of reduce_kernel");
}

std::string cuda_build_description() {
  return concat("CUDA ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
}

}  // namespace pycomm
