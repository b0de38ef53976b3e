// Communicator for Python: tensors become pointers and counts, the GIL is released while it works.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "communicator.h"
#include "error.h"
#include "interrupt.h"
#include "python_tensor.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using std::chrono::milliseconds;
using Timeout = std::optional<std::chrono::microseconds>;  // none: the communicator's
using Counts = std::optional<std::vector<int64_t>>;

// At least a millisecond, since 0 means "the communicator's" to a Request.
milliseconds to_limit(const Timeout& timeout, int rank) {
  if (!timeout) return milliseconds(0);
  PYCOMM_CHECK(timeout->count() != 0, kInvalidArgument, "rank ", rank,
               ": a timeout of 0 leaves no time; leave it out for the communicator's");
  return timeout->count() < 0 ? std::chrono::floor<milliseconds>(*timeout)
                              : std::chrono::ceil<milliseconds>(*timeout);
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// An operation's Python arguments, kept alive until the worker is done with them. Once the
// interpreter goes, they are left to it: the GIL can no longer be had.
std::shared_ptr<void> keep(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* pointer) {
    if (!Py_IsInitialized() || is_finalizing()) return;
    py::gil_scoped_acquire gil;
    py::handle(static_cast<PyObject*>(pointer)).dec_ref();
  });
}

class PyPending {
 public:
  explicit PyPending(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}
  bool is_done() const { return !pending_ || pending_->is_done(); }
  int source() const { return pending_ ? pending_->source() : -1; }
  // On a GPU the caller's stream waits, and the host does not.
  void wait() const {
    if (!pending_) return;
    if (pending_->device() < 0 || pending_->is_done()) return synchronize();
    pending_->order(stream_source()(pending_->device()));
  }
  void synchronize() const {
    if (!pending_) return;
    while (!pending_->wait(kSleep)) check_interrupt();
    if (auto exception = pending_->exception()) std::rethrow_exception(exception);
  }

 private:
  std::shared_ptr<Pending> pending_;  // null: it was done before submit returned
};
using Result = std::unique_ptr<PyPending>;

// A communicator of a GPU looks itself at where memory is.
TensorView view_for(const Communicator& communicator, const py::handle& tensor,
                    const Caller& caller) {
  if (!communicator.works_on_gpu()) return view_of(tensor, caller);
  return view_of(tensor, caller, Memory::kAny, stream_source());
}

// One call: a Request that is built from tensors.
class Call {
 public:
  Call(Communicator& communicator, Operation operation)
      : communicator_(communicator), caller_{communicator.rank(), operation} {
    request_.operation = operation;
  }
  Request& request() { return request_; }
  int world_size() const { return communicator_.world_size(); }

