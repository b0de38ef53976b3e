// One-sided access to other ranks' tensors (torch 2.14 and later).
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "call.h"

namespace pycomm {

// Memory for tensors that peers can reach, from the communicator's shared heap.
std::shared_ptr<c10::Allocator> shared_allocator(std::shared_ptr<Communicator> communicator);
at::Tensor shared_tensor(const std::shared_ptr<Communicator>& communicator, int64_t count,
                         const at::TensorOptions& options);

#ifdef C10D_BACKEND_HAS_WINDOW
// Every rank registers a tensor of its own in shared memory; peers then write into it and raise
// signals, without that rank's doing. A put is complete when it returns or its work is done; a
// signal raised after it is seen after it. Of several writers of one place, the last wins.
class SharedWindow : public c10d::Window {
 public:
  explicit SharedWindow(const Target& target);

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t destination, int64_t offset,
                                     bool async, const c10d::PutOptions& options) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t peer, bool async,
                                        const c10d::SignalOptions& options) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t peer, bool async,
                                             const c10d::WaitSignalOptions& options) override;
  c10d::WindowAttr get_attr(int64_t peer) override;

 private:
  struct Registered {  // a rank's tensor
    void* data = nullptr;
    std::vector<int64_t> sizes;
    int64_t count = 0;
  };
  std::string name(const char* call) const;
  const Registered& registered(int64_t rank, const char* call) const;
  c10::intrusive_ptr<c10d::Work> run(std::function<void()> work, bool async);

  const Target target_;
  std::optional<at::Tensor> owned_;
  at::ScalarType dtype_ = at::kFloat;
  std::vector<Registered> tensors_;    // of all ranks; empty: nothing is registered
  std::shared_ptr<void> own_signals_;  // one for each rank that may raise it
  std::vector<void*> signals_;         // those of this rank at each peer
  std::vector<uint32_t> taken_;        // signals of each peer that were waited for
};
#endif

}  // namespace pycomm
