#include "backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "../interrupt.h"
#include "errors.h"

namespace pycomm {
namespace {

using c10d::OpType;

// ---- argument translation

DType to_dtype(at::ScalarType type, const std::string& call) {
  switch (type) {
    case at::kChar:
      return DType::kInt8;
    case at::kByte:
      return DType::kUInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kBool:
      return DType::kBool;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    default:
      throw Error(ErrorKind::kInvalidArgument,
                  concat(call, ": dtype ", c10::toString(type), " is not supported"));
  }
}

ReduceOp to_op(const c10d::ReduceOp& op, const std::string& call) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    default:
      throw Error(
          ErrorKind::kInvalidArgument,
          concat(call, ": only SUM, AVG, MIN, MAX and PRODUCT are supported so far, not op ",
                 static_cast<int>(op.op_)));
  }
}

// True if no two elements share memory, by strides in rising order: each must step over all that
// smaller ones reach.
bool elements_are_distinct(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

// True if tensors of one shape write an element of the same memory. Equal strides: an element is
// shared if the distance of the views is a sum of strides, each taken less than its size.
bool distance_is_reachable(const std::vector<std::pair<int64_t, int64_t>>& dims, size_t dim,
                           int64_t distance) {
  if (dim == dims.size()) return distance == 0;
  const auto [stride, size] = dims[dim];
  const int64_t below = distance / stride - (distance % stride < 0 ? 1 : 0);
  for (const int64_t steps : {below, below + 1})
    if (std::abs(steps) < size && distance_is_reachable(dims, dim + 1, distance - steps * stride))
      return true;
  return false;
}

int64_t last_offset(const at::Tensor& tensor) {
  int64_t offset = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    offset += (tensor.size(dim) - 1) * tensor.stride(dim);
  return offset;
}

bool share_elements(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.is_alias_of(b)) return false;
  if (a.sizes() != b.sizes() || a.strides() != b.strides())  // interleaved or not: not told apart
    return a.storage_offset() <= last_offset(b) && b.storage_offset() <= last_offset(a);
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size; widest first
  for (int64_t dim = 0; dim < a.dim(); ++dim)
    if (a.size(dim) > 1) dims.emplace_back(a.stride(dim), a.size(dim));
  std::sort(dims.rbegin(), dims.rend());
  return distance_is_reachable(dims, 0, b.storage_offset() - a.storage_offset());
}

// ---- one call

// Builds a Request from tensors: checks them, and replaces those that are not plain memory by
// contiguous copies, which are written back when the operation is done.
class Call {
 public:
  Call(const Communicator& communicator, Operation operation, OpType type)
      : communicator_(communicator), type_(type) {
    request_.operation = operation;
  }

  // What an error message begins with.
  std::string name() const {
    return concat("rank ", communicator_.rank(), ": ", name_of(request_.operation));
  }

  void set_dtype(const at::Tensor& tensor) {
    request_.dtype = to_dtype(tensor.scalar_type(), name());
    request_.count = tensor.numel();
    dtype_ = tensor.scalar_type();
  }
  void set_op(const c10d::ReduceOp& op) { request_.op = to_op(op, name()); }
  void set_timeout(std::chrono::milliseconds timeout) {
    if (timeout > std::chrono::milliseconds(0)) request_.timeout = timeout;
  }
  Request& request() { return request_; }

  const void* input(const at::Tensor& tensor, int64_t count) {
    return plain(tensor, count, false).const_data_ptr();
  }
  void* output(const at::Tensor& tensor, int64_t count) {
    return plain(tensor, count, true).data_ptr();
  }

  c10::intrusive_ptr<c10d::Work> submit(Communicator& communicator, bool async,
                                        std::vector<at::Tensor> outputs) {
    auto work = c10::make_intrusive<C10dWork>(communicator_.rank(), type_, std::move(outputs));
    auto pending = communicator.submit(std::move(request_), async, nullptr);
    if (!pending) {
      write_back(copies_);
      work->complete(nullptr);
      return work;
    }
    pending->on_done(
        [work, copies = std::move(copies_), kept = std::move(kept_)](std::exception_ptr exception) {
          if (!exception) exception = outcome_of_write_back(copies);
          work->complete(for_torch(exception));
        });
    return work;
  }

 private:
  struct Copy {
    at::Tensor temporary, destination;
  };
  struct Written {
    at::Tensor tensor;
    bool is_plain;
  };

