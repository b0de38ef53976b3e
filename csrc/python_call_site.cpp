#include "python_call_site.h"

#include <pybind11/pybind11.h>

#include <cstring>
#include <vector>

namespace py = pybind11;

namespace pycomm {
namespace {

std::vector<std::string>& skipped() {
  static auto* const folders = new std::vector<std::string>;  // guarded by the GIL
  return *folders;
}

const char* utf8(PyObject* text) {
  const char* bytes = PyUnicode_AsUTF8(text);
  if (!bytes) PyErr_Clear();
  return bytes ? bytes : "?";
}

bool is_users(const char* file) {
  for (const std::string& folder : skipped())
    if (std::strncmp(file, folder.c_str(), folder.size()) == 0) return false;
  const char* name = std::strrchr(file, '/');
  return std::strcmp(name ? name + 1 : file, "contextlib.py") != 0;
}

std::string text_of(PyFrameObject* frame) {
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const auto* fields = reinterpret_cast<PyCodeObject*>(code.ptr());
  std::string text =
      std::string(utf8(fields->co_filename)) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
  const char* function = utf8(fields->co_name);
  return std::strcmp(function, "<module>") == 0 ? text : text + " in " + function;
}

}  // namespace

void skip_files_under(const std::string& folder) { skipped().push_back(folder); }

// Only threads that Python knows have frames; others must not ask for the GIL, which may be gone.
std::string python_call_site() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return "";
  py::gil_scoped_acquire gil;
  const py::error_scope pending;  // an interrupt that is on its way stays so
  py::object frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  for (py::object next; frame; frame = std::move(next)) {
    auto* here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    if (is_users(utf8(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename)))
      return text_of(here);
    next = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  return "";
}

}  // namespace pycomm
