// The CUDA kernels for Python: on tensors in a device's memory, on a stream. Nothing here waits for
// the device. Compiled where nvcc is found.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "kernels/codec.h"
#include "kernels/codec_cuda.h"
#include "kernels/cuda_device.h"
#include "kernels/elementwise_cuda.h"
#include "python_device_reader.h"
#include "python_transcode.h"

namespace py = pybind11;

namespace pycomm {
namespace {

void py_cuda_transcode(const Codec& codec, int64_t count, uintptr_t stream,
                       const std::vector<EncodedPair>& wires,
                       const std::optional<TensorList>& inputs, int own, int64_t first,
                       float factor, float divisor, const std::optional<py::object>& residual,
                       const std::optional<EncodedPair>& encoded,
                       const std::optional<TensorList>& outputs, bool infinite, bool stochastic,
                       uint64_t seed, const std::optional<py::object>& counts) {
  TranscodeCall plain;
  plain.codec = codec;
  plain.count = count;
  plain.own = own;
  plain.first = first;
  plain.factor = factor;
  plain.divisor = divisor;
  plain.infinite = infinite;
  plain.stochastic = stochastic;
  plain.seed = seed;
  DeviceReader reader(stream);
  TranscodeArguments arguments(plain, {wires, inputs, residual, encoded, outputs},
                               [&](const py::handle& tensor) { return reader.read(tensor); });
  if (counts) arguments.call().counts = read_counts(reader, *counts);
  check_launch(arguments.call());
  py::gil_scoped_release release;
  const UseDevice use(reader.device());
  launch_transcode(arguments.call(), arguments.inputs(), arguments.outputs(), as_stream(stream));
}

void py_cuda_reduce(const py::object& output, const TensorList& sources, const std::string& op,
                    uintptr_t stream, const std::optional<std::vector<double>>& scales) {
  DeviceReader reader(stream);
  const TensorView view = reader.read(output);
  std::vector<const void*> pointers;
  for (const py::object& source : sources) {
    const TensorView other = reader.read(source);
    PYCOMM_CHECK(other.dtype == view.dtype && other.count == view.count, kInvalidArgument,
                 "reduce: sources and output differ in dtype or count");
    pointers.push_back(other.data);
  }
  PYCOMM_CHECK(!scales || scales->size() == sources.size(), kInvalidArgument,
               "reduce: one scale for each source");
  const RealView real = real_view(view.dtype);
  const ReduceOp reduce_op = parse_op(op, kDeviceCaller);
  PYCOMM_CHECK(can_reduce(view.dtype, reduce_op), kInvalidArgument, "reduce: dtype ",
               name_of(view.dtype), " has no op ", op);
  const double* factors = scales ? scales->data() : nullptr;
  const int num_sources = static_cast<int>(pointers.size());
  check_reduce(reduce_op, pointers.data(), num_sources, view.data, factors);
  py::gil_scoped_release release;
  const UseDevice use(reader.device());
  launch_reduce(real.dtype, reduce_op, pointers.data(), num_sources, view.data,
                view.count * real.components, as_stream(stream), factors);
}

}  // namespace

void bind_cuda_kernels(py::module_& m) {
  using py::arg;
  m.def(
      "cuda_transcode", &py_cuda_transcode, arg("codec"), arg("count"), py::kw_only(),
      arg("stream"), arg("wires") = std::vector<EncodedPair>(), arg("inputs") = py::none(),
      arg("own") = 0, arg("first") = 0, arg("factor") = 1.0f, arg("divisor") = 1.0f,
      arg("residual") = py::none(), arg("encoded") = py::none(), arg("outputs") = py::none(),
      arg("infinite") = false, arg("stochastic") = false, arg("seed") = 0,
      arg("counts") = py::none(),
      "transcode() on tensors of one CUDA device, in one launch on a stream (its handle). Tensors "
      "must live until the stream is past it. `counts`, six int64 on the device, is added to; "
      "codec_counts() reads a copy of it.");
  m.def("cuda_reduce", &py_cuda_reduce, arg("output"), arg("sources"), arg("op"), py::kw_only(),
        arg("stream"), arg("scales") = py::none(),
        "reduce() on tensors of one CUDA device, aligned to 16 bytes, on a stream.");
}

}  // namespace pycomm
