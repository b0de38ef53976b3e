// codec.h for Python: transcode() on tensors, for tests and for what is made of it in Python.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "kernels/codec.h"

namespace py = pybind11;

namespace pycomm {
namespace {

const Caller kCaller{0, Operation::kAllReduce};

struct EncodedViews {
  TensorView values, scales;
};
// A pair of a uint8 tensor of `count` encoded values and a float32 tensor of their scales.
EncodedViews encoded_views(const std::pair<py::object, py::object>& pair, const Codec& codec,
                           int64_t count) {
  const EncodedViews views{view_of(pair.first, kCaller), view_of(pair.second, kCaller)};
  PYCOMM_CHECK(
      views.values.dtype == DType::kUInt8 && views.values.count >= count * codec.value_bytes(),
      kInvalidArgument, "transcode: expects ", count * codec.value_bytes(),
      " encoded bytes as uint8, not ", views.values.count, " of ", name_of(views.values.dtype));
  PYCOMM_CHECK(views.scales.dtype == DType::kFloat32 && views.scales.count >= codec.scales(count),
               kInvalidArgument, "transcode: expects ", codec.scales(count),
               " scales as float32, not ", views.scales.count, " of ", name_of(views.scales.dtype));
  return views;
}

// Tensors of one dtype that hold `count` elements from `first` on; the spans end with them.
std::vector<Span> spans_of(const std::vector<py::object>& tensors, int64_t first, int64_t count,
                           std::optional<DType>* dtype) {
  std::vector<Span> spans;
  int64_t total = 0;
  for (const py::object& tensor : tensors) {
    const TensorView view = view_of(tensor, kCaller);
    PYCOMM_CHECK(view.dtype == dtype->value_or(view.dtype), kInvalidArgument,
                 "transcode: tensors of ", name_of(view.dtype), " and ", name_of(**dtype),
                 " together");
    *dtype = view.dtype;
    spans.push_back({view.data, view.count});
    total += view.count;
  }
  PYCOMM_CHECK(total >= first + count, kInvalidArgument, "transcode: the tensors hold ", total,
               " elements, not ", first + count);
  return spans;
}

using Pair = std::pair<py::object, py::object>;

CodecCounts py_transcode(const Codec& codec, int64_t count, const std::vector<Pair>& wires,
                         const std::optional<std::vector<py::object>>& inputs, int own,
                         int64_t first, float factor, float divisor,
                         const std::optional<py::object>& residual,
                         const std::optional<Pair>& encoded,
                         const std::optional<std::vector<py::object>>& outputs, bool stream,
                         bool infinite, bool stochastic, uint64_t seed) {
  check(codec);
  PYCOMM_CHECK(count >= 0 && first >= 0, kInvalidArgument, "transcode: count ", count, ", first ",
               first);
  PYCOMM_CHECK(own <= static_cast<int>(wires.size()), kInvalidArgument, "transcode: own ", own,
               " among ", wires.size(), " wires");
  PYCOMM_CHECK(inputs || !wires.empty(), kInvalidArgument, "transcode: nothing to sum");
  TranscodeCall call;
  call.codec = codec;
  call.count = count;
  std::vector<Wire> views;
  for (const Pair& pair : wires) {
    const EncodedViews wire = encoded_views(pair, codec, count);
    views.push_back({wire.values.data, static_cast<const float*>(wire.scales.data)});
  }
  call.wires = views.data();
  call.num_wires = static_cast<int>(views.size());
  std::optional<DType> dtype;
  std::vector<ConstSpan> sources;
  if (inputs) {
    call.own = own;
    for (const Span& span : spans_of(*inputs, first, count, &dtype))
      sources.push_back({span.data, span.count});
    call.inputs = sources.data();
  }
  call.first = first;
  call.factor = factor;
  call.divisor = divisor;
  if (residual) {
    const TensorView view = view_of(*residual, kCaller);
    PYCOMM_CHECK(view.dtype == DType::kFloat32 && view.count >= count && inputs, kInvalidArgument,
                 "transcode: the residual of own tensors is ", count, " float32, not ", view.count,
                 " ", name_of(view.dtype));
    call.residual = static_cast<float*>(view.data);
  }
  if (encoded) {
    const EncodedViews views = encoded_views(*encoded, codec, count);
    PYCOMM_CHECK(!stream || reinterpret_cast<uintptr_t>(views.values.data) % kLineBytes == 0,
                 kInvalidArgument, "transcode: streamed values must be aligned to a cache line");
    call.values = views.values.data;
    call.scales = static_cast<float*>(views.scales.data);
  }
  std::vector<Span> results;
  if (outputs) {
    results = spans_of(*outputs, first, count, &dtype);
    call.outputs = results.data();
  }
  call.dtype = dtype.value_or(DType::kFloat32);
  call.stream = stream;
  call.infinite = infinite;
  call.stochastic = stochastic;
  call.seed = seed;
  CodecCounts counts;
  call.counts = &counts;
  {
    py::gil_scoped_release release;
    transcode(call);
  }
  return counts;
}

}  // namespace

void bind_codec(py::module_& m) {
  using py::arg;
  py::class_<Codec>(m, "Codec", "A wire format and how many values share a scale (0: none do).")
      .def(py::init([](const std::string& format, int block) {
             using Enum = WireFormat;
#define PYCOMM_LIST(enumerator, ...) Enum::enumerator,
             const Codec codec{
                 parse<Enum>(format, {PYCOMM_WIRE_FORMATS(PYCOMM_LIST)}, kCaller, "wire format"),
                 block};
#undef PYCOMM_LIST
             check(codec);
             return codec;
           }),
           arg("format"), arg("block") = 0)
      .def_property_readonly("format", [](const Codec& self) { return name_of(self.format); })
      .def_property_readonly("block", [](const Codec& self) { return self.block; })
      .def_property_readonly("value_bytes", &Codec::value_bytes)
      .def("scales", &Codec::scales, arg("count"))
      .def("wire_bytes", &Codec::wire_bytes, arg("count"), "What so many values take.");
  py::class_<CodecCounts>(m, "CodecCounts", "What encoding did; added up over calls.")
      .def(py::init<>())
      .def_readonly("values", &CodecCounts::values)
      .def_readonly("overflows", &CodecCounts::overflows)
      .def_readonly("underflows", &CodecCounts::underflows)
      .def_readonly("non_finite", &CodecCounts::non_finite)
      .def_readonly("squares", &CodecCounts::squares)
      .def_readonly("error_squares", &CodecCounts::error_squares);
  m.def("transcode", &py_transcode, arg("codec"), arg("count"), py::kw_only(),
        arg("wires") = std::vector<Pair>(), arg("inputs") = py::none(), arg("own") = 0,
        arg("first") = 0, arg("factor") = 1.0f, arg("divisor") = 1.0f, arg("residual") = py::none(),
        arg("encoded") = py::none(), arg("outputs") = py::none(), arg("stream") = false,
        arg("infinite") = false, arg("stochastic") = false, arg("seed") = 0,
        "See csrc/kernels/codec.h; returns what was counted.");
}

}  // namespace pycomm
