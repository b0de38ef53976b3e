// What the files that bind pycomm._core share.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>

#include "common.h"
#include "error.h"
#include "python_tensor.h"

namespace pycomm {

// The value that a name stands for; InvalidArgument lists the known ones.
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
inline ReduceOp parse_op(const std::string& text, const Caller& caller) {
  using Enum = ReduceOp;
  return parse<Enum>(text, {PYCOMM_REDUCE_OPS(PYCOMM_LIST)}, caller, "op");
}
inline Algorithm parse_algorithm(const std::string& text, const Caller& caller) {
  using Enum = Algorithm;
  return parse<Enum>(text, {PYCOMM_ALGORITHMS(PYCOMM_LIST)}, caller, "algorithm");
}

#undef PYCOMM_LIST

class Pending;
// A Pending as Python sees it; None for null.
pybind11::object to_python(std::shared_ptr<Pending> pending);
// The CUDA stream of the caller on a device (-1: the current one); set by bind_nccl's
// set_stream_source, the default stream before.
inline StreamOf& stream_source() {
  static StreamOf source = [](int) -> void* { return nullptr; };
  return source;
}

void bind_communicator(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
// Of a build with CUDA.
void bind_cuda_kernels(pybind11::module_& m);
void bind_peer_memory(pybind11::module_& m);

}  // namespace pycomm
