// NCCL for Python: the library's table, the settings, and the communicator, which has all methods
// of Communicator.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "nccl/nccl_communicator.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using nccl::NcclApi;
using nccl::NcclCommunicator;
using nccl::NcclSettings;
using std::chrono::milliseconds;

// A torch.distributed Store, or what behaves like one. Called from the watchdog's thread, too.
class PyBoard : public Board {
  template <class Function>
  static auto call(Function&& function) {
    py::gil_scoped_acquire gil;
    try {
      return function();
    } catch (const py::error_already_set& error) {
      throw Error(ErrorKind::kError, concat("the Store failed: ", error.what()));
    }
  }

 public:
  explicit PyBoard(py::object store) : store_(std::move(store)) {}
  ~PyBoard() override {
    if (!Py_IsInitialized()) {
      store_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    store_.release().dec_ref();
  }
  void set(const std::string& key, const std::string& value) override {
    call([&] {
      store_.attr("set")(kPrefix + key, py::bytes(value));
      return 0;
    });
  }
  std::optional<std::string> get(const std::string& key) override {
    return call([&]() -> std::optional<std::string> {
      if (!store_.attr("check")(std::vector<std::string>{kPrefix + key}).cast<bool>()) return {};
      return store_.attr("get")(kPrefix + key).cast<py::bytes>();
    });
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    return call([&]() -> std::string {
      return store_.attr("compare_set")(kPrefix + key, "", py::bytes(value)).cast<py::bytes>();
    });
  }

 private:
  inline static const std::string kPrefix = "pycomm/nccl/";

  py::object store_;
};

// What pycomm._c10d makes of torch's Stores (a pointer to a std::shared_ptr); anything else is
// asked in Python.
constexpr const char* kBoardCapsule = "pycomm.Board";

std::shared_ptr<Board> board_of(py::object store) {
  if (PyCapsule_IsValid(store.ptr(), kBoardCapsule))
    return *static_cast<std::shared_ptr<Board>*>(PyCapsule_GetPointer(store.ptr(), kBoardCapsule));
  return std::make_shared<PyBoard>(std::move(store));
}

// What the Python side keeps of the two tables.
struct PyNccl {
  std::shared_ptr<const NcclApi> nccl;
  std::shared_ptr<const nccl::CudaApi> cuda;
  NcclCommunicator::Apis apis() const {
    PYCOMM_CHECK(cuda, kError, "this NCCL was loaded without a CUDA runtime");
    return {nccl, cuda};
  }
};

// The communicators of this process; at its exit they are left to its end (see core_bindings.cpp).
struct Living {
  std::mutex mutex;
  std::vector<std::weak_ptr<NcclCommunicator>> communicators;
};
Living& living() {
  static auto* const living = new Living;  // outlives static destruction
  return *living;
}

// For the deleter below: it must not hold the GIL, which the watchdog may be waiting for.
std::shared_ptr<NcclCommunicator> enlist(std::shared_ptr<NcclCommunicator> made) {
  if (!made) return nullptr;
  std::shared_ptr<NcclCommunicator> listed(made.get(), [made](NcclCommunicator*) mutable {
    if (Py_IsInitialized() && PyGILState_Check()) {
      py::gil_scoped_release release;
      made.reset();
    } else {
      made.reset();
    }
  });
  std::lock_guard<std::mutex> lock(living().mutex);
  auto& all = living().communicators;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }),
            all.end());
  all.push_back(listed);
  return listed;
}

void abandon_all() {
  const auto reason =
      py::module_::import("pycomm.farewell").attr("last_words")().cast<std::string>();
  py::gil_scoped_release release;
  std::vector<std::weak_ptr<NcclCommunicator>> communicators;
  {
    std::lock_guard<std::mutex> lock(living().mutex);
    communicators.swap(living().communicators);
  }
  for (const auto& communicator : communicators)
    if (const auto alive = communicator.lock()) {
      alive->set_farewell(reason);
      alive->abandon();
    }
}

nccl::CheckLevel parse_level(const std::string& text) {
  if (text == "off") return nccl::CheckLevel::kOff;
  if (text == "late") return nccl::CheckLevel::kLate;
  if (text == "full") return nccl::CheckLevel::kFull;
  throw Error(ErrorKind::kInvalidArgument,
              concat("check must be off, late or full, not '", text, "'"));
}

using OptionalInt = std::optional<int>;
using OptionalText = std::optional<std::string>;

