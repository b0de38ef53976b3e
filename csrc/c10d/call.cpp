#include "call.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "errors.h"
#include "gpu.h"

namespace pycomm {
namespace {

// ---- argument translation

// `call` makes the beginning of an error message, when it is needed.
template <class Name>
DType to_dtype(at::ScalarType type, Name&& call) {
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
                  concat(call(), ": dtype ", c10::toString(type), " is not supported"));
  }
}

void complete_with(const c10::intrusive_ptr<C10dWork>& work,
                   const std::shared_ptr<Pending>& pending) {
  pending->on_done([work](std::exception_ptr exception) { work->complete(for_torch(exception)); });
}

template <class Name>
ReduceOp to_op(const c10d::ReduceOp& op, Name&& call) {
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
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      throw Error(ErrorKind::kInvalidArgument,
                  concat(call(), ": unknown reduce op ", static_cast<int>(op.op_)));
  }
}

// The factor of a PREMUL_SUM.
double factor_of(const c10d::ReduceOp& op, const std::string& call) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  PYCOMM_CHECK(supplement, kInvalidArgument, call,
               ": PREMUL_SUM comes without its factor; make it "
               "with torch.distributed._make_nccl_premul_sum(factor)");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
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

// Names of operations in profiles.
const char* title_of(Operation operation) {
#define PYCOMM_CASE(enumerator, text) \
  case Operation::enumerator:         \
    return "pycomm:" text;
  switch (operation) { PYCOMM_OPERATIONS(PYCOMM_CASE) }
#undef PYCOMM_CASE
  return "pycomm";
}

// torch's names for the forms with one tensor, and Gloo's for any source.
const char* title_of(Operation operation, c10d::OpType type) {
  switch (type) {
    case c10d::OpType::_ALLGATHER_BASE:
      return "pycomm:all_gather_into_tensor";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "pycomm:reduce_scatter_tensor";
    case c10d::OpType::RECVANYSOURCE:
      return "pycomm:recvAnySource";
    default:
      return title_of(operation);
  }
}

}  // namespace

Call::Call(const Target& target, Operation operation, c10d::OpType type, uint64_t sequence)
    : target_(target), type_(type), sequence_(sequence) {
  request_.operation = operation;
}

std::string Call::name() const {
  return concat("rank ", target_.communicator->rank(), ": ", name_of(request_.operation));
}

void Call::set_dtype(const at::Tensor& tensor) {
  request_.dtype = to_dtype(tensor.scalar_type(), [this] { return name(); });
  request_.count = tensor.numel();
  request_.shape = {tensor.dim(), tensor.sizes().data()};
  dtype_ = tensor.scalar_type();
  device_ = tensor.device();
  PYCOMM_CHECK(target_.on_gpu() || device_.is_cpu(), kInvalidArgument, name(tensor),
               " is on device ", device_.str(), ", but this group works on CPU and CUDA tensors");
}

void Call::set_op(const c10d::ReduceOp& op) {
  request_.op = to_op(op, [this] { return name(); });
  if (request_.op == ReduceOp::kPremulSum) request_.factor = factor_of(op, name());
}

// ---- tensors

const void* Call::input(const at::Tensor& tensor, int64_t count) {
  if (at::hasCallbacks()) sources_.push_back(tensor);
  return plain(tensor, count, false).const_data_ptr();
}
void* Call::output(const at::Tensor& tensor, int64_t count) {
  return plain(tensor, count, true).data_ptr();
}

void Call::inputs(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    request_.inputs.push_back({input(tensor, -1), tensor.numel()});
}
void Call::outputs(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    request_.outputs.push_back({output(tensor, -1), tensor.numel()});
}

