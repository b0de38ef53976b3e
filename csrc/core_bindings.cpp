// pycomm._core: the communication core for Python, without torch. One block per header.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/choose.h"
#include "communicator.h"
#include "error.h"
#include "interrupt.h"
#include "kernels/elementwise.h"
#include "python_tensor.h"
#include "shm/rendezvous.h"
#include "shm/shm_communicator.h"
#ifdef PYCOMM_WITH_CUDA
#include "kernels/elementwise_cuda.h"
#endif

namespace py = pybind11;

namespace pycomm {
namespace {

using std::chrono::milliseconds;

// ---- error.h

void set_python_error(const Error& error) {
  const py::object type = py::module_::import("pycomm.errors").attr(class_name(error.kind()));
  PyErr_SetString(type.ptr(), error.what());
}

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
}

// Lets Ctrl-C and other signal handlers end a blocking call. Handlers run on the main thread only;
// elsewhere this is void.
void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// ---- common.h

template <class Enum>
Enum parse(const std::string& text, std::initializer_list<Enum> values, const Caller& caller,
           const char* kind) {
  std::string known;
  for (const Enum value : values) {
    if (text == name_of(value)) return value;
    known += std::string(known.empty() ? "" : ", ") + name_of(value);
  }
  throw Error(ErrorKind::kInvalidArgument,
              concat(caller, ": unknown ", kind, " '", text, "'; known are ", known));
}
#define PYCOMM_LIST(enumerator, ...) Enum::enumerator,
ReduceOp parse_op(const std::string& text, const Caller& caller) {
  using Enum = ReduceOp;
  return parse<Enum>(text, {PYCOMM_REDUCE_OPS(PYCOMM_LIST)}, caller, "op");
}
Algorithm parse_algorithm(const std::string& text, const Caller& caller) {
  using Enum = Algorithm;
  return parse<Enum>(text, {PYCOMM_ALGORITHMS(PYCOMM_LIST)}, caller, "algorithm");
}

// (dtype, ops it can be reduced with), for documentation and tests.
py::dict support_table() {
  py::dict table;
  const auto ops_of = [](DType dtype) {
    using Enum = ReduceOp;
    py::list ops;
    for (const ReduceOp op : {PYCOMM_REDUCE_OPS(PYCOMM_LIST)})
      if (can_reduce(dtype, op)) ops.append(name_of(op));
    return ops;
  };
  using Enum = DType;
  for (const DType dtype : {PYCOMM_DTYPES(PYCOMM_LIST)}) table[name_of(dtype)] = ops_of(dtype);
  return table;
}
#undef PYCOMM_LIST

// ---- communicator.h

using Timeout = std::optional<std::chrono::microseconds>;  // none: the communicator's

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
  void wait() const {
    if (!pending_) return;
    while (!pending_->wait(kSleep)) check_interrupt();
    if (auto exception = pending_->exception()) std::rethrow_exception(exception);
  }

 private:
  std::shared_ptr<Pending> pending_;  // null: it was done before submit returned
};

std::unique_ptr<PyPending> submit(Communicator& self, Request request, Timeout timeout, bool async,
                                  py::object tensors) {
  request.timeout = to_limit(timeout, self.rank());
  std::shared_ptr<void> kept = async ? keep(std::move(tensors)) : nullptr;
  std::shared_ptr<Pending> pending;
  {
    py::gil_scoped_release release;
    pending = self.submit(std::move(request), async, std::move(kept));
  }
  return async ? std::make_unique<PyPending>(std::move(pending)) : nullptr;
}

std::unique_ptr<PyPending> all_reduce(Communicator& self, py::object tensor, const std::string& op,
                                      const std::string& algorithm, Timeout timeout, bool async) {
  static const std::string kSum = "sum", kAuto = "auto";
  const Caller caller{self.rank(), Operation::kAllReduce};
  Request request;
  request.operation = Operation::kAllReduce;
  request.op = op == kSum ? ReduceOp::kSum : parse_op(op, caller);
  request.algorithm = algorithm == kAuto ? Algorithm::kAuto : parse_algorithm(algorithm, caller);
  const TensorView view = view_of(tensor, caller);
  request.dtype = view.dtype;
  request.count = view.count;
  request.input = request.output = view.data;
  return submit(self, std::move(request), timeout, async, std::move(tensor));
}

