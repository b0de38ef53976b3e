#include "watchdog.h"

#include <algorithm>

#include "../forks.h"
#include "nccl_communicator.h"

namespace pycomm::nccl {

Watchdog& Watchdog::instance() {
  // A forked child has none of its parent's threads, so it gets a watchdog of its own.
  static std::mutex mutex;
  static Watchdog* current = nullptr;
  static unsigned made_at = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (!current || made_at != forks.load()) {
    current = new Watchdog;
    made_at = forks.load();
  }
  return *current;
}

void Watchdog::add(NcclCommunicator* communicator, std::shared_ptr<const CudaApi> cuda) {
  std::lock_guard<std::mutex> lock(mutex_);
  communicators_.push_back(communicator);
  cuda_ = std::move(cuda);
  woken_ = true;
  if (!running_) std::thread([this] { loop(); }).detach();
  running_ = true;
  changed_.notify_all();
}

void Watchdog::remove(NcclCommunicator* communicator) {
  std::unique_lock<std::mutex> lock(mutex_);
  communicators_.erase(std::remove(communicators_.begin(), communicators_.end(), communicator),
                       communicators_.end());
  changed_.wait(lock, [&] { return looking_at_ != communicator; });
}

void Watchdog::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

// Ends when there is nothing left to look after, so that a process at its end has no such thread.
void Watchdog::loop() {
  using Clock = NcclWork::Clock;
  // Its questions about events must not spoil a graph that another thread captures.
  int mode = kCaptureModeThreadLocal;
  cuda_->exchange_capture_mode(&mode);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!communicators_.empty()) {
    auto next = Clock::time_point::max();
    woken_ = false;
    const std::vector<NcclCommunicator*> all = communicators_;
    for (NcclCommunicator* communicator : all) {
      if (std::find(communicators_.begin(), communicators_.end(), communicator) ==
          communicators_.end())
        continue;
      looking_at_ = communicator;
      lock.unlock();
      next = std::min(next, communicator->tick());
      lock.lock();
      looking_at_ = nullptr;
      changed_.notify_all();
    }
    changed_.wait_until(lock, std::min(next, Clock::now() + std::chrono::hours(1)),
                        [this] { return woken_ || communicators_.empty(); });
  }
  running_ = false;
}

}  // namespace pycomm::nccl
