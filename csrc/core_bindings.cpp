// pycomm._core: the communication core for Python, without torch. One block per header; the
// communicator's is in communicator_bindings.cpp.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "call_site.h"
#include "communicator.h"
#include "error.h"
#include "interrupt.h"
#include "kernels/elementwise.h"
#include "python_call_site.h"
#include "python_interrupt.h"
#include "python_tensor.h"
#include "shm/rendezvous.h"
#include "shm/shm_communicator.h"
#include "test_fault.h"
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
  // A message may quote what is not UTF-8, or end within a letter.
  const char* text = error.what();
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace"));
  PyErr_SetObject(type.ptr(), message.ptr());
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

// Threads that Python does not know must not ask for the GIL: it may be gone.
void bind_failure_hook(py::module_& m) {
  m.def(
      "set_failure_hook",
      [](const py::function& hook) {
        static py::handle kept;  // for the process's life
        kept = hook.inc_ref();
        failure_hook() = [](const std::string& report) {
          if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return;
          py::gil_scoped_acquire gil;
          const py::error_scope pending;
          try {
            kept(report);
          } catch (py::error_already_set& error) {
            error.discard_as_unraisable("pycomm's failure hook");
          }
        };
      },
      py::arg("hook"), "hook(report) is called when an operation fails on this rank.");
}

// ---- common.h

#define PYCOMM_LIST(enumerator, ...) Enum::enumerator,
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

// ---- shm/

Choice parse_choice(const char* setting, const std::string& text) {
  if (text == "auto") return Choice::kAuto;
  if (text == "never") return Choice::kNever;
  if (text == "always") return Choice::kAlways;
  throw Error(ErrorKind::kInvalidArgument,
              concat(setting, " must be auto, never or always, not '", text, "'"));
}

AllReduceTable parse_table(const std::vector<std::pair<int64_t, std::string>>& lines) {
  const auto check = [](bool is_right, const char* what) {
    if (!is_right)
      throw Error(ErrorKind::kInvalidArgument, concat("a table of all_reduce: ", what));
  };
  check(lines.size() <= kMaxThresholds, "at most 8 lines");
  check(lines.back().first == INT64_MAX, "the last line has no limit");
  AllReduceTable table;
  int64_t before = -1;
  for (size_t i = 0; i < lines.size(); ++i) {
    const Algorithm algorithm = parse_algorithm(lines[i].second, Caller{0, Operation::kAllReduce});
    check(algorithm != Algorithm::kAuto, "auto is what it decides");
    check(lines[i].first > before, "sizes grow");
    before = lines[i].first;
    table.lines[i] = {before, algorithm};
  }
  return table;
}

LifeSign parse_life_sign(const std::string& text) {
  if (text == "auto") return LifeSign::kAuto;
  if (text == "pid") return LifeSign::kPid;
  if (text == "lock") return LifeSign::kLock;
  if (text == "heartbeat") return LifeSign::kHeartbeat;
  throw Error(ErrorKind::kInvalidArgument,
              concat("liveness must be auto, pid, lock or heartbeat, not '", text, "'"));
}

