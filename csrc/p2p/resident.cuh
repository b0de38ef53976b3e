// Blocks wait for those of other ranks, so all of a launch must run at once.
#pragma once

#include "../kernels/cuda_launch.cuh"

namespace pycomm {

// How many blocks of a kernel the current device runs at once.
template <class Kernel>
int resident_blocks(Kernel kernel, int threads) {
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks * processors();
}
template <class Kernel>
void check_resident(Kernel kernel, int blocks, int threads, const char* what) {
  const int resident = resident_blocks(kernel, threads);
  PYCOMM_CHECK(blocks <= resident, kInvalidArgument, what, " in peer memory: ", blocks,
               " blocks, of which this device runs ", resident, " at once");
}

}  // namespace pycomm
