#include "backend.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "errors.h"

namespace pycomm {

using c10d::OpType;
using WorkPtr = C10dBackend::WorkPtr;

C10dBackend::C10dBackend(std::shared_ptr<Communicator> communicator, MakeGpu make_gpu, Split split,
                         Farewell farewell)
    : Backend(communicator->rank(), communicator->world_size()),
      target_{communicator, std::make_shared<Observers>(communicator->name())},
      gpu_{nullptr, target_.observers},
      make_gpu_(std::move(make_gpu)),
      split_(std::move(split)),
      farewell_(std::move(farewell)),
      options_(c10::make_intrusive<Options>(kBackendName, target_.communicator->timeout())) {}

// ---- CPU or GPU

const Target& C10dBackend::target_of(const at::Tensor& tensor) {
  return target_of(tensor.device());
}

const Target& C10dBackend::gpu_target() {
  if (target_.on_gpu()) return target_;
  std::lock_guard<std::mutex> making(making_gpu_);
  if (gpu_.communicator) return gpu_;  // only written below
  PYCOMM_CHECK(make_gpu_, kInvalidArgument, "rank ", rank_,
               ": this group works on CPU tensors; for CUDA tensors use "
               "init_process_group('pycomm')");
  try {
    const std::shared_ptr<Communicator> made = make_gpu_();
    made->set_timeout(options_->timeout);
    std::lock_guard<std::mutex> lock(gpu_mutex_);
    gpu_.communicator = made;
  } catch (const Error& error) {
    throw Error(error.kind(), concat("rank ", rank_, ": ", error.what()), error.blame());
  }
  return gpu_;
}

std::vector<std::shared_ptr<Communicator>> C10dBackend::communicators() const {
  std::vector<std::shared_ptr<Communicator>> made{target_.communicator};
  std::lock_guard<std::mutex> lock(gpu_mutex_);
  if (gpu_.communicator) made.push_back(gpu_.communicator);
  return made;
}

template <class Function>
auto C10dBackend::run(Function&& function) {
  try {
    return translated(std::forward<Function>(function));
  } catch (...) {
    drop_group();
    throw;
  }
}

// ---- the group

void C10dBackend::setTimeout(Milliseconds timeout) {
  translated([&] {
    for (const auto& communicator : communicators()) communicator->set_timeout(timeout);
  });
  options_->timeout = timeout;
}

void C10dBackend::addEphemeralTimeout(const Milliseconds& timeout) {
  target_.observers->extend_timeouts(timeout);
}

void C10dBackend::abort() {
  target_.observers->aborted();
  for (const auto& communicator : communicators()) communicator->abort("abort() was called");
}

void C10dBackend::shutdown() {
  const std::string reason = farewell_();
  translated([&] {
    const auto all = communicators();
    for (const auto& communicator : all) communicator->set_farewell(reason);
    std::exception_ptr first;
    for (auto one = all.rbegin(); one != all.rend(); ++one) {
      try {
        (*one)->shutdown();
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  });
}

c10d::ErrorType C10dBackend::getError() {
  auto failure = Failure::kNone;
  for (const auto& communicator : communicators())
    if (failure == Failure::kNone) failure = communicator->failure();
  switch (failure) {
    case Failure::kNone:
      return c10d::ErrorType::SUCCESS;
    case Failure::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case Failure::kHere:
      return c10d::ErrorType::COMM_ERROR;
    case Failure::kElsewhere:
      return c10d::ErrorType::REMOTE_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

C10dBackend::BackendPtr C10dBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::vector<int>& ranks,
                                           const c10::intrusive_ptr<Options>& options) {
  const auto me = std::find(ranks.begin(), ranks.end(), rank_);
  if (me == ranks.end()) return nullptr;
  auto part =
      split_(target_.on_gpu(), store, static_cast<int>(me - ranks.begin()),
             static_cast<int>(ranks.size()), options ? options->timeout : options_->timeout);
  if (options) {
    auto own = part->getBackendOptions();
    own->group_name = options->group_name;
    own->global_ranks_in_group = options->global_ranks_in_group;
  }
  return part;
}

void C10dBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  onCompletionHook_ = hook;
  target_.observers->set_completion_hook(std::move(hook));
}

void C10dBackend::waitForPendingWorks() {
  translated([&] {
    for (const auto& communicator : communicators()) communicator->drain();
  });
}

void C10dBackend::registerAbortHook(int64_t id, std::function<void()> hook) {
  target_.observers->add_abort_hook(id, std::move(hook));
}
void C10dBackend::unregisterAbortHook(int64_t id) { target_.observers->remove_abort_hook(id); }

#ifdef C10D_BACKEND_HAS_WINDOW
c10::intrusive_ptr<c10d::Window> C10dBackend::new_window(const std::optional<at::Tensor>& tensor) {
  translated([&] {
    PYCOMM_CHECK(!target_.on_gpu(), kInvalidArgument, "rank ", rank_,
                 ": windows are of CPU tensors; this group is one of GPUs");
  });
  auto window = c10::make_intrusive<SharedWindow>(target_);
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}
#endif

// ---- coalescing: calls on the CPU start at once, and their works are handed out as one; calls on
// a GPU start together

void C10dBackend::startCoalescing() {
  drop_group();
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_ = true;
  coalescer_ = std::this_thread::get_id();
}

WorkPtr C10dBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  const Target* group;
  Call::Collected collected;
  {
    std::lock_guard<std::mutex> lock(coalescing_mutex_);
    coalescing_ = false;
    works.swap(coalesced_);
    collected.swap(collected_);
    group = std::exchange(group_, nullptr);
  }
  if (group) translated([&] { end_group(*group, collected, true); });
  return join(rank_, std::move(works));
}

WorkPtr C10dBackend::note(WorkPtr work) {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

// A GPU's group of calls is one thread's.
bool C10dBackend::is_coalescer() const {
  return coalescing_ && coalescer_ == std::this_thread::get_id();
}

void C10dBackend::join_group(Call& call, const Target& target) {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (!is_coalescer()) return;
  if (!group_) target.communicator->begin_group();
  group_ = &target;
  call.collect_in(&collected_);
}

// What was collected is not sent, and its works end with an error.
void C10dBackend::drop_group() {
  Call::Collected dropped;
  {
    std::lock_guard<std::mutex> lock(coalescing_mutex_);
    if (!is_coalescer()) return;
    if (const Target* group = std::exchange(group_, nullptr)) group->communicator->drop_group();
    dropped.swap(collected_);
    coalesced_.clear();
    coalescing_ = false;
  }
  const Error error(ErrorKind::kInvalidArgument,
                    concat("rank ", rank_,
                           ": it was not sent, since another call of its group of "
                           "calls was refused, or the group was never ended"));
  Call::fail_collected(dropped, std::make_exception_ptr(error));
}

void C10dBackend::end_group(const Target& target, const Call::Collected& works, bool async) {
  try {
    Call::end_collected(works, target.communicator->end_group(async));
  } catch (...) {
    Call::fail_collected(works, std::current_exception());
    throw;
  }
}

WorkPtr C10dBackend::in_sequence(std::vector<Call> calls, bool async, const Tensors& outputs) {
  if (at::hasCallbacks())
    for (size_t i = 1; i < calls.size(); ++i) calls[i].take_event_of(calls[i - 1]);
  if (!calls.empty() && target_of(outputs).on_gpu() && !calls[0].is_collected())
    return together(std::move(calls), async, outputs);
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < calls.size(); ++i)
    works.push_back(calls[i].submit(async, {outputs.at(i)}));
  return note(join(rank_, std::move(works)));
}

WorkPtr C10dBackend::together(std::vector<Call> calls, bool async, const Tensors& outputs) {
  const Target& target = target_of(outputs);
  Call::Collected collected;
  std::vector<WorkPtr> works;
  target.communicator->begin_group();
  try {
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].collect_in(&collected);
      works.push_back(calls[i].submit(async, {outputs.at(i)}));
    }
  } catch (...) {
    target.communicator->drop_group();
    throw;
  }
  end_group(target, collected, async);
  return note(join(rank_, std::move(works)));
}