NcclSettings make_settings(bool blocking, OptionalInt cga_cluster_size, OptionalInt min_ctas,
                           OptionalInt max_ctas, OptionalText net_name, OptionalInt traffic_class,
                           OptionalText comm_name, OptionalInt cta_policy, OptionalInt nvls_ctas,
                           OptionalInt collnet_enable, bool split_share, bool shrink_share,
                           int device, bool high_priority, const std::string& check, int records,
                           milliseconds heartbeat, milliseconds abort_limit) {
  NcclSettings settings;
  settings.blocking = blocking;
  settings.cga_cluster_size = cga_cluster_size;
  settings.min_ctas = min_ctas;
  settings.max_ctas = max_ctas;
  settings.net_name = std::move(net_name);
  settings.traffic_class = traffic_class;
  settings.comm_name = std::move(comm_name);
  settings.cta_policy = cta_policy;
  settings.nvls_ctas = nvls_ctas;
  settings.collnet_enable = collnet_enable;
  settings.split_share = split_share;
  settings.shrink_share = shrink_share;
  settings.device = device;
  settings.high_priority = high_priority;
  settings.check = parse_level(check);
  settings.records = records;
  settings.heartbeat = heartbeat;
  settings.abort_limit = abort_limit;
  PYCOMM_CHECK(heartbeat.count() > 0 && abort_limit.count() > 0, kInvalidArgument,
               "heartbeat and abort_limit must be positive");
  return settings;
}

void bind_api(py::module_& m) {
  using py::arg;
  py::class_<PyNccl>(m, "NcclApi", "The functions of an NCCL library and of a CUDA runtime.")
      .def(py::init([](const std::string& nccl_path, const std::string& cuda_path,
                       const std::vector<std::string>& nccl_candidates,
                       const std::vector<std::string>& cuda_candidates, bool cuda) {
             PyNccl made{NcclApi::load(nccl_path, nccl_candidates), nullptr};
             if (cuda) made.cuda = nccl::CudaApi::load(cuda_path, cuda_candidates);
             return made;
           }),
           arg("nccl") = "", arg("cudart") = "",
           arg("nccl_candidates") = std::vector<std::string>(),
           arg("cudart_candidates") = std::vector<std::string>(), arg("cuda") = true)
      .def_property_readonly("version", [](const PyNccl& self) { return self.nccl->version(); })
      .def_property_readonly(
          "version_text",
          [](const PyNccl& self) { return nccl::version_text(self.nccl->version()); })
      .def_property_readonly("path", [](const PyNccl& self) { return self.nccl->path(); })
      .def(
          "capabilities",
          [](const PyNccl& self) {
            py::dict result;
            for (const nccl::Capability& one : nccl::kCapabilities)
              result[one.name] = self.nccl->has(one);
            return result;
          },
          "What depends on the version: {name: whether this library has it}.")
      .def(
          "check",
          [](const PyNccl& self, int result, const std::string& what) {
            self.nccl->check(static_cast<nccl::Result>(result), what);
          },
          arg("result"), arg("what"), "Raises the error that an ncclResult_t stands for, if any.")
      .def(
          "unique_id",
          [](const PyNccl& self) {
            nccl::UniqueId id;
            self.nccl->check(self.nccl->get_unique_id(&id), "asking NCCL for an id");
            return py::bytes(id.internal, sizeof id.internal);
          },
          "A new ncclUniqueId.")
      .def(
          "try_init",
          [](const PyNccl& self) {
            nccl::UniqueId id;
            self.nccl->check(self.nccl->get_unique_id(&id), "asking NCCL for an id");
            nccl::Config config = nccl::to_config(NcclSettings(), *self.nccl);
            nccl::Comm comm = nullptr;
            self.nccl->check(self.nccl->comm_init_rank_config(&comm, 1, id, 0, &config),
                             "making a communicator of one rank");
            if (comm) self.nccl->comm_abort(comm);
          },
          py::call_guard<py::gil_scoped_release>(),
          "Makes an NCCL communicator of this process alone, and ends it: does NCCL work here?")
      .def(
          "devices", [](const PyNccl& self) { return self.apis().second->devices(); },
          "How many GPUs there are; Error in words if none can be used.");
}

void bind_settings(py::module_& m) {
  using py::arg;
  const auto none = py::none();
  py::class_<NcclSettings>(m, "NcclSettings",
                           "What can be set of an NcclCommunicator; see csrc/nccl/nccl_settings.h.")
      .def(py::init(&make_settings), py::kw_only(), arg("blocking") = false,
           arg("cga_cluster_size") = none, arg("min_ctas") = none, arg("max_ctas") = none,
           arg("net_name") = none, arg("traffic_class") = none, arg("comm_name") = none,
           arg("cta_policy") = none, arg("nvls_ctas") = none, arg("collnet_enable") = none,
           arg("split_share") = false, arg("shrink_share") = false, arg("device") = -1,
           arg("high_priority") = true, arg("check") = "late", arg("records") = 512,
           arg("heartbeat") = milliseconds(1000), arg("abort_limit") = milliseconds(5000));
}