// Ends a communicator without the GIL: it joins the worker, which may be waiting for the GIL to
// drop its arguments.
void destroy(ShmCommunicator* communicator) {
  if (communicator->is_forked()) return;  // its threads, and perhaps its locks, are the parent's
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
  const auto reason =
      py::module_::import("pycomm.farewell").attr("last_words")().cast<std::string>();
  py::gil_scoped_release release;
  std::vector<std::weak_ptr<ShmCommunicator>> communicators;
  {
    std::lock_guard<std::mutex> lock(living().mutex);
    communicators.swap(living().communicators);
  }
  for (const auto& communicator : communicators)
    if (const auto alive = communicator.lock())
      if (!alive->is_forked()) {
        alive->set_farewell(reason);
        alive->end();
      }
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

void bind_call_sites(py::module_& m) {
  call_site_hook() = python_call_site;
  m.def("skip_files_under", &skip_files_under, py::arg("folder"),
        "Error messages name the innermost line of Python code that is not in a file whose name "
        "begins like this.");
  m.def(
      "set_call_sites",
      [](const std::string& setting) {
        call_sites() = setting == "always"  ? CallSites::kAlways
                       : setting == "never" ? CallSites::kNever
                                            : CallSites::kAuto;
      },
      py::arg("setting"), "When that line is looked for: auto, always, never.");
  m.def("call_site", &python_call_site, "The line that it would be here.");
}

void bind_test_fault(py::module_& m) {
  m.def(
      "set_test_fault",
      [](const std::string& what, int rank, uint32_t operation, int64_t chunk, int64_t value) {
        using Kind = TestFault::Kind;
        static const std::map<std::string, Kind> kKinds = {
            {"kill", Kind::kKill},      {"segv", Kind::kSegv},   {"exit", Kind::kExit},
            {"stop", Kind::kStop},      {"raise", Kind::kRaise}, {"delay", Kind::kDelay},
            {"corrupt", Kind::kCorrupt}};
        const auto kind = kKinds.find(what);
        PYCOMM_CHECK(kind != kKinds.end(), kInvalidArgument, "unknown test fault '", what, "'");
        test_fault() = {kind->second, rank, operation, chunk, value};
      },
      py::arg("what"), py::arg("rank"), py::arg("operation"),
      py::arg("chunk") = TestFault::kAtEntry, py::arg("value") = 0,
      "For tests: see PYCOMM_TEST_FAULT.");
}

void bind_shm(py::module_& m) {
  using py::arg;
  using Release = py::call_guard<py::gil_scoped_release>;
  set_interrupt_check(check_signals);
  bind_call_sites(m);
  bind_test_fault(m);
  bind_failure_hook(m);
  py::module_::import("atexit").attr("register")(py::cpp_function(end_all_communicators));
  py::class_<ShmOffer>(m, "ShmOffer", "Rank 0's side of the rendezvous of a host's ranks.")
      .def(py::init([](int world_size, int64_t slot_bytes, int slots, const std::string& streaming,
                       int spin_polls, int64_t heap_bytes, int64_t channel_bytes,
                       const std::string& single_copy, int records, const std::string& liveness,
                       const std::vector<std::pair<int64_t, std::string>>& all_reduce,
                       bool check_headers) {
             ShmConfig config;
             config.slot_bytes = slot_bytes;
             config.slots = slots;
             config.streaming = parse_choice("streaming", streaming);
             config.spin_polls = spin_polls;
             config.heap_bytes = heap_bytes;
             config.channel_bytes = channel_bytes;
             config.single_copy = parse_choice("single_copy", single_copy);
             config.records = records;
             config.liveness = parse_life_sign(liveness);
             if (!all_reduce.empty()) config.all_reduce = parse_table(all_reduce);
             config.check_headers = check_headers;
             return std::make_unique<ShmOffer>(world_size, config);
           }),
           arg("world_size"), py::kw_only(), arg("slot_bytes"), arg("slots"), arg("streaming"),
           arg("spin_polls"), arg("heap_bytes"), arg("channel_bytes"), arg("single_copy"),
           arg("records"), arg("liveness"),
           arg("all_reduce") = std::vector<std::pair<int64_t, std::string>>(),
           arg("check_headers") = true)
      .def_property_readonly("address", &ShmOffer::address, "What the other ranks need to join.")
      .def(
          "serve", &ShmOffer::serve, arg("timeout"), arg("look") = Look(), Release(),
          "Waits until all ranks are here; look(those that are) returns why not to wait on, or ''.")
      .def(
          "accept",
          [](ShmOffer& self, milliseconds timeout) {
            return make_communicator(self.accept(timeout), 0, timeout);
          },
          arg("timeout"), Release(), "Waits for all ranks; returns rank 0's communicator.");
  m.def(
      "join_shm",
      [](const std::string& address, int rank, milliseconds timeout, int world_size) {
        return make_communicator(join_shm(address, rank, timeout, world_size), rank, timeout);
      },
      arg("address"), arg("rank"), arg("timeout"), arg("world_size") = 0, Release(),
      "Joins the segment that rank 0 offers; returns this rank's communicator.");
  m.def(
      "shrink",
      [](const std::shared_ptr<Communicator>& old, const std::vector<int>& ranks,
         milliseconds timeout) {
        auto& from = dynamic_cast<ShmCommunicator&>(*old);
        const auto place = std::find(ranks.begin(), ranks.end(), from.rank()) - ranks.begin();
        return make_communicator(from.succeed(ranks, timeout), static_cast<int>(place),
                                 from.timeout());
      },
      arg("communicator"), arg("ranks"), arg("timeout"), Release(),
      "Collective over `ranks`: a communicator of these alone, found through the old one, which "
      "ends.");
  m.def(
      "living_communicators",
      [] {
        std::vector<std::shared_ptr<Communicator>> alive;
        std::lock_guard<std::mutex> lock(living().mutex);
        for (const auto& one : living().communicators)
          if (const auto communicator = one.lock(); communicator && !communicator->is_forked())
            alive.push_back(communicator);
        return alive;
      },
      "The communicators of this process.");
  m.def(
      "try_join_shm",
      [](const std::string& address, int rank, int world_size, milliseconds limit,
         milliseconds timeout) -> std::shared_ptr<Communicator> {
        auto segment = try_join_shm(address, rank, world_size, limit);
        return segment ? make_communicator(std::move(segment), rank, timeout) : nullptr;
      },
      arg("address"), arg("rank"), arg("world_size"), arg("limit"), arg("timeout"), Release(),
      "The same, or None if the offer is over; `limit` is for joining, `timeout` for operations.");
  m.def("check_reachable", &check_reachable, arg("address"), arg("rank"),
        "Raises Error if the address is one on another host or in another network namespace.");
}

// ---- kernels/

void bind_kernels(py::module_& m) {
  m.def("instruction_set", &instruction_set, "The CPU kernels in use: avx512, avx2 or generic.");
  m.def("set_instruction_set", &set_instruction_set, py::arg("name"),
        "For tests: use these CPU kernels. False if this machine cannot.");
  m.def(
      "reduce",
      [](py::object output, const std::vector<py::object>& sources, const std::string& op,
         const std::optional<std::vector<double>>& scales) {
        const Caller caller{0, Operation::kAllReduce};
        const TensorView view = view_of(output, caller);
        std::vector<const void*> pointers;
        for (const py::object& source : sources) {
          const TensorView other = view_of(source, caller);
          PYCOMM_CHECK(other.dtype == view.dtype && other.count == view.count, kInvalidArgument,
                       "reduce: sources and output differ in dtype or count");
          pointers.push_back(other.data);
        }
        PYCOMM_CHECK(!sources.empty() && sources.size() <= kMaxRanks, kInvalidArgument,
                     "reduce: 1 to ", kMaxRanks, " sources, not ", sources.size());
        PYCOMM_CHECK(!scales || scales->size() == sources.size(), kInvalidArgument,
                     "reduce: one scale for each source");
        ReduceCall call;
        call.dtype = real_view(view.dtype).dtype;
        call.op = parse_op(op, caller);
        PYCOMM_CHECK(can_reduce(view.dtype, call.op), kInvalidArgument, "reduce: dtype ",
                     name_of(view.dtype), " has no op ", op);
        call.divisor = static_cast<int>(sources.size());
        call.count = view.count * real_view(view.dtype).components;
        call.scales = scales ? scales->data() : nullptr;
        call.sources = pointers.data();
        call.num_sources = static_cast<int>(sources.size());
        call.output = view.data;
        reduce(call);
      },
      py::arg("output"), py::arg("sources"), py::arg("op"), py::arg("scales") = py::none(),
      "For tests: output = the kernels' reduction of the sources.");
}

}  // namespace
}  // namespace pycomm

PYBIND11_MODULE(_core, m) {
  m.doc() = "pycomm's communication core: shared-memory collectives, without torch.";
  pycomm::bind_errors();
  pycomm::bind_codec(m);
  pycomm::bind_communicator(m);
  pycomm::bind_nccl(m);
  pycomm::bind_shm(m);
  pycomm::bind_kernels(m);
  m.def("support_table", &pycomm::support_table,
        "Which ops each dtype can be reduced with: {dtype: [op, ...]}.");
  m.attr("eager_bytes") = pycomm::kEagerBytes;
  m.attr("max_ranks") = pycomm::kMaxRanks;
#ifdef PYCOMM_WITH_CUDA
  pycomm::bind_cuda_kernels(m);
  pycomm::bind_peer_memory(m);
  m.attr("cuda") = pycomm::cuda_build_description();
#else
  m.attr("cuda") = py::none();
#endif
}