std::unique_ptr<PyPending> broadcast(Communicator& self, py::object tensor, int root,
                                     Timeout timeout, bool async) {
  const TensorView view = view_of(tensor, Caller{self.rank(), Operation::kBroadcast});
  Request request;
  request.operation = Operation::kBroadcast;
  request.dtype = view.dtype;
  request.count = view.count;
  request.root = root;
  request.input = request.output = view.data;
  return submit(self, std::move(request), timeout, async, std::move(tensor));
}

// One buffer that holds world_size parts of the size of another.
void check_parts(const TensorView& whole, const TensorView& part, int parts, const Caller& caller) {
  PYCOMM_CHECK(whole.dtype == part.dtype, kInvalidArgument, caller,
               ": dtypes differ: ", name_of(whole.dtype), " and ", name_of(part.dtype));
  PYCOMM_CHECK(whole.count == part.count * parts, kInvalidArgument, caller, ": one buffer holds ",
               whole.count, " elements, but ", parts, " ranks with ", part.count,
               " elements each need ", part.count * parts);
}

std::unique_ptr<PyPending> all_gather_single(Communicator& self, py::object output,
                                             py::object input, Timeout timeout, bool async) {
  const Caller caller{self.rank(), Operation::kAllGather};
  const TensorView whole = view_of(output, caller), part = view_of(input, caller);
  check_parts(whole, part, self.world_size(), caller);
  Request request;
  request.operation = Operation::kAllGather;
  request.dtype = part.dtype;
  request.count = part.count;
  request.input = part.data;
  request.output = whole.data;
  return submit(self, std::move(request), timeout, async, py::make_tuple(output, input));
}

std::unique_ptr<PyPending> reduce_scatter_single(Communicator& self, py::object output,
                                                 py::object input, const std::string& op,
                                                 Timeout timeout, bool async) {
  const Caller caller{self.rank(), Operation::kReduceScatter};
  const TensorView part = view_of(output, caller), whole = view_of(input, caller);
  check_parts(whole, part, self.world_size(), caller);
  Request request;
  request.operation = Operation::kReduceScatter;
  request.dtype = part.dtype;
  request.op = parse_op(op, caller);
  request.count = part.count;
  request.input = whole.data;
  request.output = part.data;
  return submit(self, std::move(request), timeout, async, py::make_tuple(output, input));
}

// An empty list would look like the single-buffer form; other wrong lengths are noticed by
// Communicator::check.
void check_list(const py::list& tensors, const Communicator& self, const Caller& caller) {
  PYCOMM_CHECK(!tensors.empty(), kInvalidArgument, caller,
               ": needs a list with one tensor per rank, ", self.world_size(),
               ", not an empty one");
}

std::unique_ptr<PyPending> all_gather(Communicator& self, py::list outputs, py::object input,
                                      Timeout timeout, bool async) {
  const Caller caller{self.rank(), Operation::kAllGather};
  const TensorView part = view_of(input, caller);
  Request request;
  request.operation = Operation::kAllGather;
  request.dtype = part.dtype;
  request.count = part.count;
  request.input = part.data;
  check_list(outputs, self, caller);
  for (const py::handle output : outputs) {
    const TensorView view = view_of(output, caller);
    check_parts(view, part, 1, caller);
    request.outputs.push_back({view.data, view.count});
  }
  return submit(self, std::move(request), timeout, async, py::make_tuple(outputs, input));
}

