// The process's one thread that looks after what its NcclCommunicators have under way.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_api.h"

namespace pycomm::nccl {

class NcclCommunicator;

class Watchdog {
 public:
  static Watchdog& instance();  // of this process; it outlives static destruction

  void add(NcclCommunicator* communicator, std::shared_ptr<const CudaApi> cuda);
  // Returns when the thread does not look at it any more; it may be that thread's own call.
  void remove(NcclCommunicator* communicator);
  // There is something new to look at.
  void wake();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<NcclCommunicator*> communicators_;
  NcclCommunicator* looking_at_ = nullptr;
  bool woken_ = false;
  bool running_ = false;
  std::shared_ptr<const CudaApi> cuda_;
};

}  // namespace pycomm::nccl