  static void write_back(const std::vector<Copy>& copies) {
    if (copies.empty()) return;
    at::NoGradGuard no_grad;
    for (const Copy& copy : copies) copy.destination.copy_(copy.temporary);
  }
  // On the worker, where an exception that escapes would end the process.
  static std::exception_ptr outcome_of_write_back(const std::vector<Copy>& copies) {
    try {
      write_back(copies);
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  at::Tensor plain(const at::Tensor& tensor, int64_t count, bool written) {
    const auto what = [&] {
      std::ostringstream text;
      text << name() << ": tensor of shape " << tensor.sizes() << " and dtype "
           << tensor.scalar_type();
      return text.str();
    };
    PYCOMM_CHECK(tensor.device().is_cpu(), kInvalidArgument, what(), " is on device ",
                 tensor.device().str(),
                 ", but this group works on CPU tensors; for CUDA use "
                 "init_process_group('cpu:pycomm,cuda:nccl')");
    PYCOMM_CHECK(tensor.layout() == at::kStrided, kInvalidArgument, what(),
                 " is sparse, which is not supported; pass tensor.to_dense()");
    PYCOMM_CHECK(tensor.scalar_type() == dtype_, kInvalidArgument, what(),
                 " does not match the call's other tensors, of dtype ", c10::toString(dtype_));
    PYCOMM_CHECK(tensor.numel() == count, kInvalidArgument, what(), " holds ", tensor.numel(),
                 " elements, but the call needs ", count);
    const bool is_plain = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    if (written) {
      for (const Written& other : written_)  // two plain ones: Communicator::check_overlap
        PYCOMM_CHECK((is_plain && other.is_plain) || !share_elements(other.tensor, tensor),
                     kInvalidArgument, what(), " overlaps another output");
      written_.push_back({tensor, is_plain});
    }
    if (is_plain) {
      kept_.push_back(tensor);
      return tensor;
    }
    PYCOMM_CHECK(!written || elements_are_distinct(tensor), kInvalidArgument, what(),
                 " has elements that share memory (an expanded tensor?); pass tensor.contiguous()");
    at::NoGradGuard no_grad;
    at::Tensor temporary = at::empty(tensor.sizes(), tensor.options());
    temporary.copy_(tensor);
    kept_.push_back(temporary);
    if (written) copies_.push_back({temporary, tensor});
    return temporary;
  }

  const Communicator& communicator_;
  OpType type_;
  Request request_;
  at::ScalarType dtype_ = at::kFloat;
  std::vector<at::Tensor> kept_;  // alive until the operation is done
  std::vector<Copy> copies_;
  std::vector<Written> written_;
};

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const Call& call) {
  PYCOMM_CHECK(tensors.size() == 1, kInvalidArgument, call.name(), ": expects one tensor, not ",
               tensors.size());
  return tensors[0];
}
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, size_t size,
                                    const Call& call) {
  PYCOMM_CHECK(lists.size() == 1 && lists[0].size() == size, kInvalidArgument, call.name(),
               ": expects one list with a tensor for each of ", size, " ranks, not ",
               lists.empty() ? 0 : lists[0].size(), " tensors");
  return lists[0];
}

}  // namespace

// ---- C10dWork

C10dWork::C10dWork(int rank, OpType op, std::vector<at::Tensor> outputs)
    : Work(rank, op), outputs_(std::move(outputs)) {}

void C10dWork::complete(std::exception_ptr exception) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    settled_ = true;
    failure_ = exception;
    future = future_;
  }
  finish(exception);
  if (future) mark(*future);
}

void C10dWork::mark(c10::ivalue::Future& future) const {
  if (failure_)
    future.setError(failure_);
  else
    future.markCompleted(c10::IValue(outputs_));
}

bool C10dWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const bool limited = timeout > kNoTimeout;
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto slice = [&]() -> std::chrono::nanoseconds {
    if (!limited) return kSleep;
    return std::min<std::chrono::nanoseconds>(kSleep, deadline - Clock::now());
  };
  while (!cv_.wait_for(lock, slice(), [this] { return completed_; })) {
    if (limited && Clock::now() >= deadline) {
      const Error error(
          ErrorKind::kTimeout,
          concat("rank ", rank_, ": wait(timeout=", timeout.count(), " ms) for ",
                 c10d::opTypeToString(opType_), " ended before the operation, which goes on"));
      throw C10dError(error);
    }
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void C10dWork::abort() {
  throw C10dError(
      Error(ErrorKind::kError, "a single operation cannot be aborted; abort the process group"));
}

c10::intrusive_ptr<c10::ivalue::Future> C10dWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (settled_) mark(*future_);
  }
  return future_;
}

// ---- C10dBackend

C10dBackend::C10dBackend(std::shared_ptr<Communicator> communicator)
    : Backend(communicator->rank(), communicator->world_size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<Options>(kBackendName, communicator_->timeout())) {}

void C10dBackend::setTimeout(std::chrono::milliseconds timeout) {
  translated([&] { communicator_->set_timeout(timeout); });
  options_->timeout = timeout;
}

void C10dBackend::abort() { communicator_->abort("abort() was called"); }
void C10dBackend::shutdown() {
  translated([&] { communicator_->shutdown(); });
}