std::unique_ptr<PyPending> reduce_scatter(Communicator& self, py::object output, py::list inputs,
                                          const std::string& op, Timeout timeout, bool async) {
  const Caller caller{self.rank(), Operation::kReduceScatter};
  const TensorView part = view_of(output, caller);
  Request request;
  request.operation = Operation::kReduceScatter;
  request.dtype = part.dtype;
  request.op = parse_op(op, caller);
  request.count = part.count;
  request.output = part.data;
  check_list(inputs, self, caller);
  for (const py::handle input : inputs) {
    const TensorView view = view_of(input, caller);
    check_parts(view, part, 1, caller);
    request.inputs.push_back({view.data, view.count});
  }
  return submit(self, std::move(request), timeout, async, py::make_tuple(output, inputs));
}

std::unique_ptr<PyPending> barrier(Communicator& self, Timeout timeout, bool async) {
  return submit(self, Request{}, timeout, async, py::none());
}

// ---- messages

Message message_of(Communicator& self, Operation operation, const py::object& tensor, int peer,
                   int tag, const Timeout& timeout) {
  const TensorView view = view_of(tensor, Caller{self.rank(), operation});
  Message message;
  message.operation = operation;
  message.dtype = view.dtype;
  message.peer = peer;
  message.tag = tag;
  message.count = view.count;
  message.data = view.data;
  message.timeout = to_limit(timeout, self.rank());
  return message;
}

