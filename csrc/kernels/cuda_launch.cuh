// What the launchers of CUDA kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_check.cuh"
#include "device_types.cuh"

namespace pycomm {

inline bool is_aligned_pack(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % kPackBytes == 0;
}

// The current device's multiprocessors.
inline int processors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

}  // namespace pycomm