  TensorView any_view(const py::handle& tensor) { return view_for(communicator_, tensor, caller_); }
  // Where all tensors of a call have one dtype.
  TensorView view(const py::handle& tensor) {
    const TensorView view = any_view(tensor);
    if (!std::exchange(has_dtype_, true)) request_.dtype = view.dtype;
    PYCOMM_CHECK(view.dtype == request_.dtype, kInvalidArgument, caller_,
                 ": dtypes differ: ", name_of(request_.dtype), " and ", name_of(view.dtype));
    return view;
  }
  // The tensor whose count is the call's.
  TensorView counted(const py::handle& tensor) {
    const TensorView view = this->view(tensor);
    request_.count = view.count;
    request_.shape = view.shape;
    return view;
  }
  // One buffer for world_size parts of the call's count.
  void* whole(const py::handle& tensor) {
    const TensorView view = this->view(tensor);
    PYCOMM_CHECK(view.count == request_.count * world_size(), kInvalidArgument, caller_,
                 ": one buffer holds ", view.count, " elements, but ", world_size(), " ranks with ",
                 request_.count, " elements each need ", request_.count * world_size());
    return view.data;
  }
  // A list with a tensor per rank. An empty one would look like the single-buffer form; other wrong
  // lengths are noticed by Communicator::check.
  template <class Part>
  void list(std::vector<Part>& parts, const py::list& tensors) {
    PYCOMM_CHECK(!tensors.empty(), kInvalidArgument, caller_,
                 ": needs a list with one tensor per rank, ", world_size(), ", not an empty one");
    for (const py::handle tensor : tensors) {
      const TensorView view = this->view(tensor);
      parts.push_back({view.data, view.count});
    }
  }
  // One buffer cut into parts of the given counts, or into equal ones.
  template <class Part>
  void split(std::vector<Part>& parts, const py::handle& tensor, const Counts& counts) {
    const TensorView view = this->view(tensor);
    const int64_t even = view.count / world_size();
    PYCOMM_CHECK(counts || even * world_size() == view.count, kInvalidArgument, caller_, ": ",
                 view.count, " elements cannot be divided equally among ", world_size(),
                 " ranks; give the counts");
    PYCOMM_CHECK(!counts || counts->size() == static_cast<size_t>(world_size()), kInvalidArgument,
                 caller_, ": needs one count for each of ", world_size(), " ranks, not ",
                 counts ? counts->size() : 0);
    char* data = static_cast<char*>(view.data);
    int64_t total = 0;
    for (int rank = 0; rank < world_size(); ++rank) {
      const int64_t count = counts ? (*counts)[rank] : even;
      parts.push_back({data + total * bytes_of(view.dtype), count});
      PYCOMM_CHECK(count >= 0, kInvalidArgument, caller_, ": a count is negative: ", count);
      total += count;
    }
    PYCOMM_CHECK(total == view.count, kInvalidArgument, caller_, ": the counts add up to ", total,
                 ", but the tensor holds ", view.count);
  }
  void set_op(const std::string& op, double factor) {
    static const std::string kSum = "sum";
    request_.op = op == kSum ? ReduceOp::kSum : parse_op(op, caller_);
    request_.factor = factor;
    PYCOMM_CHECK(factor == 1 || op == "premul_sum", kInvalidArgument, caller_,
                 ": a factor needs op 'premul_sum', not '", op, "'");
  }
  void set_algorithm(const std::string& algorithm) {
    static const std::string kAuto = "auto";
    if (algorithm != kAuto) request_.algorithm = parse_algorithm(algorithm, caller_);
  }

  Result submit(Timeout timeout, bool async, py::object tensors) {
    request_.timeout = to_limit(timeout, caller_.rank);
    if (communicator_.works_on_gpu()) request_.stream = stream_source()(-1);
    std::shared_ptr<void> kept = async ? keep(std::move(tensors)) : nullptr;
    std::shared_ptr<Pending> pending;
    {
      py::gil_scoped_release release;
      pending = communicator_.submit(std::move(request_), async, std::move(kept));
    }
    return async ? std::make_unique<PyPending>(std::move(pending)) : nullptr;
  }

 private:
  Communicator& communicator_;
  const Caller caller_;
  Request request_;
  bool has_dtype_ = false;
};

// ---- the operations

Result all_reduce(Communicator& self, py::object tensor, const std::string& op, double factor,
                  const std::string& algorithm, Timeout timeout, bool async) {
  Call call(self, Operation::kAllReduce);
  call.set_op(op, factor);
  call.set_algorithm(algorithm);
  call.request().input = call.request().output = call.counted(tensor).data;
  return call.submit(timeout, async, std::move(tensor));
}

// On a GPU counts lie in its memory, as six int64; see codec_counts.
CodecCounts* counts_at(Communicator& self, const py::object& counts) {
  if (!self.works_on_gpu()) return counts.cast<CodecCounts*>();
  const Caller caller{self.rank(), Operation::kAllReduce};
  const TensorView view = view_for(self, counts, caller);
  PYCOMM_CHECK(view.dtype == DType::kInt64 && view.bytes() == sizeof(CodecCounts), kInvalidArgument,
               caller, ": counts on a GPU are ", sizeof(CodecCounts) / sizeof(int64_t),
               " int64, not ", view.count, " ", name_of(view.dtype));
  return static_cast<CodecCounts*>(view.data);
}

