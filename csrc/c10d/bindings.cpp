// pycomm._c10d: the adapter that alone includes torch's headers and is tied to one torch version.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <tuple>
#include <utility>

#include "../interrupt.h"
#include "../python_interrupt.h"
#include "backend.h"
#include "backward_watch.h"
#include "direct_reducer.h"
#include "errors.h"
#include "gpu.h"
#include "parameter_watch.h"
#include "store_board.h"

namespace pycomm {

PyObject* C10dError::python_type() {
  const py::object type = py::module_::import("pycomm.errors").attr(class_name(kind));
  return type.ptr();  // the module keeps it alive
}

std::exception_ptr for_torch(std::exception_ptr exception) {
  if (!exception) return nullptr;
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return std::make_exception_ptr(C10dError(error));
  } catch (...) {
    return exception;
  }
}

namespace {

// The communicator that a DDP hook uses; replaced when the module gets another process group.
struct HookTarget {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<StepTimes> times;
};

// DDP's communication hook: averages a bucket in place, in the thread that runs backward (`async`
// false: right when ranks have no core to spare) or on the communicator's worker while backward
// goes on.
class AverageHook : public c10d::CommHookInterface {
 public:
  AverageHook(std::shared_ptr<HookTarget> target, bool async)
      : target_(std::move(target)), async_(async) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const uint64_t began = ticks();
    auto future = average(target_->communicator, bucket.getBufferRef(), async_);
    target_->times->averaged(began);
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  std::shared_ptr<HookTarget> target_;
  const bool async_;
};

void register_translator() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (C10dError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

// A Python function, called by threads of autograd, that raises what a backward shall raise.
BackwardWatch::Report report_to(py::function function) {
  const std::shared_ptr<py::function> shared(new py::function(std::move(function)),
                                             [](py::function* pointer) {
                                               py::gil_scoped_acquire gil;
                                               delete pointer;
                                             });
  return [shared](const char* problem, const std::vector<size_t>& indices) {
    py::gil_scoped_acquire gil;
    try {
      (*shared)(problem, indices);
    } catch (py::error_already_set& raised) {
      raised.restore();
      python_error error;
      error.persist();
      throw error;
    }
  };
}

constexpr const char* kCapsule = "pycomm.Communicator";
constexpr const char* kBoardCapsule = "pycomm.Board";

// For pycomm._core, which shares the object: a pointer to a std::shared_ptr.
template <class T>
py::capsule capsule_of(std::shared_ptr<T> object, const char* name) {
  return py::capsule(new std::shared_ptr<T>(std::move(object)), name,
                     [](void* pointer) { delete static_cast<std::shared_ptr<T>*>(pointer); });
}

py::capsule address_of(const std::shared_ptr<Communicator>& communicator) {
  return capsule_of(communicator, kCapsule);
}

std::shared_ptr<Communicator> communicator_from(const py::capsule& capsule) {
  return *capsule.get_pointer<std::shared_ptr<Communicator>>();
}

// The rendezvous of a part of a group's ranks is that of any group; pycomm.backend does it.
c10::intrusive_ptr<c10d::Backend> split(bool only_gpu, const c10::intrusive_ptr<c10d::Store>& store,
                                        int rank, int world_size,
                                        std::chrono::milliseconds timeout) {
  py::gil_scoped_acquire gil;
  return py::module_::import("pycomm.backend")
      .attr(only_gpu ? "create_gpu_backend" : "create_backend")(store, rank, world_size, timeout)
      .cast<c10::intrusive_ptr<C10dBackend>>();
}

// Kept as long as the backend; called once, by any thread.
C10dBackend::MakeGpu gpu_maker(std::optional<py::function> function) {
  if (!function) return nullptr;
  const std::shared_ptr<py::function> shared(new py::function(std::move(*function)),
                                             [](py::function* pointer) {
                                               py::gil_scoped_acquire gil;
                                               delete pointer;
                                             });
  return [shared] {
    py::gil_scoped_acquire gil;
    try {
      return communicator_from((*shared)().cast<py::capsule>());
    } catch (const py::error_already_set& raised) {
      const py::object refused = py::module_::import("pycomm.errors").attr("InvalidArgument");
      throw Error(raised.matches(refused) ? ErrorKind::kInvalidArgument : ErrorKind::kError,
                  py::str(raised.value()));
    }
  };
}

std::string farewell() {
  py::gil_scoped_acquire gil;
  return py::module_::import("pycomm.farewell").attr("farewell")().cast<std::string>();
}

WireFormat wire_format_of(const std::string& name) {
#define PYCOMM_CASE(enumerator, text, ...) \
  if (name == text) return WireFormat::enumerator;
  PYCOMM_WIRE_FORMATS(PYCOMM_CASE)
#undef PYCOMM_CASE
  throw C10dError(Error(ErrorKind::kInvalidArgument, "unknown wire format '" + name + "'"));
}

using Wirings = std::vector<std::tuple<std::string, int, bool, bool, bool>>;

void set_wirings(DirectReducer& self, const Wirings& wirings, std::vector<size_t> of_parameter) {
  std::vector<DirectReducer::Wiring> parsed;
  for (const auto& [format, block, feedback, infinite, stochastic] : wirings)
    parsed.push_back({{wire_format_of(format), block}, feedback, infinite, stochastic});
  translated([&] { self.set_wirings(std::move(parsed), std::move(of_parameter)); });
}

void bind_direct_reducer(py::module_& m) {
  using py::arg;
  py::class_<DirectReducer, std::shared_ptr<DirectReducer>>(m, "DirectReducer")
      .def(py::init([](const std::vector<at::Tensor>& parameters, const std::vector<size_t>& limits,
                       const py::capsule& communicator, bool async_op) {
             return std::make_shared<DirectReducer>(parameters, limits,
                                                    communicator_from(communicator), async_op);
           }),
           arg("parameters"), arg("limits"), arg("communicator"), arg("async_op"))
      .def(
          "set_communicator",
          [](DirectReducer& self, const py::capsule& communicator) {
            self.set_communicator(communicator_from(communicator));
          },
          arg("communicator"), "Not while a backward runs.")
      .def("set_wirings", &set_wirings, arg("wirings"), arg("of_parameter"),
           "(format, block, feedback, infinite, stochastic) each, and an index for each parameter.")
      .def("set_share", &DirectReducer::set_share, arg("share"))
      .def("set_seed", &DirectReducer::set_seed, arg("seed"))
      .def("buckets", &DirectReducer::buckets)
      .def("has_rebuilt", &DirectReducer::has_rebuilt)
      .def("iteration", &DirectReducer::iteration)
      .def("copies", &DirectReducer::copies)
      .def("residual",
           [](const DirectReducer& self, size_t index) -> std::optional<at::Tensor> {
             const at::Tensor residual = self.residual(index);
             return residual.defined() ? std::make_optional(residual) : std::nullopt;
           })
      .def("set_residual", &DirectReducer::set_residual, arg("index"), arg("residual"))
      .def("counts", [](const DirectReducer& self) {
        const CodecCounts& counts = self.counts();
        return py::make_tuple(counts.values, counts.overflows, counts.underflows, counts.non_finite,
                              counts.squares, counts.error_squares);
      });
}

}  // namespace
}  // namespace pycomm

