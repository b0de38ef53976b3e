// One call of torch's on its way to the communicator: tensors become pointers and counts.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "../communicator.h"
#include "work.h"

namespace pycomm {

// Where calls go, and who hears of them (null: nobody).
struct Target {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Observers> observers;
  bool on_gpu() const { return communicator->works_on_gpu(); }
};

// Builds a Request from tensors: checks them, and replaces those that are not plain memory by
// contiguous copies, which are written back when the operation is done.
class Call {
 public:
  Call(const Target& target, Operation operation, c10d::OpType type, uint64_t sequence = 0);

  // What an error message begins with.
  std::string name() const;
  std::string name(const at::Tensor& tensor) const;
  int world_size() const { return target_.communicator->world_size(); }

  void set_dtype(const at::Tensor& tensor);                  // and the count and the device
  void set_device(c10::Device device) { device_ = device; }  // of a call without tensors
  void set_op(const c10d::ReduceOp& op);
  void set_timeout(std::chrono::milliseconds timeout) {
    if (timeout > std::chrono::milliseconds(0)) timeout_ = timeout;
  }
  Request& request() { return request_; }

  // The memory of a tensor of `count` elements (-1: of any number).
  const void* input(const at::Tensor& tensor, int64_t count);
  void* output(const at::Tensor& tensor, int64_t count);
  // The same for lists with a tensor per rank, of any sizes.
  void inputs(const std::vector<at::Tensor>& tensors);
  void outputs(const std::vector<at::Tensor>& tensors);
  // One tensor cut along its first dimension into `splits` rows for each rank; equal parts if
  // empty.
  void split_input(const at::Tensor& tensor, const std::vector<int64_t>& splits);
  void split_output(const at::Tensor& tensor, const std::vector<int64_t>& splits);

  // The call is one of a group (see Communicator::begin_group): submitted, its work waits in the
  // list for what the group ends with.
  using Collected = std::vector<c10::intrusive_ptr<C10dWork>>;
  void collect_in(Collected* works) { collected_ = works; }
  bool is_collected() const { return collected_ != nullptr; }
  static void end_collected(const Collected& works, const std::shared_ptr<Pending>& pending);
  static void fail_collected(const Collected& works, std::exception_ptr failure);

  // In profiles, calls that torch sees as one are one event: this call's, with the tensors of both.
  void take_event_of(Call& earlier);

  // A call can be submitted once.
  c10::intrusive_ptr<C10dWork> submit(bool async, std::vector<at::Tensor> outputs);
  // The same for a message instead of the request, of the one tensor that was given.
  c10::intrusive_ptr<C10dWork> post(int peer, int tag, void* data);
  // The same for work made of several operations, which fills `outputs`.
  c10::intrusive_ptr<C10dWork> run_together(std::function<void()> work, bool async,
                                            std::vector<at::Tensor> outputs);

 private:
  struct Copy {
    at::Tensor temporary, destination;
  };
  struct Written {
    at::Tensor tensor;
    bool is_plain;
  };
  static void write_back(const std::vector<Copy>& copies);
  static std::exception_ptr outcome_of_write_back(const std::vector<Copy>& copies);
  // What profiles show, as for Gloo: the inputs or, of an operation in place, its tensor.
  const std::vector<at::Tensor>& profiled() const { return sources_.empty() ? kept_ : sources_; }
  at::Tensor plain(const at::Tensor& tensor, int64_t count, bool written);
  std::vector<int64_t> lengths(const at::Tensor& tensor, const std::vector<int64_t>& splits) const;
  std::shared_ptr<void> keep_alive(bool async);
  c10::intrusive_ptr<C10dWork> make_work(std::vector<at::Tensor> outputs);
  template <class Start>
  c10::intrusive_ptr<C10dWork> start(std::vector<at::Tensor> outputs, Start&& start);

  const Target& target_;  // the caller's
  const c10d::OpType type_;
  const uint64_t sequence_;
  Request request_;
  std::chrono::milliseconds timeout_{0};
  at::ScalarType dtype_ = at::kFloat;
  c10::Device device_ = at::kCPU;
  std::vector<at::Tensor> kept_;     // alive until the operation is done
  std::vector<at::Tensor> sources_;  // while something profiles: what went in
  bool has_event_ = true;
  Collected* collected_ = nullptr;
  std::vector<Copy> copies_;
  std::vector<Written> written_;
};

// The one tensor of a list that torch's interface has for historical reasons.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const Call& call);
// The one list, with a tensor per rank.
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    const Call& call);

// The sum of sparse tensors, in place (sparse.cpp).
c10::intrusive_ptr<C10dWork> sparse_all_reduce(const Target& target, Call call,
                                               const at::Tensor& tensor,
                                               const c10d::AllreduceOptions& options);

}  // namespace pycomm
