// That NCCL knows some memory, and may use it in place.
#pragma once

#include <functional>
#include <mutex>
#include <utility>

namespace pycomm::nccl {

class Registration {
 public:
  explicit Registration(std::function<void()> undo) : undo_(std::move(undo)) {}
  ~Registration() { undo(); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Once, whoever comes first: the owner, the memory's end or the communicator's.
  void undo() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto once = std::exchange(undo_, nullptr)) once();
  }

 private:
  std::mutex mutex_;
  std::function<void()> undo_;
};

}  // namespace pycomm::nccl