// Registered memory, given back when it is closed or goes.
struct Registration {
  std::shared_ptr<void> handle;
};

void bind_class(py::module_& m) {
  using py::arg;
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Registration>(m, "NcclRegistration", "Memory that NCCL uses in place.")
      .def("close", [](Registration& self) { self.handle.reset(); }, Release());
  py::class_<NcclCommunicator, Communicator, std::shared_ptr<NcclCommunicator>>(
      m, "NcclCommunicator",
      "Collectives and messages on GPU tensors, through NCCL, with the methods and errors of "
      "Communicator. Calls return "
      "when they are enqueued; `store` is the group's torch.distributed Store.")
      .def(py::init([](const PyNccl& api, py::object store, int rank, int world_size,
                       milliseconds timeout, const NcclSettings& settings) {
             auto board = board_of(std::move(store));
             py::gil_scoped_release release;
             return enlist(std::make_shared<NcclCommunicator>(api.apis(), std::move(board), rank,
                                                              world_size, timeout, settings));
           }),
           arg("api"), arg("store"), arg("rank"), arg("world_size"), arg("timeout"),
           arg("settings") = NcclSettings())
      .def("connect", &NcclCommunicator::connect, arg("device") = -1, Release(),
           "Collective: makes NCCL's communicator now rather than with the first operation.")
      .def(
          "split",
          [](NcclCommunicator& self, int color, int key, int device) {
            return enlist(self.split(color, key, device));
          },
          arg("color"), arg("key") = 0, arg("device") = -1, Release(),
          "Collective: a communicator of the ranks of one color; None for a negative one.")
      .def(
          "shrink",
          [](NcclCommunicator& self, const std::vector<int>& excluded, int device) {
            return enlist(self.shrink(excluded, device));
          },
          arg("excluded"), arg("device") = -1, Release(),
          "Collective over the ranks that stay: a communicator without the others.")
      .def(
          "grow",
          [](NcclCommunicator& self, int world_size, int device) {
            return enlist(self.grow(world_size, device));
          },
          arg("world_size"), arg("device") = -1, Release(),
          "Collective over all ranks and new ones, which call `join`.")
      .def_static(
          "join",
          [](const PyNccl& api, py::object store, int rank, int world_size, milliseconds timeout,
             const NcclSettings& settings, int device, int growth) {
            auto board = board_of(std::move(store));
            py::gil_scoped_release release;
            return enlist(NcclCommunicator::join(api.apis(), std::move(board), rank, world_size,
                                                 timeout, settings, device, growth));
          },
          arg("api"), arg("store"), arg("rank"), arg("world_size"), arg("timeout"),
          arg("settings") = NcclSettings(), arg("device") = -1, arg("growth") = 1,
          "A new rank's part of `grow`; `growth`: how many splits, shrinks and growths it is.")
      .def("begin_group", &NcclCommunicator::begin_group,
           "Collects this thread's calls until end_group.")
      .def(
          "end_group",
          [](NcclCommunicator& self, bool async_op) {
            std::shared_ptr<Pending> pending;
            {
              py::gil_scoped_release release;
              pending = self.end_group(async_op);
            }
            return to_python(std::move(pending));
          },
          arg("async_op") = false, "Starts them together.")
      .def(
          "register_buffer",
          [](NcclCommunicator& self, uintptr_t data, int64_t bytes, int device) {
            return Registration{self.register_buffer(reinterpret_cast<void*>(data), bytes, device)};
          },
          arg("data"), arg("bytes"), arg("device") = -1, Release())
      .def(
          "register_window",
          [](NcclCommunicator& self, uintptr_t data, int64_t bytes, int device, bool symmetric) {
            return Registration{
                self.register_window(reinterpret_cast<void*>(data), bytes, device, symmetric)};
          },
          arg("data"), arg("bytes"), arg("device") = -1, arg("symmetric") = true, Release(),
          "Collective.")
      .def("_comm_state", &NcclCommunicator::comm_state, arg("device"))
      .def("_abandon", &NcclCommunicator::abandon, Release());
}

}  // namespace

void bind_nccl(py::module_& m) {
  py::module_::import("atexit").attr("register")(py::cpp_function(abandon_all));
  bind_api(m);
  bind_settings(m);
  bind_class(m);
  m.def(
      "set_stream_source",
      [](const py::function& source) {
        static py::handle kept;  // for the process's life
        kept = source.inc_ref();
        stream_source() = [](int device) {
          py::gil_scoped_acquire gil;
          return reinterpret_cast<void*>(kept(device).cast<uintptr_t>());
        };
      },
      py::arg("source"),
      "source(device) is the CUDA stream that the caller's work goes to, as an integer; -1: of "
      "the current device.");
}

}  // namespace pycomm
