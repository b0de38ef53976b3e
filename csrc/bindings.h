// What the files that bind pycomm._core share.
#pragma once

#include <pybind11/pybind11.h>

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

void bind_communicator(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_cuda_kernels(pybind11::module_& m);  // of a build with CUDA

}  // namespace pycomm