// ---- reductions

Call C10dBackend::all_reduce_of(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  Call call = next(Operation::kAllReduce, OpType::ALLREDUCE, tensor);
  call.set_dtype(tensor);
  call.set_op(options.reduceOp);
  call.set_timeout(options.timeout);
  call.request().input = call.request().output = call.output(tensor, tensor.numel());
  return call;
}

WorkPtr C10dBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run([&] {
    if (tensors.size() == 1 && tensors[0].is_sparse())
      return note(sparse_all_reduce(target_of(tensors),
                                    next(Operation::kAllReduce, OpType::_ALLREDUCE_SPARSE, tensors),
                                    tensors[0], options));
    const Call name(target_, Operation::kAllReduce, OpType::ALLREDUCE);
    return note(all_reduce_of(only(tensors, name), options).submit(options.asyncOp, tensors));
  });
}

WorkPtr C10dBackend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  return run([&] {
    std::vector<Call> calls;
    for (const at::Tensor& tensor : tensors) calls.push_back(all_reduce_of(tensor, options));
    return in_sequence(std::move(calls), options.asyncOp, tensors);
  });
}

WorkPtr C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run([&] {
    Call call = next(Operation::kReduce, OpType::REDUCE, tensors);
    const at::Tensor& tensor = only(tensors, call);
    call.set_dtype(tensor);
    call.set_op(options.reduceOp);
    call.set_timeout(options.timeout);
    Request& request = call.request();
    request.root = static_cast<int>(options.rootRank);
    if (rank_ == request.root)
      request.input = request.output = call.output(tensor, tensor.numel());
    else
      request.input = call.input(tensor, tensor.numel());
    return note(call.submit(options.asyncOp, tensors));
  });
}