// `residual` and `counts` are used until the operation is done.
Result compressed_all_reduce(Communicator& self, py::list tensors, const Codec& codec, float factor,
                             float divisor, py::object residual, bool infinite, bool stochastic,
                             uint64_t seed, py::object counts, const std::string& algorithm,
                             Timeout timeout, bool async) {
  Call call(self, Operation::kAllReduce);
  call.set_algorithm(algorithm);
  auto compression = std::make_shared<Compression>();
  compression->codec = codec;
  compression->factor = factor;
  compression->divisor = divisor;
  compression->infinite = infinite;
  compression->stochastic = stochastic;
  compression->seed = seed;
  for (const py::handle tensor : tensors) {
    const TensorView view = call.any_view(tensor);
    compression->tensors.push_back({view.data, view.count, view.dtype});
  }
  call.request().dtype = compression->dtype();
  call.request().count = compression->count();
  if (!residual.is_none()) {
    const Caller caller{self.rank(), Operation::kAllReduce};
    const TensorView view = view_for(self, residual, caller);
    PYCOMM_CHECK(view.dtype == DType::kFloat32 && view.count == call.request().count,
                 kInvalidArgument, caller, ": the residual must be ", call.request().count,
                 " float32, not ", view.count, " ", name_of(view.dtype));
    compression->residual = static_cast<float*>(view.data);
  }
  if (!counts.is_none()) compression->counts = counts_at(self, counts);
  call.request().compression = std::move(compression);
  return call.submit(timeout, async, py::make_tuple(tensors, residual, counts));
}

Result reduce(Communicator& self, py::object tensor, int root, const std::string& op, double factor,
              Timeout timeout, bool async) {
  Call call(self, Operation::kReduce);
  call.set_op(op, factor);
  void* data = call.counted(tensor).data;
  call.request().root = root;
  call.request().input = data;
  call.request().output = self.rank() == root ? data : nullptr;
  return call.submit(timeout, async, std::move(tensor));
}

Result broadcast(Communicator& self, py::object tensor, int root, Timeout timeout, bool async) {
  Call call(self, Operation::kBroadcast);
  call.request().root = root;
  call.request().input = call.request().output = call.counted(tensor).data;
  return call.submit(timeout, async, std::move(tensor));
}

Result all_gather(Communicator& self, py::list outputs, py::object input, Timeout timeout,
                  bool async) {
  Call call(self, Operation::kAllGather);
  call.request().input = call.counted(input).data;
  call.list(call.request().outputs, outputs);
  return call.submit(timeout, async, py::make_tuple(outputs, input));
}

Result all_gather_single(Communicator& self, py::object output, py::object input, Timeout timeout,
                         bool async) {
  Call call(self, Operation::kAllGather);
  call.request().input = call.counted(input).data;
  call.request().output = call.whole(output);
  return call.submit(timeout, async, py::make_tuple(output, input));
}

Result gather(Communicator& self, std::optional<py::list> outputs, py::object input, int root,
              Timeout timeout, bool async) {
  Call call(self, Operation::kGather);
  call.request().root = root;
  call.request().input = call.counted(input).data;
  if (outputs) call.list(call.request().outputs, *outputs);
  return call.submit(timeout, async, py::make_tuple(outputs, input));
}

Result gather_single(Communicator& self, py::object output, py::object input, int root,
                     Timeout timeout, bool async) {
  Call call(self, Operation::kGather);
  call.request().root = root;
  call.request().input = call.counted(input).data;
  if (!output.is_none()) {
    call.whole(output);
    call.split(call.request().outputs, output, {});
  }
  return call.submit(timeout, async, py::make_tuple(output, input));
}

Result scatter(Communicator& self, py::object output, std::optional<py::list> inputs, int root,
               Timeout timeout, bool async) {
  Call call(self, Operation::kScatter);
  call.request().root = root;
  call.request().output = call.counted(output).data;
  if (inputs) call.list(call.request().inputs, *inputs);
  return call.submit(timeout, async, py::make_tuple(output, inputs));
}

Result scatter_single(Communicator& self, py::object output, py::object input, int root,
                      Timeout timeout, bool async) {
  Call call(self, Operation::kScatter);
  call.request().root = root;
  call.request().output = call.counted(output).data;
  if (!input.is_none()) {
    call.whole(input);
    call.split(call.request().inputs, input, {});
  }
  return call.submit(timeout, async, py::make_tuple(output, input));
}

Result reduce_scatter(Communicator& self, py::object output, py::list inputs, const std::string& op,
                      double factor, Timeout timeout, bool async) {
  Call call(self, Operation::kReduceScatter);
  call.set_op(op, factor);
  call.request().output = call.counted(output).data;
  call.list(call.request().inputs, inputs);
  return call.submit(timeout, async, py::make_tuple(output, inputs));
}

