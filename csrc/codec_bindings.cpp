// codec.h for Python: transcode() on tensors, for tests and for what is made of it in Python.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "kernels/codec.h"
#include "python_transcode.h"

namespace py = pybind11;

namespace pycomm {
namespace {

const Caller kCaller{0, Operation::kAllReduce};

CodecCounts py_transcode(const Codec& codec, int64_t count, const std::vector<EncodedPair>& wires,
                         const std::optional<TensorList>& inputs, int own, int64_t first,
                         float factor, float divisor, const std::optional<py::object>& residual,
                         const std::optional<EncodedPair>& encoded,
                         const std::optional<TensorList>& outputs, bool stream, bool infinite,
                         bool stochastic, uint64_t seed) {
  TranscodeCall plain;
  plain.codec = codec;
  plain.count = count;
  plain.own = own;
  plain.first = first;
  plain.factor = factor;
  plain.divisor = divisor;
  plain.stream = stream;
  plain.infinite = infinite;
  plain.stochastic = stochastic;
  plain.seed = seed;
  TranscodeArguments arguments(plain, {wires, inputs, residual, encoded, outputs},
                               [](const py::handle& tensor) { return view_of(tensor, kCaller); });
  TranscodeCall& call = arguments.call();
  PYCOMM_CHECK(!stream || reinterpret_cast<uintptr_t>(call.values) % kLineBytes == 0,
               kInvalidArgument, "transcode: streamed values must be aligned to a cache line");
  CodecCounts counts;
  call.counts = &counts;
  {
    py::gil_scoped_release release;
    transcode(call);
  }
  return counts;
}

// What a CUDA kernel counted, as memory: six words of 64 bits.
CodecCounts counts_in(const py::object& tensor) {
  const TensorView view = view_of(tensor, kCaller);
  CodecCounts counts;
  PYCOMM_CHECK(view.bytes() == static_cast<int64_t>(sizeof counts), kInvalidArgument,
               "codec_counts: expects ", sizeof counts, " bytes, not ", view.bytes());
  std::memcpy(static_cast<void*>(&counts), view.data, sizeof counts);
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
        arg("wires") = std::vector<EncodedPair>(), arg("inputs") = py::none(), arg("own") = 0,
        arg("first") = 0, arg("factor") = 1.0f, arg("divisor") = 1.0f, arg("residual") = py::none(),
        arg("encoded") = py::none(), arg("outputs") = py::none(), arg("stream") = false,
        arg("infinite") = false, arg("stochastic") = false, arg("seed") = 0,
        "See csrc/kernels/codec.h; returns what was counted.");
  m.def("codec_counts", &counts_in, arg("tensor"),
        "What cuda_transcode counted, from a copy of its `counts` in CPU memory.");
}

}  // namespace pycomm
