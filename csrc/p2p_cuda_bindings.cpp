// Peer memory for Python: one rank's region, and all_reduce over it on a stream. Compiled where
// nvcc is found.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "p2p/peer_memory.h"
#include "python_device_reader.h"
#include "python_transcode.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using std::chrono::milliseconds;

// A PeerMemory that can be closed before Python forgets it.
class PyPeerMemory {
 public:
  PyPeerMemory(int device, int rank, int world_size, milliseconds timeout, int blocks, int slots,
               int64_t slot_bytes) {
    py::gil_scoped_release release;
    memory_ = std::make_unique<PeerMemory>(device, rank, world_size,
                                           PeerLayout{blocks, slots, slot_bytes}, timeout);
  }
  ~PyPeerMemory() { close(); }
  PyPeerMemory(const PyPeerMemory&) = delete;
  PyPeerMemory& operator=(const PyPeerMemory&) = delete;

  PeerMemory& memory() const {
    PYCOMM_CHECK(memory_, kInvalidArgument, "this peer memory is closed");
    return *memory_;
  }
  // Waits for what was launched.
  void close() {
    std::unique_ptr<PeerMemory> closed = std::move(memory_);
    py::gil_scoped_release release;
    closed.reset();
  }

  void all_reduce(const py::object& input, const py::object& output, const std::string& op,
                  uintptr_t stream, const std::string& algorithm,
                  const std::optional<std::vector<double>>& scales) {
    DeviceReader reader(stream, caller());
    const TensorView from = reader.read(input), to = reader.read(output);
    PYCOMM_CHECK(from.dtype == to.dtype && from.count == to.count, kInvalidArgument, caller(),
                 ": input and output differ in dtype or count");
    check_device(reader);
    PYCOMM_CHECK(!scales || scales->size() == static_cast<size_t>(memory().world_size()),
                 kInvalidArgument, caller(), ": one scale for each rank");
    const ReduceOp reduce_op = parse_op(op, caller());
    const Algorithm chosen = parse_algorithm(algorithm, caller());
    py::gil_scoped_release release;
    memory().all_reduce(chosen, from.dtype, reduce_op, from.data, to.data, from.count,
                        as_stream(stream), scales ? scales->data() : nullptr);
  }

  void compressed_all_reduce(const TensorList& tensors, const Codec& codec, uintptr_t stream,
                             const std::string& algorithm, float factor, float divisor,
                             const std::optional<py::object>& residual,
                             const std::optional<py::object>& counts, bool infinite,
                             bool stochastic, uint64_t seed) {
    DeviceReader reader(stream, caller());
    PeerCompressionCall call;
    call.codec = codec;
    call.factor = factor;
    call.divisor = divisor;
    call.infinite = infinite;
    call.stochastic = stochastic;
    call.seed = seed;
    int64_t total = 0;
    for (const py::object& tensor : tensors) {
      const TensorView view = reader.read(tensor);
      if (call.tensors.empty()) call.dtype = view.dtype;
      PYCOMM_CHECK(view.dtype == call.dtype, kInvalidArgument, caller(), ": tensors of ",
                   name_of(call.dtype), " and ", name_of(view.dtype), " together");
      call.tensors.push_back({view.data, view.count});
      total += view.count;
    }
    if (residual) {
      const TensorView view = reader.read(*residual);
      PYCOMM_CHECK(view.dtype == DType::kFloat32 && view.count == total, kInvalidArgument, caller(),
                   ": the residual is ", total, " float32, not ", view.count, " ",
                   name_of(view.dtype));
      call.residual = static_cast<float*>(view.data);
    }
    if (counts) call.counts = read_counts(reader, *counts);
    check_device(reader);
    const Algorithm chosen = parse_algorithm(algorithm, caller());
    py::gil_scoped_release release;
    memory().compressed_all_reduce(chosen, call, as_stream(stream));
  }