std::vector<int64_t> Call::lengths(const at::Tensor& tensor,
                                   const std::vector<int64_t>& splits) const {
  const int64_t ranks = world_size(), rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    PYCOMM_CHECK(rows % ranks == 0, kInvalidArgument, name(), ": the first dimension, ", rows,
                 ", cannot be divided equally among ", ranks, " ranks; give the split sizes");
    return std::vector<int64_t>(ranks, tensor.numel() / ranks);
  }
  PYCOMM_CHECK(static_cast<int64_t>(splits.size()) == ranks, kInvalidArgument, name(), ": needs ",
               ranks, " split sizes, one per rank, not ", splits.size());
  int64_t total = 0;
  for (const int64_t split : splits) {
    PYCOMM_CHECK(split >= 0, kInvalidArgument, name(), ": a split size is negative: ", split);
    total += split;
  }
  PYCOMM_CHECK(total == rows, kInvalidArgument, name(), ": the split sizes add up to ", total,
               ", but the first dimension is ", rows);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> lengths;
  for (const int64_t split : splits) lengths.push_back(split * row);
  return lengths;
}

void Call::split_input(const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  const auto counts = lengths(tensor, splits);
  const char* data = static_cast<const char*>(input(tensor, -1));
  for (const int64_t count : counts) {
    request_.inputs.push_back({data, count});
    data += count * bytes_of(request_.dtype);
  }
}
void Call::split_output(const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  const auto counts = lengths(tensor, splits);
  char* data = static_cast<char*>(output(tensor, -1));
  for (const int64_t count : counts) {
    request_.outputs.push_back({data, count});
    data += count * bytes_of(request_.dtype);
  }
}

void Call::write_back(const std::vector<Copy>& copies) {
  if (copies.empty()) return;
  at::NoGradGuard no_grad;
  for (const Copy& copy : copies) copy.destination.copy_(copy.temporary);
}