Result reduce_scatter_single(Communicator& self, py::object output, py::object input,
                             const std::string& op, double factor, Timeout timeout, bool async) {
  Call call(self, Operation::kReduceScatter);
  call.set_op(op, factor);
  call.request().output = call.counted(output).data;
  call.request().input = call.whole(input);
  return call.submit(timeout, async, py::make_tuple(output, input));
}

Result all_to_all(Communicator& self, py::list outputs, py::list inputs, Timeout timeout,
                  bool async) {
  Call call(self, Operation::kAllToAll);
  call.list(call.request().outputs, outputs);
  call.list(call.request().inputs, inputs);
  for (const ConstSpan& part : call.request().inputs) call.request().count += part.count;
  return call.submit(timeout, async, py::make_tuple(outputs, inputs));
}

Result all_to_all_single(Communicator& self, py::object output, py::object input,
                         const Counts& output_counts, const Counts& input_counts, Timeout timeout,
                         bool async) {
  Call call(self, Operation::kAllToAll);
  call.split(call.request().outputs, output, output_counts);
  call.split(call.request().inputs, input, input_counts);
  call.counted(input);
  return call.submit(timeout, async, py::make_tuple(output, input));
}

Result barrier(Communicator& self, Timeout timeout, bool async) {
  return Call(self, Operation::kBarrier).submit(timeout, async, py::none());
}

void monitored_barrier(Communicator& self, bool wait_all_ranks, Timeout timeout) {
  Call call(self, Operation::kMonitoredBarrier);
  call.request().wait_all_ranks = wait_all_ranks;
  call.submit(timeout, false, py::none());
}

// ---- messages

Message message_of(Communicator& self, Operation operation, const py::object& tensor, int peer,
                   int tag, const Timeout& timeout) {
  const TensorView view = view_for(self, tensor, Caller{self.rank(), operation});
  Message message;
  message.operation = operation;
  message.dtype = view.dtype;
  message.peer = peer;
  message.tag = tag;
  message.count = view.count;
  message.data = view.data;
  message.timeout = to_limit(timeout, self.rank());
  message.shape = view.shape;
  if (self.works_on_gpu()) message.stream = stream_source()(-1);
  return message;
}

// The synchronous form. Interrupted, it ends the communicator, as a collective does: otherwise the
// message would go on using memory that its caller believes to be free.
std::shared_ptr<Pending> post_and_wait(Communicator& self, const Message& message) {
  py::gil_scoped_release release;
  std::shared_ptr<Pending> pending = self.post(message, nullptr);
  if (!pending) return nullptr;  // it is part of a group of calls
  try {
    PyPending(pending).wait();
  } catch (const Error&) {
    throw;
  } catch (...) {
    self.abort(describe(message) + " was interrupted", Cause::kInterrupted);
    while (!pending->wait(kSleep)) continue;
    throw;
  }
  return pending;
}

std::unique_ptr<PyPending> post(Communicator& self, const Message& message, py::object tensor) {
  std::shared_ptr<void> kept = keep(std::move(tensor));
  py::gil_scoped_release release;
  return std::make_unique<PyPending>(self.post(message, std::move(kept)));
}

std::unique_ptr<PyPending> send(Communicator& self, py::object tensor, int peer, int tag,
                                Timeout timeout, bool async) {
  const Message message = message_of(self, Operation::kSend, tensor, peer, tag, timeout);
  if (async) return post(self, message, std::move(tensor));
  post_and_wait(self, message);
  return nullptr;
}

py::object recv(Communicator& self, py::object tensor, std::optional<int> peer, int tag,
                Timeout timeout, bool async) {
  const Message message =
      message_of(self, Operation::kRecv, tensor, peer.value_or(kAnySource), tag, timeout);
  if (async) return py::cast(post(self, message, std::move(tensor)));
  const std::shared_ptr<Pending> pending = post_and_wait(self, message);
  return py::int_(pending ? pending->source() : message.peer);
}

// ---- the rest

#define PYCOMM_LIST(enumerator, ...) Operation::enumerator,
constexpr Operation kAllOperations[] = {PYCOMM_OPERATIONS(PYCOMM_LIST)};
#undef PYCOMM_LIST

