// The arguments of transcode() from Python, read and checked: the same for memory of the CPU and of
// a CUDA device.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/codec.h"
#include "python_tensor.h"

namespace pycomm {

// A uint8 tensor of encoded values and a float32 tensor of their scales.
using EncodedPair = std::pair<pybind11::object, pybind11::object>;
using TensorList = std::vector<pybind11::object>;

// As they come.
struct TranscodeTensors {
  const std::vector<EncodedPair>& wires;
  const std::optional<TensorList>& inputs;
  const std::optional<pybind11::object>& residual;
  const std::optional<EncodedPair>& encoded;
  const std::optional<TensorList>& outputs;
};

class TranscodeArguments {
 public:
  using Read = std::function<TensorView(const pybind11::handle&)>;

  // `call` has the codec, the count and all that is not a tensor; `read` makes views of tensors.
  // Throws kInvalidArgument for what does not fit together.
  TranscodeArguments(TranscodeCall call, const TranscodeTensors& tensors, Read read);
  TranscodeArguments(const TranscodeArguments&) = delete;
  TranscodeArguments& operator=(const TranscodeArguments&) = delete;

  // Complete, but for the counts.
  TranscodeCall& call() { return call_; }
  const std::vector<Span>& inputs() const { return inputs_; }
  const std::vector<Span>& outputs() const { return outputs_; }

 private:
  struct Encoded {
    TensorView values, scales;
  };
  Encoded read_encoded(const EncodedPair& pair) const;
  std::vector<Span> read_list(const TensorList& tensors);
  void read_residual(const pybind11::object& tensor);

  TranscodeCall call_;
  const Read read_;
  std::optional<DType> dtype_;
  std::vector<Wire> wires_;
  std::vector<Span> inputs_, outputs_;
  std::vector<ConstSpan> const_inputs_;
};

}  // namespace pycomm