// On the worker, where an exception that escapes would end the process.
std::exception_ptr Call::outcome_of_write_back(const std::vector<Copy>& copies) {
  try {
    write_back(copies);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

std::string Call::name(const at::Tensor& tensor) const {
  std::ostringstream text;
  text << name() << ": tensor of shape " << tensor.sizes() << " and dtype " << tensor.scalar_type();
  return text.str();
}

at::Tensor Call::plain(const at::Tensor& tensor, int64_t count, bool written) {
  const auto what = [&] { return name(tensor); };
  PYCOMM_CHECK(tensor.device() == device_, kInvalidArgument, what(), " is on device ",
               tensor.device().str(), ", but the call's other tensors are on ", device_.str());
  PYCOMM_CHECK(tensor.layout() == at::kStrided, kInvalidArgument, what(),
               " is sparse, which only all_reduce supports; pass tensor.to_dense()");
  PYCOMM_CHECK(tensor.scalar_type() == dtype_, kInvalidArgument, what(),
               " does not match the call's other tensors, of dtype ", c10::toString(dtype_));
  PYCOMM_CHECK(count < 0 || tensor.numel() == count, kInvalidArgument, what(), " holds ",
               tensor.numel(), " elements, but the call needs ", count);
  const bool is_plain = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  if (written) {
    for (const Written& other : written_)  // two plain ones: Communicator::check_overlap
      PYCOMM_CHECK((is_plain && other.is_plain) || !share_elements(other.tensor, tensor),
                   kInvalidArgument, what(), " overlaps another output");
    written_.push_back({tensor, is_plain});
  }
  PYCOMM_CHECK(is_plain || !written || !collected_, kInvalidArgument, what(),
               " is not contiguous, which results of a group of calls have to be");
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

// ---- submission

void Call::take_event_of(Call& earlier) {
  std::vector<at::Tensor> both = earlier.profiled();
  both.insert(both.end(), profiled().begin(), profiled().end());
  sources_ = std::move(both);
  earlier.has_event_ = false;
}

c10::intrusive_ptr<C10dWork> Call::make_work(std::vector<at::Tensor> outputs) {
  const C10dWork::Description description{
      target_.communicator->rank(), type_,
      has_event_ ? title_of(request_.operation, type_) : nullptr, sequence_};
  auto work =
      c10::make_intrusive<C10dWork>(description, profiled(), std::move(outputs), target_.observers);
  if (target_.on_gpu()) work->set_device(device_);
  if (target_.observers && target_.observers->any()) {
    Observers::Extensions claimed;
    const auto extra = target_.observers->claim_extensions(&claimed);
    if (extra.count() > 0)
      timeout_ = extra + (timeout_.count() > 0 ? timeout_ : target_.communicator->timeout());
    work->set_extensions(std::move(claimed));
  }
  return work;
}

// start() returns what is pending, or null if all is done.
template <class Start>
c10::intrusive_ptr<C10dWork> Call::start(std::vector<at::Tensor> outputs, Start&& start) {
  auto work = make_work(std::move(outputs));
  std::shared_ptr<Pending> pending;
  try {
    pending = start();
    if (!pending && !collected_) write_back(copies_);
  } catch (...) {
    work->complete(for_torch(std::current_exception()));
    throw;
  }
  if (collected_) {
    collected_->push_back(work);
    return work;
  }
  if (!pending) {
    work->complete(nullptr);
    return work;
  }
  work->set_pending(
      pending, request_.operation == Operation::kSend || request_.operation == Operation::kRecv);
  if (target_.on_gpu()) {
    complete_with(work, pending);
    return work;
  }
  pending->on_done(
      [work, copies = std::move(copies_), kept = std::move(kept_)](std::exception_ptr exception) {
        if (!exception) exception = outcome_of_write_back(copies);
        work->complete(for_torch(exception));
      });
  return work;
}

void Call::end_collected(const Collected& works, const std::shared_ptr<Pending>& pending) {
  for (const auto& work : works) {
    if (!pending) {  // it is on the caller's stream
      work->complete(nullptr);
      continue;
    }
    work->set_pending(pending, false);
    complete_with(work, pending);
  }
}

void Call::fail_collected(const Collected& works, std::exception_ptr failure) {
  for (const auto& work : works) work->complete(for_torch(failure));
}

// On a GPU the communicator keeps the tensors, also of what failed until nothing can use them.
// Those of a call on the caller's stream torch's allocator keeps, which goes by streams.
std::shared_ptr<void> Call::keep_alive(bool async) {
  if (!target_.on_gpu() || !(async || collected_)) return nullptr;
  return std::make_shared<std::vector<at::Tensor>>(std::move(kept_));
}

// On a GPU, results that are copied back are copied on the caller's stream, so the operation runs
// there, too.
c10::intrusive_ptr<C10dWork> Call::submit(bool async, std::vector<at::Tensor> outputs) {
  return start(std::move(outputs), [&] {
    request_.timeout = timeout_;
    if (target_.on_gpu()) {
      request_.stream = current_stream(device_);
      async = async && copies_.empty();
    }
    return target_.communicator->submit(std::move(request_), async, keep_alive(async));
  });
}

c10::intrusive_ptr<C10dWork> Call::post(int peer, int tag, void* data) {
  return start({kept_.at(0)}, [&] {
    Message message;
    message.operation = request_.operation;
    message.dtype = request_.dtype;
    message.count = request_.count;
    message.peer = peer;
    message.tag = tag;
    message.data = data;
    message.timeout = timeout_;
    message.shape = request_.shape;
    if (target_.on_gpu()) message.stream = current_stream(device_);
    return target_.communicator->post(message, keep_alive(true));
  });
}

c10::intrusive_ptr<C10dWork> Call::run_together(std::function<void()> work, bool async,
                                                std::vector<at::Tensor> outputs) {
  return start(std::move(outputs),
               [&] { return target_.communicator->run_together(std::move(work), async); });
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const Call& call) {
  PYCOMM_CHECK(tensors.size() == 1, kInvalidArgument, call.name(), ": expects one tensor, not ",
               tensors.size());
  return tensors[0];
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    const Call& call) {
  PYCOMM_CHECK(lists.size() == 1 && static_cast<int>(lists[0].size()) == call.world_size(),
               kInvalidArgument, call.name(), ": expects one list with a tensor for each of ",
               call.world_size(), " ranks, not ", lists.empty() ? 0 : lists[0].size(), " tensors");
  return lists[0];
}

}  // namespace pycomm