py::dict to_dict(const Tally& tally) {
  py::dict result;
  result["operations"] = tally.operations;
  result["bytes"] = tally.bytes;
  result["seconds"] = tally.seconds;
  result["seconds_wait"] = tally.seconds_wait;
  return result;
}

py::dict stats(const Communicator& self) {
  py::dict result = to_dict(self.tally()), kinds;
  for (const Operation operation : kAllOperations) {
    const Tally tally = self.tally(operation);
    if (tally.operations > 0) kinds[name_of(operation)] = to_dict(tally);
  }
  result["kinds"] = kinds;
  return result;
}

py::dict to_dict(const Communicator& self, const RecordView& record, const TickScale::Now& now) {
  const auto time = [&](uint64_t ticks) -> py::object {
    return ticks == 0 ? py::object(py::none()) : py::int_(now.epoch_of(ticks));
  };
  const bool message = record.is_message();
  Request request;
  request.operation = record.operation;
  const auto some = [](bool is, auto value) {
    return is ? py::object(py::cast(value)) : py::object(py::none());
  };
  py::dict result;
  result["record_id"] = record.number;
  result["sequence"] = record.sequence;
  result["operation"] = name_of(record.operation);
  result["dtype"] = name_of(record.dtype);
  result["op"] = some(request.reduces(), name_of(record.op));
  result["count"] = record.count;
  const std::vector<int64_t> sizes(record.sizes, record.sizes + std::max(record.dims, 0));
  result["shape"] = some(record.dims != Shape::kUnknown, sizes);
  result["root"] = some(request.has_root(), record.peer);
  result["peer"] = some(message, record.peer);
  result["tag"] = some(message, record.tag);
  result["bytes"] = record.count * bytes_of(record.dtype);
  result["state"] = record.state();
  result["created_ns"] = time(record.created);
  result["started_ns"] = time(record.started);
  result["met_ns"] = time(record.met);
  result["finished_ns"] = time(record.finished);
  result["line"] = record.line;
  result["timeout_ms"] = self.timeout().count();
  return result;
}

void check_rank(const Communicator& self, int rank) {
  PYCOMM_CHECK(rank >= 0 && rank < self.world_size(), kInvalidArgument, "rank ", self.rank(),
               ": there is no rank ", rank, " in a group of ", self.world_size());
}

py::list records(const Communicator& self, int rank) {
  check_rank(self, rank);
  const TickScale::Now now = self.scale();
  py::list result;
  for (const RecordView& record : self.records(rank)) result.append(to_dict(self, record, now));
  return result;
}

py::dict rank_state(const Communicator& self, int rank) {
  check_rank(self, rank);
  const RankState state = self.state_of(rank);
  py::dict result;
  result["pid"] = state.pid;
  result["alive"] = state.alive;
  result["stopped"] = state.stopped;
  result["left"] = state.left;
  result["sequence"] = state.sequence;
  result["farewell"] = state.farewell;
  return result;
}

std::optional<std::string> failure_report(const Communicator& self) {
  const std::optional<Error> first = self.failure_report();
  return first ? std::make_optional(first->what()) : std::nullopt;
}

std::optional<py::dict> failure_cause(const Communicator& self) {
  const std::optional<Error> first = self.failure_report();
  if (!first) return {};
  py::dict result;
  result["text"] = first->what();
  result["cause"] = name_of(first->blame().cause);
  result["culprit"] = first->blame().culprit;
  return result;
}

// ---- the class

constexpr const char* kDocumentation = R"(
Collectives on CPU tensors among the ranks of one host, over shared memory.

Tensors are anything that speaks DLPack (torch, numpy), contiguous and on the CPU; results are bit-identical on all ranks,
sums run in rank order, 8 and 16-bit floats accumulate in float32 and are rounded once. ``op`` is one of sum, avg, min,
max, product, band, bor, bxor, premul_sum (each rank's contribution times its ``factor``); support_table() says which
dtypes take which. ``algorithm`` is one of auto, one_shot, two_shot, ring. With ``async_op=True`` a Pending is returned.
Every rank must make the same calls in the same order. Raises InvalidArgument before anything is sent; MismatchError,
TimeoutError, PeerDiedError or AbortedError on all ranks otherwise, after which the communicator has ended.)";

