// torch's c10d::Backend over a pycomm Communicator: the one place where tensors become pointers and
// counts.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "../communicator.h"

namespace pycomm {

inline constexpr const char* kBackendName = "pycomm";

// Result of an operation for torch. Complete at once if the operation ran synchronously.
class C10dWork : public c10d::Work {
 public:
  C10dWork(int rank, c10d::OpType op, std::vector<at::Tensor> outputs);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // Called once: by the submitter, or by the worker when the operation is done.
  void complete(std::exception_ptr exception);

 private:
  void mark(c10::ivalue::Future& future) const;

  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for
  bool settled_ = false;  // complete() has taken over: a future asked for later is marked at once
  std::exception_ptr failure_;
};

class C10dBackend : public c10d::Backend {
 public:
  C10dBackend(std::shared_ptr<Communicator> communicator);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override { return communicator_->sequence(); }
  void setSequenceNumberForGroup() override {}  // they start at 0 on every rank
  void abort() override;
  void shutdown() override;

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  std::shared_ptr<Communicator> communicator_;
  c10::intrusive_ptr<Options> options_;
};

// The average of a contiguous CPU tensor over all ranks, in place: the path of DDP's gradient
// buckets.
c10::intrusive_ptr<c10::ivalue::Future> average(Communicator& communicator,
                                                const at::Tensor& tensor, bool async);

}  // namespace pycomm
