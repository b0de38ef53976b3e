// torch's c10d::Backend over a pycomm Communicator.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../communicator.h"
#include "call.h"
#include "window.h"
#include "work.h"

namespace pycomm {

inline constexpr const char* kBackendName = "pycomm";

// Functions without `override` exist only in some of the torch versions supported.
class C10dBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Milliseconds = std::chrono::milliseconds;
  // Makes the backend of a part of this group's ranks: (store, rank, world size, timeout).
  using Split =
      std::function<BackendPtr(const c10::intrusive_ptr<c10d::Store>&, int, int, Milliseconds)>;

  // Why this rank leaves its group, if because of an exception.
  using Farewell = std::function<std::string()>;

  C10dBackend(std::shared_ptr<Communicator> communicator, Split split, Farewell farewell);

  const std::shared_ptr<Communicator>& communicator() const { return target_.communicator; }

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override;
  void addEphemeralTimeout(const Milliseconds& timeout);
  // Collectives called so far; messages do not count, since they may concern two ranks only.
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}  // they start at 0 on every rank
  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError();
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options);

  // Shared memory for tensors, and windows on it.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long count, at::TensorOptions options) override {
    return shared_tensor(target_.communicator, count, options);
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return shared_allocator(target_.communicator);
  }
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override { target_.observers->set_timing(); }
  void registerAbortHook(int64_t id, std::function<void()> hook);
  void unregisterAbortHook(int64_t id);

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& options);
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // The next call of a collective.
  Call next(Operation operation, c10d::OpType type) {
    return Call(target_, operation, type, ++sequence_);
  }
  Call all_reduce_of(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  Call all_gather_of(const Tensors& outputs, const at::Tensor& input,
                     const c10d::AllgatherOptions& options);
  Call all_gather_of(const at::Tensor& output, const at::Tensor& input,
                     const c10d::AllgatherOptions& options);
  Call reduce_scatter_of(const at::Tensor& output, const at::Tensor& input,
                         const c10d::ReduceScatterOptions& options);
  WorkPtr receive(Tensors& tensors, int source, int tag, c10d::OpType type);
  // Remembers the work while calls are coalesced.
  WorkPtr note(WorkPtr work);
  // Submits calls that were all checked before, one after another.
  WorkPtr in_sequence(std::vector<Call> calls, bool async, const Tensors& outputs);

  Target target_;
  const Split split_;
  const Farewell farewell_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

// The average of a contiguous CPU tensor over all ranks, in place: the path of DDP's gradient
// buckets.
c10::intrusive_ptr<c10::ivalue::Future> average(const std::shared_ptr<Communicator>& communicator,
                                                const at::Tensor& tensor, bool async);

}  // namespace pycomm