constexpr const char* kCapsule = "pycomm.Communicator";

using Class = py::class_<Communicator, std::shared_ptr<Communicator>>;

// Adds a method whose last arguments are timeout= and async_op=.
template <class Function, class... Arguments>
void add(Class& type, const char* name, Function function, const char* doc,
         const Arguments&... arguments) {
  type.def(name, function, arguments..., py::arg("timeout") = py::none(),
           py::arg("async_op") = false, doc);
}

void bind_operations(Class& type) {
  using py::arg;
  const auto op = arg("op") = "sum";
  const auto factor = arg("factor") = 1.0;
  const py::kw_only kw;
  add(type, "all_reduce", &all_reduce, "Reduces `tensor` (any shape) over all ranks, in place.",
      arg("tensor"), op, kw, factor, arg("algorithm") = "auto");
  add(type, "compressed_all_reduce", &compressed_all_reduce,
      "Sums factor * tensors + residual over all ranks, encoded on the way, into the tensors, "
      "which count as one; see csrc/algorithms/compressed.h. They may differ in dtype (float32, "
      "float16, bfloat16). The codec, the number of elements and the dtype of each must be the "
      "same on all ranks.",
      arg("tensors"), arg("codec"), kw, arg("factor") = 1.0f, arg("divisor") = 1.0f,
      arg("residual") = py::none(), arg("infinite") = false, arg("stochastic") = false,
      arg("seed") = 0, arg("counts") = py::none(), arg("algorithm") = "auto");
  add(type, "reduce", &reduce,
      "Reduces `tensor` over all ranks, in place on the root; the other ranks' stay as they are.",
      arg("tensor"), arg("root"), op, kw, factor);
  add(type, "broadcast", &broadcast, "Overwrites `tensor` with the root's, in place.",
      arg("tensor"), arg("root"), kw);
  add(type, "all_gather", &all_gather,
      "outputs[r] becomes rank r's `input`; sizes may differ from rank to rank.", arg("outputs"),
      arg("input"), kw);
  add(type, "all_gather_single", &all_gather_single,
      "`output` becomes all ranks' `input`, one after another; it may contain `input` in its "
      "place.",
      arg("output"), arg("input"), kw);
  add(type, "gather", &gather,
      "On the root, outputs[r] becomes rank r's `input`; sizes may differ. Elsewhere None.",
      arg("outputs"), arg("input"), arg("root"), kw);
  add(type, "gather_single", &gather_single,
      "On the root, `output` becomes all ranks' `input`, one after another. Elsewhere None.",
      arg("output"), arg("input"), arg("root"), kw);
  add(type, "scatter", &scatter,
      "`output` of rank r becomes the root's inputs[r]; sizes may differ. Elsewhere None.",
      arg("output"), arg("inputs"), arg("root"), kw);
  add(type, "scatter_single", &scatter_single,
      "`output` of rank r becomes the r-th part of the root's `input`. Elsewhere None.",
      arg("output"), arg("input"), arg("root"), kw);
  add(type, "reduce_scatter", &reduce_scatter,
      "`output` of rank r becomes the reduction of all ranks' inputs[r]; sizes may differ.",
      arg("output"), arg("inputs"), op, kw, factor);
  add(type, "reduce_scatter_single", &reduce_scatter_single,
      "`output` of rank r becomes the reduction of the r-th part of all ranks' `input`.",
      arg("output"), arg("input"), op, kw, factor);
  add(type, "all_to_all", &all_to_all,
      "outputs[r] becomes inputs[this rank] of rank r; sizes may differ.", arg("outputs"),
      arg("inputs"), kw);
  add(type, "all_to_all_single", &all_to_all_single,
      "The same with one buffer each, cut into parts of the given counts (elements; equal ones if "
      "None).",
      arg("output"), arg("input"), arg("output_counts") = py::none(),
      arg("input_counts") = py::none(), kw);
  add(type, "barrier", &barrier, "Returns when all ranks have entered it.", kw);
  add(type, "send", &send,
      "Sends `tensor` to rank `peer`; done when it may be overwritten. Short messages, and those "
      "to "
      "oneself, do not wait for their receive.",
      arg("tensor"), arg("peer"), arg("tag") = 0, kw);
  add(type, "recv", &recv,
      "Receives into `tensor` from rank `peer` (None or -1: any) the next message with this tag; "
      "returns the source's rank. Count and dtype must be the sender's.",
      arg("tensor"), arg("peer") = py::none(), arg("tag") = 0, kw);
  type.def("monitored_barrier", &monitored_barrier, arg("wait_all_ranks") = false, kw,
           arg("timeout") = py::none(),
           "A barrier that rank 0 watches: if its time runs out, the TimeoutError names the first "
           "missing rank, or all of them.");
}

}  // namespace