C10dBackend::WorkPtr C10dBackend::allreduce(Tensors& tensors,
                                            const c10d::AllreduceOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kAllReduce, OpType::ALLREDUCE);
    const at::Tensor& tensor = only(tensors, call);
    call.set_dtype(tensor);
    call.set_op(options.reduceOp);
    call.set_timeout(options.timeout);
    call.request().input = call.request().output = call.output(tensor, tensor.numel());
    return call.submit(*communicator_, options.asyncOp, tensors);
  });
}

C10dBackend::WorkPtr C10dBackend::broadcast(Tensors& tensors,
                                            const c10d::BroadcastOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kBroadcast, OpType::BROADCAST);
    const at::Tensor& tensor = only(tensors, call);
    call.set_dtype(tensor);
    call.set_timeout(options.timeout);
    call.request().root = static_cast<int>(options.rootRank);
    call.request().input = call.request().output = call.output(tensor, tensor.numel());
    return call.submit(*communicator_, options.asyncOp, tensors);
  });
}

C10dBackend::WorkPtr C10dBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kAllGather, OpType::ALLGATHER);
    const at::Tensor& input = only(inputs, call);
    const Tensors& list = only(outputs, static_cast<size_t>(size_), call);
    call.set_dtype(input);
    call.set_timeout(options.timeout);
    call.request().input = call.input(input, input.numel());
    for (const at::Tensor& output : list)
      call.request().outputs.push_back({call.output(output, input.numel()), input.numel()});
    return call.submit(*communicator_, options.asyncOp, list);
  });
}

C10dBackend::WorkPtr C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kAllGather, OpType::_ALLGATHER_BASE);
    call.set_dtype(input);
    call.set_timeout(options.timeout);
    call.request().input = call.input(input, input.numel());
    call.request().output = call.output(output, input.numel() * size_);
    return call.submit(*communicator_, options.asyncOp, {output});
  });
}

C10dBackend::WorkPtr C10dBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kReduceScatter, OpType::REDUCE_SCATTER);
    const at::Tensor& output = only(outputs, call);
    const Tensors& list = only(inputs, static_cast<size_t>(size_), call);
    call.set_dtype(output);
    call.set_op(options.reduceOp);
    call.set_timeout(options.timeout);
    for (const at::Tensor& input : list)
      call.request().inputs.push_back({call.input(input, output.numel()), output.numel()});
    call.request().output = call.output(output, output.numel());
    return call.submit(*communicator_, options.asyncOp, outputs);
  });
}

C10dBackend::WorkPtr C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kReduceScatter, OpType::_REDUCE_SCATTER_BASE);
    call.set_dtype(output);
    call.set_op(options.reduceOp);
    call.set_timeout(options.timeout);
    call.request().input = call.input(input, output.numel() * size_);
    call.request().output = call.output(output, output.numel());
    return call.submit(*communicator_, options.asyncOp, {output});
  });
}

C10dBackend::WorkPtr C10dBackend::barrier(const c10d::BarrierOptions& options) {
  return translated([&] {
    Call call(*communicator_, Operation::kBarrier, OpType::BARRIER);
    call.set_timeout(options.timeout);
    return call.submit(*communicator_, options.asyncOp, {});
  });
}

// ---- coalesced forms: one operation after another; the last one's completion is that of all

namespace {
// Runs submit(i) for i < count and returns the last work; earlier ones are waited for by the
// queue's order. A failure of an earlier one ends the communicator, so the last one reports it too.
template <class Submit>
c10::intrusive_ptr<c10d::Work> in_sequence(int rank, size_t count, Submit&& submit) {
  c10::intrusive_ptr<c10d::Work> last;
  for (size_t i = 0; i < count; ++i) last = submit(i);
  if (last) return last;
  auto nothing = c10::make_intrusive<C10dWork>(rank, OpType::COALESCED, std::vector<at::Tensor>{});
  nothing->complete(nullptr);
  return nothing;
}
}  // namespace

C10dBackend::WorkPtr C10dBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return in_sequence(rank_, tensors.size(), [&](size_t i) {
    Tensors one{tensors[i]};
    return allreduce(one, options);
  });
}

C10dBackend::WorkPtr C10dBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return in_sequence(rank_, inputs.size(),
                     [&](size_t i) { return _allgather_base(outputs.at(i), inputs[i], options); });
}

C10dBackend::WorkPtr C10dBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return in_sequence(rank_, inputs.size(), [&](size_t i) {
    return _reduce_scatter_base(outputs.at(i), inputs[i], options);
  });
}

// ---- DDP

c10::intrusive_ptr<c10::ivalue::Future> average(Communicator& communicator,
                                                const at::Tensor& tensor, bool async) {
  return translated([&] {
    Call call(communicator, Operation::kAllReduce, OpType::ALLREDUCE);
    call.set_dtype(tensor);
    call.request().op = ReduceOp::kAvg;
    call.request().input = call.request().output = call.output(tensor, tensor.numel());
    return call.submit(communicator, async, {tensor})->getFuture();
  });
}

}  // namespace pycomm
