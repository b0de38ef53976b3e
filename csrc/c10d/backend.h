// torch's c10d::Backend over a pycomm Communicator.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../communicator.h"
#include "call.h"
#include "errors.h"
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
  // Makes the backend of a part of this group's ranks: (only of a GPU, store, rank, world size,
  // timeout).
  using Split = std::function<BackendPtr(bool, const c10::intrusive_ptr<c10d::Store>&, int, int,
                                         Milliseconds)>;

  // Why this rank leaves its group, if because of an exception.
  using Farewell = std::function<std::string()>;

  // Makes the communicator of CUDA tensors, when the first one comes.
  using MakeGpu = std::function<std::shared_ptr<Communicator>()>;

  // `communicator` is that of CPU tensors; a GPU's is that of all tensors. An empty `make_gpu`
  // refuses CUDA tensors.
  C10dBackend(std::shared_ptr<Communicator> communicator, MakeGpu make_gpu, Split split,
              Farewell farewell);

  // Of CPU tensors.
  const std::shared_ptr<Communicator>& communicator() const { return target_.communicator; }
  std::vector<std::shared_ptr<Communicator>> communicators() const;  // that have been made
  // Of CUDA tensors.
  const std::shared_ptr<Communicator>& gpu_communicator() { return gpu_target().communicator; }

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
  // On a GPU: memory that NCCL uses in place, once it is registered.
  at::Tensor allocateTensor(long count, at::TensorOptions options) override {
    const auto& target = translated([&]() -> const Target& { return target_of(options.device()); });
    return shared_tensor(target.communicator, count, options);
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
  // Where a tensor's calls go, and those of a list.
  const Target& target_of(const at::Tensor& tensor);
  const Target& target_of(const Tensors& tensors) {
    return tensors.empty() ? target_ : target_of(tensors[0]);
  }
  const Target& target_of(c10::Device device) {
    return device.is_cuda() && !target_.on_gpu() ? gpu_target() : target_;
  }
  const Target& gpu_target();
  // Runs a call of torch's; one that fails drops the group of calls that it is in.
  template <class Function>
  auto run(Function&& function);
  // The next call of a collective; `where` are its tensors, or one of them.
  template <class Where>
  Call next(Operation operation, c10d::OpType type, const Where& where) {
    const Target& target = target_of(where);
    Call call(target, operation, type, ++sequence_);
    if (target.on_gpu()) join_group(call, target);
    return call;
  }
  // A call of a group's GPU is collected while calls are coalesced.
  void join_group(Call& call, const Target& target);
  // A message's.
  Call next_message(Operation operation, c10d::OpType type, const Tensors& tensors);
  bool is_coalescer() const;
  void drop_group();
  void end_group(const Target& target, const Call::Collected& works, bool async);
  WorkPtr together(std::vector<Call> calls, bool async, const Tensors& outputs);
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
  // Submits calls that were all checked before: one after another, or on a GPU together.
  WorkPtr in_sequence(std::vector<Call> calls, bool async, const Tensors& outputs);

  Target target_, gpu_;
  const MakeGpu make_gpu_;
  std::mutex making_gpu_;         // held while Python makes it; whoever has the GIL must not wait
  mutable std::mutex gpu_mutex_;  // of the pointer
  const Split split_;
  const Farewell farewell_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  std::thread::id coalescer_;
  const Target* group_ = nullptr;  // of the group of calls that is open, on a GPU
  Call::Collected collected_;      // its works so far
};

// The average of a contiguous CPU tensor over all ranks, in place: the path of DDP's gradient
// buckets.
c10::intrusive_ptr<c10::ivalue::Future> average(const std::shared_ptr<Communicator>& communicator,
                                                const at::Tensor& tensor, bool async);

}  // namespace pycomm