WorkPtr C10dBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  return run([&] {
    Call call = next(Operation::kReduceScatter, OpType::REDUCE_SCATTER, outputs);
    const at::Tensor& output = only(outputs, call);
    const Tensors& list = only(inputs, call);
    call.set_dtype(output);
    call.set_op(options.reduceOp);
    call.set_timeout(options.timeout);
    call.inputs(list);
    call.request().output = call.output(output, output.numel());
    return note(call.submit(options.asyncOp, outputs));
  });
}

Call C10dBackend::reduce_scatter_of(const at::Tensor& output, const at::Tensor& input,
                                    const c10d::ReduceScatterOptions& options) {
  Call call = next(Operation::kReduceScatter, OpType::_REDUCE_SCATTER_BASE, output);
  call.set_dtype(output);
  call.set_op(options.reduceOp);
  call.set_timeout(options.timeout);
  call.request().input = call.input(input, output.numel() * size_);
  call.request().output = call.output(output, output.numel());
  return call;
}

WorkPtr C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  return run([&] {
    return note(reduce_scatter_of(output, input, options).submit(options.asyncOp, {output}));
  });
}

WorkPtr C10dBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  return run([&] {
    std::vector<Call> calls;
    for (size_t i = 0; i < inputs.size(); ++i)
      calls.push_back(reduce_scatter_of(outputs.at(i), inputs[i], options));
    return in_sequence(std::move(calls), options.asyncOp, outputs);
  });
}

// ---- the same data to everybody who wants it

WorkPtr C10dBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run([&] {
    Call call = next(Operation::kBroadcast, OpType::BROADCAST, tensors);
    const at::Tensor& tensor = only(tensors, call);
    call.set_dtype(tensor);
    call.set_timeout(options.timeout);
    call.request().root = static_cast<int>(options.rootRank);
    call.request().input = call.request().output = call.output(tensor, tensor.numel());
    return note(call.submit(options.asyncOp, tensors));
  });
}

Call C10dBackend::all_gather_of(const Tensors& outputs, const at::Tensor& input,
                                const c10d::AllgatherOptions& options) {
  Call call = next(Operation::kAllGather, OpType::ALLGATHER, input);
  call.set_dtype(input);
  call.set_timeout(options.timeout);
  call.request().input = call.input(input, input.numel());
  call.outputs(outputs);
  return call;
}

