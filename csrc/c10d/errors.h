// pycomm errors on their way through torch: torch translates exceptions of this base by their
// python_type(), also those that leave an autograd hook, where pybind11's translators are not
// consulted.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

#include "../error.h"

namespace pycomm {

struct C10dError : torch::PyTorchError {
  explicit C10dError(const Error& error) : PyTorchError(error.what()), kind(error.kind()) {}
  PyObject* python_type() override;  // the GIL must be held; a borrowed reference

  ErrorKind kind;
};

// A pycomm Error as one that torch can translate; any other exception as it is.
std::exception_ptr for_torch(std::exception_ptr exception);

// Runs a call of the core on behalf of torch.
template <class Call>
auto translated(Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw C10dError(error);
  }
}

}  // namespace pycomm
