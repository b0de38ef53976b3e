// What the launchers of CUDA kernels share.
#pragma once

#include <cuda_runtime.h>

#include "../error.h"

namespace pycomm {

inline void check_cuda(cudaError_t status, const char* what) {
  PYCOMM_CHECK(status == cudaSuccess, kError, what, ": ", cudaGetErrorString(status));
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
