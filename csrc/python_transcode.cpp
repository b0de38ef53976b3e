#include "python_transcode.h"

#include <utility>

#include "error.h"

namespace py = pybind11;

namespace pycomm {

TranscodeArguments::TranscodeArguments(TranscodeCall call, const TranscodeTensors& tensors,
                                       Read read)
    : call_(std::move(call)), read_(std::move(read)) {
  check(call_.codec);
  PYCOMM_CHECK(call_.count >= 0 && call_.first >= 0, kInvalidArgument, "transcode: count ",
               call_.count, ", first ", call_.first);
  PYCOMM_CHECK(call_.own <= static_cast<int>(tensors.wires.size()), kInvalidArgument,
               "transcode: own ", call_.own, " among ", tensors.wires.size(), " wires");
  PYCOMM_CHECK(tensors.inputs || !tensors.wires.empty(), kInvalidArgument,
               "transcode: nothing to sum");
  for (const EncodedPair& pair : tensors.wires) {
    const Encoded wire = read_encoded(pair);
    wires_.push_back({wire.values.data, static_cast<const float*>(wire.scales.data)});
  }
  call_.wires = wires_.data();
  call_.num_wires = static_cast<int>(wires_.size());
  if (tensors.inputs) {
    inputs_ = read_list(*tensors.inputs);
    for (const Span& span : inputs_) const_inputs_.push_back({span.data, span.count});
    call_.inputs = const_inputs_.data();
  } else {
    call_.own = -1;
  }
  if (tensors.residual) read_residual(*tensors.residual);
  if (tensors.encoded) {
    const Encoded result = read_encoded(*tensors.encoded);
    call_.values = result.values.data;
    call_.scales = static_cast<float*>(result.scales.data);
  }
  if (tensors.outputs) {
    outputs_ = read_list(*tensors.outputs);
    call_.outputs = outputs_.data();
  }
  call_.dtype = dtype_.value_or(DType::kFloat32);
}

TranscodeArguments::Encoded TranscodeArguments::read_encoded(const EncodedPair& pair) const {
  const Encoded views{read_(pair.first), read_(pair.second)};
  const int64_t bytes = call_.count * call_.codec.value_bytes();
  const int64_t scales = call_.codec.scales(call_.count);
  PYCOMM_CHECK(views.values.dtype == DType::kUInt8 && views.values.count >= bytes, kInvalidArgument,
               "transcode: expects ", bytes, " encoded bytes as uint8, not ", views.values.count,
               " of ", name_of(views.values.dtype));
  PYCOMM_CHECK(views.scales.dtype == DType::kFloat32 && views.scales.count >= scales,
               kInvalidArgument, "transcode: expects ", scales, " scales as float32, not ",
               views.scales.count, " of ", name_of(views.scales.dtype));
  return views;
}

// Tensors of one dtype that hold `count` elements from `first` on.
std::vector<Span> TranscodeArguments::read_list(const TensorList& tensors) {
  std::vector<Span> spans;
  int64_t total = 0;
  for (const py::object& tensor : tensors) {
    const TensorView view = read_(tensor);
    PYCOMM_CHECK(view.dtype == dtype_.value_or(view.dtype), kInvalidArgument,
                 "transcode: tensors of ", name_of(view.dtype), " and ", name_of(*dtype_),
                 " together");
    dtype_ = view.dtype;
    spans.push_back({view.data, view.count});
    total += view.count;
  }
  PYCOMM_CHECK(total >= call_.first + call_.count, kInvalidArgument, "transcode: the tensors hold ",
               total, " elements, not ", call_.first + call_.count);
  return spans;
}

void TranscodeArguments::read_residual(const py::object& tensor) {
  const TensorView view = read_(tensor);
  PYCOMM_CHECK(view.dtype == DType::kFloat32 && view.count >= call_.count && call_.own >= 0,
               kInvalidArgument, "transcode: the residual of own tensors is ", call_.count,
               " float32, not ", view.count, " ", name_of(view.dtype));
  call_.residual = static_cast<float*>(view.data);
}

}  // namespace pycomm