 private:
  Caller caller() const { return {memory().rank(), Operation::kAllReduce}; }
  void check_device(const DeviceReader& reader) const {
    PYCOMM_CHECK(reader.device() < 0 || reader.device() == memory().device(), kInvalidArgument,
                 caller(), ": a tensor on CUDA device ", reader.device(),
                 ", but the peer memory is on ", memory().device());
  }

  std::unique_ptr<PeerMemory> memory_;
};

void bind_class(py::module_& m) {
  using py::arg;
  const auto get = [](auto member) {
    return [member](const PyPeerMemory& self) { return (self.memory().*member)(); };
  };
  py::class_<PyPeerMemory>(
      m, "PeerMemory",
      "A rank's region of device memory that the other ranks of the host map, and all_reduce over "
      "it in one kernel. Its handle goes to all ranks, which then connect; see "
      "pycomm.peer_memory.open_peer_memory.")
      .def(py::init<int, int, int, milliseconds, int, int, int64_t>(), arg("device"), arg("rank"),
           arg("world_size"), arg("timeout"), py::kw_only(), arg("blocks") = PeerLayout{}.blocks,
           arg("slots") = PeerLayout{}.slots, arg("slot_bytes") = PeerLayout{}.slot_bytes)
      .def_property_readonly("rank", get(&PeerMemory::rank))
      .def_property_readonly("world_size", get(&PeerMemory::world_size))
      .def_property_readonly("device", get(&PeerMemory::device))
      .def_property_readonly("blocks",
                             [](const PyPeerMemory& self) { return self.memory().layout().blocks; })
      .def_property_readonly("handle", get(&PeerMemory::handle))
      .def(
          "connect",
          [](PyPeerMemory& self, const std::vector<std::string>& handles) {
            py::gil_scoped_release release;
            self.memory().connect(handles);
          },
          arg("handles"), "Maps the memory of all ranks, given by rank; Error says why it cannot.")
      .def("all_reduce", &PyPeerMemory::all_reduce, arg("input"), arg("output"), arg("op") = "sum",
           py::kw_only(), arg("stream"), arg("algorithm") = "auto", arg("scales") = py::none(),
           "Launches one kernel on the stream; input and output may be the same. Collective.")
      .def("compressed_all_reduce", &PyPeerMemory::compressed_all_reduce, arg("tensors"),
           arg("codec"), py::kw_only(), arg("stream"), arg("algorithm") = "auto",
           arg("factor") = 1.0f, arg("divisor") = 1.0f, arg("residual") = py::none(),
           arg("counts") = py::none(), arg("infinite") = false, arg("stochastic") = false,
           arg("seed") = 0, "The same with values that travel encoded; in place.")
      .def(
          "check", [](const PyPeerMemory& self) { self.memory().check(); },
          "Raises what a kernel of this rank reported; does not wait.")
      .def(
          "abort", [](PyPeerMemory& self) { self.memory().abort(); },
          py::call_guard<py::gil_scoped_release>(), "Ends the waits of all ranks' kernels.")
      .def("close", &PyPeerMemory::close,
           "Waits for this rank's kernels and gives the memory back; all ranks must be done.");
}

}  // namespace

void bind_peer_memory(py::module_& m) {
  using py::arg;
  bind_class(m);
  m.def(
      "peer_handle",
      [](std::string host, int64_t process, std::string device, int blocks, int slots,
         int64_t slot_bytes) {
        PeerHandle handle;
        handle.host = std::move(host);
        handle.process = process;
        handle.device = std::move(device);
        handle.layout = {blocks, slots, slot_bytes};
        return handle.text();
      },
      arg("host"), arg("process"), arg("device"), py::kw_only(),
      arg("blocks") = PeerLayout{}.blocks, arg("slots") = PeerLayout{}.slots,
      arg("slot_bytes") = PeerLayout{}.slot_bytes, "For tests: a handle of no memory.");
  m.def(
      "why_not_mapped",
      [](const std::string& mine, const std::string& theirs) {
        return why_not_mapped(PeerHandle::parse(mine), PeerHandle::parse(theirs));
      },
      arg("mine"), arg("theirs"),
      "Why two ranks cannot share memory, as their handles tell; or ''.");
}

}  // namespace pycomm
