// Errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime.h>

#include "../error.h"

namespace pycomm {

inline void check_cuda(cudaError_t status, const char* what) {
  if (__builtin_expect(status == cudaSuccess, 1)) return;
  cudaGetLastError();  // so that the next caller does not take it for its own
  throw Error(ErrorKind::kError, concat(what, ": ", cudaGetErrorString(status)));
}

}  // namespace pycomm
