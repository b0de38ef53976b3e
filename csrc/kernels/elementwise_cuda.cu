#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda_launch.cuh"
#include "elementwise_cuda.h"
#include "elementwise_kernel.cuh"

namespace pycomm {
namespace {

constexpr int kThreads = kMostReduceThreads;

// As many blocks as the chip holds at a time, which take turns at the packs: another one would
// start when the first have done their share, and run alone.
template <class Kernel>
int blocks_for(Kernel kernel, int64_t count) {
  int resident = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0),
             "occupancy of reduce_kernel");
  const int64_t wanted = (count + kThreads - 1) / kThreads;
  return static_cast<int>(std::min<int64_t>(wanted, int64_t{processors()} * resident));
}

}  // namespace

void check_reduce(ReduceOp op, const void* const* sources, int num_sources, const void* output,
                  const double* scales) {
  PYCOMM_CHECK(num_sources >= 1 && num_sources <= kMaxDeviceSources, kInvalidArgument,
               "reduce on CUDA takes 1 to ", kMaxDeviceSources, " sources, not ", num_sources);
  PYCOMM_CHECK(op != ReduceOp::kPremulSum || scales, kInvalidArgument,
               "reduce on CUDA: premul_sum needs a scale for each source");
  PYCOMM_CHECK(
      is_aligned_pack(output) && std::all_of(sources, sources + num_sources, is_aligned_pack),
      kInvalidArgument, "reduce on CUDA: sources and output must be aligned to ", kPackBytes,
      " bytes");
}

void launch_reduce(DType dtype, ReduceOp op, const void* const* sources, int num_sources,
                   void* output, int64_t count, void* stream, const double* scales) {
  check_reduce(op, sources, num_sources, output, scales);
  if (count == 0) return;
  DeviceReduceCall call{};
  std::copy(sources, sources + num_sources, call.sources);
  if (scales) std::copy(scales, scales + num_sources, call.scales);
  call.output = output;
  call.count = count;
  call.num_sources = num_sources;
  call.divisor = num_sources;
  const bool known = visit_reduction(dtype, op, [&](auto type, auto reduction) {
    using T = typename decltype(type)::type;
    const auto kernel = reduce_kernel<T, decltype(reduction)::op>;
    kernel<<<blocks_for(kernel, count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  });
  PYCOMM_CHECK(known, kInvalidArgument, "reduce on CUDA: dtype ", name_of(dtype), " has no op ",
               name_of(op));
  check_cuda(cudaGetLastError(), "launch of reduce_kernel");
}

std::string cuda_build_description() {
  return concat("CUDA ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
}

}  // namespace pycomm
