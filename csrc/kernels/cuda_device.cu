#include <cuda_runtime.h>

#include "cuda_device.h"
#include "cuda_launch.cuh"

namespace pycomm {

UseDevice::UseDevice(int device) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) cudaGetLastError();  // which would be the next launch's otherwise
  PYCOMM_CHECK(status == cudaSuccess, kError,
               "CUDA cannot be used on this machine: ", cudaGetErrorString(status),
               "; pycomm was built with CUDA ", CUDART_VERSION / 1000, ".",
               CUDART_VERSION % 1000 / 10, " and needs a GPU and a driver for it");
  PYCOMM_CHECK(device >= 0 && device < devices, kError, "there is no CUDA device ", device,
               "; this process sees ", devices);
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

UseDevice::~UseDevice() { cudaSetDevice(before_); }

}  // namespace pycomm