// The synchronous form. Interrupted, it ends the communicator, as a collective does: otherwise the
// message would go on using memory that its caller believes to be free.
std::shared_ptr<Pending> post_and_wait(Communicator& self, const Message& message) {
  py::gil_scoped_release release;
  std::shared_ptr<Pending> pending = self.post(message, nullptr);
  try {
    PyPending(pending).wait();
  } catch (const Error&) {
    throw;
  } catch (...) {
    self.abort(describe(message) + " was interrupted");
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
  return py::int_(post_and_wait(self, message)->source());
}

constexpr const char* kCapsule = "pycomm.Communicator";

void bind_communicator(py::module_& m) {
  using py::arg;
  const py::none no_timeout;
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PyPending>(m, "Pending", "An operation or a message that is under way.")
      .def("wait", &PyPending::wait, Release(),
           "Blocks until it is done and raises what it raised.")
      .def("is_done", &PyPending::is_done, Release())
      .def("source", &PyPending::source,
           "The rank that a received message came from; -1 for everything else, and before.");

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator", R"(
Collectives on CPU tensors among the ranks of one host, over shared memory.

Tensors are anything that speaks DLPack (torch, numpy), contiguous and on the CPU; results are bit-identical on all ranks,
sums run in rank order, 16-bit floats accumulate in float32 and are rounded once. ``op`` is one of sum, avg, min, max,
product; ``algorithm`` one of auto, one_shot, two_shot, ring. With ``async_op=True`` a Pending is returned. Every rank
must make the same calls in the same order. Raises InvalidArgument before anything is sent; MismatchError, TimeoutError,
PeerDiedError or AbortedError on all ranks otherwise, after which the communicator has ended.)")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def_property_readonly("transport", &Communicator::transport)
      .def_property("timeout", &Communicator::timeout, &Communicator::set_timeout,
                    "Limit of an operation's wait for its peers, as a timedelta.")
      .def_property_readonly("sequence", &Communicator::sequence,
                             "Operations entered so far, modulo 2**32; equal on all ranks.")
      .def("all_reduce", &all_reduce, arg("tensor"), arg("op") = "sum", py::kw_only(),
           arg("algorithm") = "auto", arg("timeout") = no_timeout, arg("async_op") = false,
           "Reduces `tensor` (any shape) over all ranks, in place.")
      .def("broadcast", &broadcast, arg("tensor"), arg("root"), py::kw_only(),
           arg("timeout") = no_timeout, arg("async_op") = false,
           "Overwrites `tensor` with the root's, in place.")
      .def("all_gather", &all_gather, arg("outputs"), arg("input"), py::kw_only(),
           arg("timeout") = no_timeout, arg("async_op") = false,
           "outputs[r] becomes rank r's `input`; all of one size.")
      .def("all_gather_single", &all_gather_single, arg("output"), arg("input"), py::kw_only(),
           arg("timeout") = no_timeout, arg("async_op") = false,
           "`output` becomes all ranks' `input`, one after another; it may contain `input` in its "
           "place.")
      .def("reduce_scatter", &reduce_scatter, arg("output"), arg("inputs"), arg("op") = "sum",
           py::kw_only(), arg("timeout") = no_timeout, arg("async_op") = false,
           "`output` of rank r becomes the reduction of all ranks' inputs[r].")
      .def("reduce_scatter_single", &reduce_scatter_single, arg("output"), arg("input"),
           arg("op") = "sum", py::kw_only(), arg("timeout") = no_timeout, arg("async_op") = false,
           "`output` of rank r becomes the reduction of the r-th part of all ranks' `input`.")
      .def("barrier", &barrier, py::kw_only(), arg("timeout") = no_timeout, arg("async_op") = false,
           "Returns when all ranks have entered it.")
      .def("send", &send, arg("tensor"), arg("peer"), arg("tag") = 0, py::kw_only(),
           arg("timeout") = no_timeout, arg("async_op") = false,
           "Sends `tensor` to rank `peer`; done when it may be overwritten. Short messages, and "
           "those to oneself, do not wait for their receive.")
      .def("recv", &recv, arg("tensor"), arg("peer") = py::none(), arg("tag") = 0, py::kw_only(),
           arg("timeout") = no_timeout, arg("async_op") = false,
           "Receives into `tensor` from rank `peer` (None or -1: any) the next message with this "
           "tag; returns the source's rank. Count and dtype must be the sender's.")
      .def("flag_latency_ns", &Communicator::flag_latency_ns,
           py::call_guard<py::gil_scoped_release>(),
           "Collective: one-way latency of a flag between rank 0 and the farthest rank, in ns.")
      .def("abort", &Communicator::abort, arg("reason"), py::call_guard<py::gil_scoped_release>(),
           "Ends all operations of all ranks with AbortedError, now and later. From any thread.")
      .def("shutdown", &Communicator::shutdown, py::call_guard<py::gil_scoped_release>(),
           "Finishes what is queued and leaves the group.")
      .def(
          "stats",
          [](const Communicator& self) {
            const Stats stats = self.stats();
            py::dict result;
            result["operations"] = stats.operations;
            result["bytes"] = stats.bytes;
            return result;
          },
          "Operations and bytes of user tensors so far.")
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

// ---- shm/

Streaming parse_streaming(const std::string& text) {
  if (text == "auto") return Streaming::kAuto;
  if (text == "never") return Streaming::kNever;
  if (text == "always") return Streaming::kAlways;
  throw Error(ErrorKind::kInvalidArgument,
              "streaming must be auto, never or always, not '" + text + "'");
}

// Ends a communicator without the GIL: it joins the worker, which may be waiting for the GIL to
// drop its arguments.
void destroy(Communicator* communicator) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release release;
    delete communicator;
  } else {
    delete communicator;
  }
}

// The communicators of this process. At its exit their threads must end before the interpreter
// does: it kills a thread that then asks for the GIL, which C++ answers with std::terminate.
struct Living {
  std::mutex mutex;
  std::vector<std::weak_ptr<ShmCommunicator>> communicators;
};
Living& living() {
  static auto* const living = new Living;  // outlives static destruction
  return *living;
}

void end_all_communicators() {
  py::gil_scoped_release release;
  std::vector<std::weak_ptr<ShmCommunicator>> communicators;
  {
    std::lock_guard<std::mutex> lock(living().mutex);
    communicators.swap(living().communicators);
  }
  for (const auto& communicator : communicators)
    if (const auto alive = communicator.lock()) alive->end();
}

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<Segment> segment, int rank,
                                                milliseconds timeout) {
  std::shared_ptr<ShmCommunicator> communicator(
      new ShmCommunicator(std::move(segment), rank, timeout), destroy);
  std::lock_guard<std::mutex> lock(living().mutex);
  auto& all = living().communicators;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }),
            all.end());
  all.push_back(communicator);
  return communicator;
}

