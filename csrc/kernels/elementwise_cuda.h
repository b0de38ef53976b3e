// Host launchers of the CUDA kernels. Pointers are device memory, 16-byte aligned.
#pragma once

#include <cstdint>
#include <string>

#include "../common.h"

namespace pycomm {

// output[i] = the reduction of num_sources arrays, as elementwise.h defines it, on a stream (a
// cudaStream_t). `scales`: one per source, of kPremulSum.
void launch_reduce(DType dtype, ReduceOp op, const void* const* sources, int num_sources,
                   void* output, int64_t count, void* stream, const double* scales = nullptr);

// Throws kInvalidArgument for a call that launch_reduce refuses; asks no device.
void check_reduce(ReduceOp op, const void* const* sources, int num_sources, const void* output,
                  const double* scales);

// "CUDA 13.0": the toolkit that this was compiled with.
std::string cuda_build_description();

}  // namespace pycomm