WorkPtr C10dBackend::allgather(TensorLists& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& options) {
  return run([&] {
    const Call name(target_, Operation::kAllGather, OpType::ALLGATHER);
    const Tensors& list = only(outputs, name);
    return note(all_gather_of(list, only(inputs, name), options).submit(options.asyncOp, list));
  });
}

// outputs[rank][i] takes inputs[i] of that rank.
WorkPtr C10dBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) {
  return run([&] {
    std::vector<Call> calls;
    Tensors written;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors list;
      for (const Tensors& from_rank : outputs) {
        PYCOMM_CHECK(from_rank.size() == inputs.size(), kInvalidArgument, "rank ", rank_,
                     ": all_gather_coalesced: expects a list of ", inputs.size(),
                     " tensors for each rank, not ", from_rank.size());
        list.push_back(from_rank[i]);
      }
      calls.push_back(all_gather_of(list, inputs[i], options));
      written.push_back(list.at(0));
    }
    return in_sequence(std::move(calls), options.asyncOp, written);
  });
}

Call C10dBackend::all_gather_of(const at::Tensor& output, const at::Tensor& input,
                                const c10d::AllgatherOptions& options) {
  Call call = next(Operation::kAllGather, OpType::_ALLGATHER_BASE, input);
  call.set_dtype(input);
  call.set_timeout(options.timeout);
  call.request().input = call.input(input, input.numel());
  call.request().output = call.output(output, input.numel() * size_);
  return call;
}

WorkPtr C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  return run([&] {
    return note(all_gather_of(output, input, options).submit(options.asyncOp, {output}));
  });
}

WorkPtr C10dBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  return run([&] {
    std::vector<Call> calls;
    for (size_t i = 0; i < inputs.size(); ++i)
      calls.push_back(all_gather_of(outputs.at(i), inputs[i], options));
    return in_sequence(std::move(calls), options.asyncOp, outputs);
  });
}

WorkPtr C10dBackend::gather(TensorLists& outputs, Tensors& inputs,
                            const c10d::GatherOptions& options) {
  return run([&] {
    Call call = next(Operation::kGather, OpType::GATHER, inputs);
    const at::Tensor& input = only(inputs, call);
    call.set_dtype(input);
    call.set_timeout(options.timeout);
    call.request().root = static_cast<int>(options.rootRank);
    call.request().input = call.input(input, input.numel());
    const bool is_root = rank_ == options.rootRank;
    PYCOMM_CHECK(is_root || outputs.empty(), kInvalidArgument, call.name(),
                 ": only the root, rank ", options.rootRank, ", may pass outputs");
    if (!is_root) return note(call.submit(options.asyncOp, {}));
    const Tensors& list = only(outputs, call);
    call.outputs(list);
    return note(call.submit(options.asyncOp, list));
  });
}

WorkPtr C10dBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                        const c10d::GatherOptions& options) {
  return run([&] {
    Call call = next(Operation::kGather, OpType::GATHER, input);
    call.set_dtype(input);
    call.set_timeout(options.timeout);
    call.request().root = static_cast<int>(options.rootRank);
    call.request().input = call.input(input, input.numel());
    if (rank_ != options.rootRank) return note(call.submit(options.asyncOp, {}));
    char* data = static_cast<char*>(call.output(output, input.numel() * size_));
    for (int rank = 0; rank < size_; ++rank)
      call.request().outputs.push_back({data + rank * call.request().bytes(), input.numel()});
    return note(call.submit(options.asyncOp, {output}));
  });
}

// ---- other data for everybody

WorkPtr C10dBackend::scatter(Tensors& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& options) {
  return run([&] {
    Call call = next(Operation::kScatter, OpType::SCATTER, outputs);
    const at::Tensor& output = only(outputs, call);
    call.set_dtype(output);
    call.set_timeout(options.timeout);
    call.request().root = static_cast<int>(options.rootRank);
    const bool is_root = rank_ == options.rootRank;
    PYCOMM_CHECK(is_root || inputs.empty(), kInvalidArgument, call.name(), ": only the root, rank ",
                 options.rootRank, ", may pass inputs");
    if (is_root) call.inputs(only(inputs, call));
    call.request().output = call.output(output, output.numel());
    return note(call.submit(options.asyncOp, outputs));
  });
}