PYBIND11_MODULE(_c10d, m) {
  using namespace pycomm;
  py::module_::import("torch.distributed");  // binds the base classes
  register_translator();
  set_interrupt_check(check_signals);

  py::class_<C10dBackend, c10d::Backend, c10::intrusive_ptr<C10dBackend>>(m, "C10dBackend")
      .def(py::init([](const py::capsule& communicator, std::optional<py::function> make_gpu) {
             return c10::make_intrusive<C10dBackend>(
                 communicator_from(communicator), gpu_maker(std::move(make_gpu)), split, farewell);
           }),
           py::arg("communicator"), py::arg("make_gpu") = py::none(),
           "make_gpu() returns the address of the communicator of CUDA tensors.")
      .def("_communicator_address",
           [](const C10dBackend& self) { return address_of(self.communicator()); })
      .def(
          "_communicator_addresses",
          [](const C10dBackend& self) {
            py::list addresses;
            for (const auto& communicator : self.communicators())
              addresses.append(address_of(communicator));
            return addresses;
          },
          "Of the communicators that there are.")
      .def(
          "_gpu_communicator_address",
          [](C10dBackend& self) {
            std::shared_ptr<Communicator> communicator;
            {
              py::gil_scoped_release release;
              communicator = translated([&] { return self.gpu_communicator(); });
            }
            return address_of(communicator);
          },
          "Of the communicator of CUDA tensors, which is made if there is none yet.");
  m.def(
      "make_board",
      [](const c10::intrusive_ptr<c10d::Store>& store) {
        py::gil_scoped_release release;
        std::shared_ptr<Board> board =
            translated([&] { return std::make_shared<StoreBoard>(store); });
        py::gil_scoped_acquire acquire;
        return capsule_of(std::move(board), kBoardCapsule);
      },
      py::arg("store"), "A Store for NcclCommunicator, whose threads use it without the GIL.");
  m.def(
      "set_stand_in_stream",
      [](uintptr_t stream) { set_stand_in_stream(reinterpret_cast<void*>(stream)); },
      py::arg("stream"), "Tests only: the stream of CPU tensors in a group of GPUs.");

  py::class_<HookTarget, std::shared_ptr<HookTarget>>(m, "HookTarget")
      .def(py::init([](const py::capsule& communicator, const BackwardWatch& watch) {
             return std::make_shared<HookTarget>(
                 HookTarget{communicator_from(communicator), watch.times()});
           }),
           py::arg("communicator"), py::arg("watch"))
      .def(
          "replace",
          [](HookTarget& self, const py::capsule& communicator) {
            self.communicator = communicator_from(communicator);
          },
          py::arg("communicator"), "Not while a backward runs.");

  bind_direct_reducer(m);

  py::class_<BackwardWatch, std::shared_ptr<BackwardWatch>>(m, "BackwardWatch")
      .def(py::init([](const std::vector<at::Tensor>& parameters, bool late, py::function report) {
             return std::make_shared<BackwardWatch>(parameters, late, report_to(std::move(report)));
           }),
           py::arg("parameters"), py::arg("late"), py::arg("report"))
      .def("attach", &BackwardWatch::attach, py::arg("reducer"))
      .def("stop", &BackwardWatch::stop)
      .def("attach_direct", &BackwardWatch::attach_direct, py::arg("direct"))
      .def("forward_begins", &BackwardWatch::forward_begins, py::arg("directly"))
      .def("forward_ended", &BackwardWatch::forward_ended, py::arg("outputs"))
      .def("unfinished", &BackwardWatch::unfinished)
      .def("unfinished_indices", &BackwardWatch::unfinished_indices)
      .def("is_between_backwards", &BackwardWatch::is_between_backwards)
      .def("times", [](const BackwardWatch& self) {
        const StepTimes::Totals totals = self.times()->totals();
        py::dict result;
        result["steps"] = totals.steps;
        result["seconds"] = totals.seconds;
        result["seconds_backward"] = totals.seconds_backward;
        result["seconds_exposed"] = totals.seconds_exposed;
        return result;
      });

  py::class_<ParameterWatch>(m, "ParameterWatch")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"))
      .def("changed", &ParameterWatch::changed);

  m.def(
      "register_average_hook",
      [](c10d::Reducer& reducer, std::shared_ptr<HookTarget> target, bool async_op) {
        reducer.register_comm_hook(std::make_unique<AverageHook>(std::move(target), async_op));
      },
      py::arg("reducer"), py::arg("target"), py::kw_only(), py::arg("async_op"),
      "Makes pycomm average the reducer's buckets, in C++.");
}
