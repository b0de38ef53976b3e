// Ctrl-C, for both modules.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm {

// Lets the handlers of signals run, and throws what they raise. They run on the main thread only;
// elsewhere this is void. That a call ended so is noted, for peers who come to wait for this rank.
inline void check_signals() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  pybind11::error_already_set error;
  pybind11::module_::import("pycomm.farewell").attr("note_interrupt")(error.value());
  throw error;
}

}  // namespace pycomm