WorkPtr C10dBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& options) {
  return run([&] {
    Call call = next(Operation::kAllToAll, OpType::ALLTOALL, inputs);
    PYCOMM_CHECK(static_cast<int>(inputs.size()) == size_ && inputs.size() == outputs.size(),
                 kInvalidArgument, call.name(),
                 ": expects an input and an output tensor for each of ", size_, " ranks, not ",
                 inputs.size(), " and ", outputs.size());
    call.set_dtype(inputs[0]);
    call.set_timeout(options.timeout);
    call.inputs(inputs);
    call.outputs(outputs);
    call.request().count = 0;
    for (const ConstSpan& part : call.request().inputs) call.request().count += part.count;
    return note(call.submit(options.asyncOp, outputs));
  });
}

WorkPtr C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits,
                                   const c10d::AllToAllOptions& options) {
  return run([&] {
    Call call = next(Operation::kAllToAll, OpType::ALLTOALL_BASE, input);
    call.set_dtype(input);
    call.set_timeout(options.timeout);
    call.split_input(input, input_splits);
    call.split_output(output, output_splits);
    return note(call.submit(options.asyncOp, {output}));
  });
}

// ---- messages

Call C10dBackend::next_message(Operation operation, OpType type, const Tensors& tensors) {
  const Target& target = target_of(tensors);
  Call call(target, operation, type);
  if (target.on_gpu()) join_group(call, target);
  return call;
}

WorkPtr C10dBackend::send(Tensors& tensors, int destination, int tag) {
  return run([&] {
    Call call = next_message(Operation::kSend, OpType::SEND, tensors);
    const at::Tensor& tensor = only(tensors, call);
    call.set_dtype(tensor);
    // Only read, but a message has one pointer for both directions.
    return note(call.post(destination, tag, const_cast<void*>(call.input(tensor, tensor.numel()))));
  });
}

WorkPtr C10dBackend::receive(Tensors& tensors, int source, int tag, OpType type) {
  return run([&] {
    Call call = next_message(Operation::kRecv, type, tensors);
    const at::Tensor& tensor = only(tensors, call);
    call.set_dtype(tensor);
    return note(call.post(source, tag, call.output(tensor, tensor.numel())));
  });
}

WorkPtr C10dBackend::recv(Tensors& tensors, int source, int tag) {
  return receive(tensors, source, tag, OpType::RECV);
}
WorkPtr C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, kAnySource, tag, OpType::RECVANYSOURCE);
}

// ---- barriers

WorkPtr C10dBackend::barrier(const c10d::BarrierOptions& options) {
  return run([&] {
    const c10::Device device = options.device.value_or(c10::Device(at::kCPU));
    Call call = next(Operation::kBarrier, OpType::BARRIER, device);
    call.set_device(device);
    call.set_timeout(options.timeout);
    return note(call.submit(options.asyncOp, {}));
  });
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  run([&] {
    Call call = next(Operation::kMonitoredBarrier, OpType::BARRIER, c10::Device(at::kCPU));
    PYCOMM_CHECK(options.timeout.count() != 0, kTimeout, "Rank ", rank_,
                 " timed out in monitoredBarrier at once, since its timeout is 0 ms");
    call.set_timeout(options.timeout);
    call.request().wait_all_ranks = wait_all_ranks;
    call.submit(false, {});
  });
}

// ---- DDP

c10::intrusive_ptr<c10::ivalue::Future> average(const std::shared_ptr<Communicator>& communicator,
                                                const at::Tensor& tensor, bool async) {
  return translated([&] {
    const Target target{communicator, nullptr};
    Call call(target, Operation::kAllReduce, OpType::ALLREDUCE);
    call.set_dtype(tensor);
    call.request().op = ReduceOp::kAvg;
    call.request().input = call.request().output = call.output(tensor, tensor.numel());
    return call.submit(async, {tensor})->getFuture();
  });
}

}  // namespace pycomm