py::object to_python(std::shared_ptr<Pending> pending) {
  if (!pending) return py::none();
  return py::cast(std::make_unique<PyPending>(std::move(pending)));
}

void bind_communicator(py::module_& m) {
  using py::arg;
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PyPending>(m, "Pending", "An operation or a message that is under way.")
      .def("wait", &PyPending::wait, Release(),
           "Blocks until it is done and raises what it raised. On a GPU the caller's stream waits "
           "for it instead.")
      .def("synchronize", &PyPending::synchronize, Release(),
           "The same, but the host waits in any case.")
      .def("is_done", &PyPending::is_done, Release())
      .def("source", &PyPending::source,
           "The rank that a received message came from; -1 for everything else, and before.");

  Class type(m, "Communicator", kDocumentation);
  bind_operations(type);
  type.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def_property_readonly("transport", &Communicator::transport)
      .def_property("timeout", &Communicator::timeout, &Communicator::set_timeout,
                    "Limit of an operation's wait for its peers, as a timedelta.")
      .def_property_readonly("sequence", &Communicator::sequence,
                             "Operations entered so far, modulo 2**32; equal on all ranks.")
      .def("flag_latency_ns", &Communicator::flag_latency_ns, Release(),
           "Collective: one-way latency of a flag between rank 0 and the farthest rank, in ns.")
      .def(
          "all_reduce_algorithm",
          [](const Communicator& self, int64_t bytes) {
            return name_of(self.all_reduce_algorithm(bytes));
          },
          arg("bytes"),
          "Which algorithm an all_reduce of so many bytes takes; auto where that is decided later.")
      .def(
          "abort", [](Communicator& self, const std::string& reason) { self.abort(reason); },
          arg("reason"), Release(),
          "Ends all operations of all ranks with AbortedError, now and later. From any thread.")
      .def("shutdown", &Communicator::shutdown, Release(),
           "Finishes what is queued and leaves the group.")
      .def_property_readonly("name", &Communicator::name,
                             "How error messages name the group; empty: they do not.")
      .def_property_readonly("global_ranks", &Communicator::global_ranks,
                             "The ranks of the group in the whole job.")
      .def("_set_group", &Communicator::set_group, arg("name"), arg("global_ranks"))
      .def("stats", &stats,
           "How many operations and messages were done, bytes of user tensors, seconds from start "
           "to "
           "end, and of these the seconds until all ranks had entered (seconds_wait); in all, and "
           "by "
           "`kinds`.")
      .def("records", &records, arg("rank"),
           "The flight recorder of any rank of the group: its last operations, oldest first.")
      .def("rank_state", &rank_state, arg("rank"),
           "What is known of a rank: pid, alive, stopped, left, sequence, farewell.")
      .def("living_ranks", &Communicator::living_ranks,
           "The ranks that have neither died nor left, as far as this one can tell.")
      .def("failure_report", &failure_report, "The group's first failure, or None.")
      .def("failure_cause", &failure_cause,
           "The same for programs: text, cause, culprit (a rank of the group; -1: unknown).")
      .def("_address",  // for pycomm._c10d, which shares the object: a pointer to a std::shared_ptr
           [](const std::shared_ptr<Communicator>& self) {
             return py::capsule(new std::shared_ptr<Communicator>(self), kCapsule,
                                [](void* pointer) {
                                  delete static_cast<std::shared_ptr<Communicator>*>(pointer);
                                });
           });
  m.def(
      "communicator_from_address",
      [](const py::capsule& capsule) {
        return *static_cast<std::shared_ptr<Communicator>*>(
            PyCapsule_GetPointer(capsule.ptr(), kCapsule));
      },
      arg("address"), "The communicator that pycomm._c10d shares.");
}

}  // namespace pycomm