void bind_shm(py::module_& m) {
  using py::arg;
  using Release = py::call_guard<py::gil_scoped_release>;
  set_interrupt_check(check_signals);
  py::module_::import("atexit").attr("register")(py::cpp_function(end_all_communicators));
  py::class_<ShmOffer>(m, "ShmOffer", "Rank 0's side of the rendezvous of a host's ranks.")
      .def(py::init([](int world_size, int64_t slot_bytes, int slots, const std::string& streaming,
                       int spin_polls, int64_t channel_bytes) {
             ShmConfig config;
             config.slot_bytes = slot_bytes;
             config.slots = slots;
             config.streaming = parse_streaming(streaming);
             config.spin_polls = spin_polls;
             config.channel_bytes = channel_bytes;
             return std::make_unique<ShmOffer>(world_size, config);
           }),
           arg("world_size"), py::kw_only(), arg("slot_bytes"), arg("slots"), arg("streaming"),
           arg("spin_polls"), arg("channel_bytes"))
      .def_property_readonly("address", &ShmOffer::address, "What the other ranks need to join.")
      .def(
          "accept",
          [](ShmOffer& self, milliseconds timeout) {
            return make_communicator(self.accept(timeout), 0, timeout);
          },
          arg("timeout"), Release(), "Waits for all ranks; returns rank 0's communicator.");
  m.def(
      "join_shm",
      [](const std::string& address, int rank, milliseconds timeout) {
        return make_communicator(join_shm(address, rank, timeout), rank, timeout);
      },
      arg("address"), arg("rank"), arg("timeout"), Release(),
      "Joins the segment that rank 0 offers; returns this rank's communicator.");
}

// ---- kernels/

void bind_kernels(py::module_& m) {
  m.def("instruction_set", &instruction_set, "The CPU kernels in use: avx512, avx2 or generic.");
  m.def("set_instruction_set", &set_instruction_set, py::arg("name"),
        "For tests: use these CPU kernels. False if this machine cannot.");
  m.def(
      "reduce",
      [](py::object output, const std::vector<py::object>& sources, const std::string& op) {
        const Caller caller{0, Operation::kAllReduce};
        const TensorView view = view_of(output, caller);
        std::vector<const void*> pointers;
        for (const py::object& source : sources) {
          const TensorView other = view_of(source, caller);
          check_parts(other, view, 1, caller);
          pointers.push_back(other.data);
        }
        PYCOMM_CHECK(!sources.empty() && sources.size() <= kMaxRanks, kInvalidArgument,
                     "reduce: 1 to ", kMaxRanks, " sources, not ", sources.size());
        ReduceCall call;
        call.dtype = view.dtype;
        call.op = parse_op(op, caller);
        call.divisor = static_cast<int>(sources.size());
        call.count = view.count;
        call.sources = pointers.data();
        call.num_sources = static_cast<int>(sources.size());
        call.output = view.data;
        reduce(call);
      },
      py::arg("output"), py::arg("sources"), py::arg("op"),
      "For tests: output = the kernels' reduction of the sources.");
}

}  // namespace
}  // namespace pycomm

PYBIND11_MODULE(_core, m) {
  m.doc() = "pycomm's communication core: shared-memory collectives, without torch.";
  pycomm::bind_errors();
  pycomm::bind_communicator(m);
  pycomm::bind_shm(m);
  pycomm::bind_kernels(m);
  m.def("support_table", &pycomm::support_table,
        "Which ops each dtype can be reduced with: {dtype: [op, ...]}.");
  m.attr("eager_bytes") = pycomm::kEagerBytes;
  m.attr("max_ranks") = pycomm::kMaxRanks;
#ifdef PYCOMM_WITH_CUDA
  m.attr("cuda") = pycomm::cuda_build_description();
#else
  m.attr("cuda") = py::none();
#endif
}
