// What NCCL or a kernel may still use, since it did not come to an end: kept for the process's
// life.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pycomm::nccl {

inline void leave_alone(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const left = new std::vector<std::shared_ptr<void>>;
  std::lock_guard<std::mutex> lock(mutex);
  left->push_back(std::move(memory));
}

}  // namespace pycomm::nccl
