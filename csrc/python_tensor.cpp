#include "python_tensor.h"

#include <memory>
#include <utility>

#include "dlpack.h"
#include "error.h"

namespace py = pybind11;

namespace pycomm {

std::ostream& operator<<(std::ostream& stream, const Caller& caller) {
  return stream << "rank " << caller.rank << ": " << name_of(caller.operation);
}

namespace {

bool is_contiguous(const dlpack::Tensor& tensor) {
  if (!tensor.strides) return true;
  for (int dim = 0; dim < tensor.dimensions; ++dim)
    if (tensor.shape[dim] == 0) return true;
  int64_t expected = 1;
  for (int dim = tensor.dimensions - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

bool to_dtype(const dlpack::DataType& type, DType* dtype) {
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  static constexpr Row kTable[] = {
      {dlpack::kInt, 8, DType::kInt8},
      {dlpack::kInt, 16, DType::kInt16},
      {dlpack::kInt, 32, DType::kInt32},
      {dlpack::kInt, 64, DType::kInt64},
      {dlpack::kUInt, 8, DType::kUInt8},
      {dlpack::kUInt, 16, DType::kUInt16},
      {dlpack::kUInt, 32, DType::kUInt32},
      {dlpack::kUInt, 64, DType::kUInt64},
      {dlpack::kFloat, 16, DType::kFloat16},
      {dlpack::kFloat, 32, DType::kFloat32},
      {dlpack::kFloat, 64, DType::kFloat64},
      {dlpack::kBFloat, 16, DType::kBFloat16},
      {dlpack::kComplex, 64, DType::kComplex64},
      {dlpack::kComplex, 128, DType::kComplex128},
      {dlpack::kBool, 8, DType::kBool},
      {dlpack::kFloat8E4M3FN, 8, DType::kFloat8E4M3},
      {dlpack::kFloat8E5M2, 8, DType::kFloat8E5M2},
  };
  for (const Row& row : kTable)
    if (row.code == type.code && row.bits == type.bits && type.lanes == 1) {
      *dtype = row.dtype;
      return true;
    }
  return false;
}

bool is_cpu(const dlpack::Device& device) {
  return device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
}
bool is_cuda(const dlpack::Device& device) {
  return device.type == dlpack::kCuda || device.type == dlpack::kCudaManaged;
}

const char* words_of(Memory memory) {
  return memory == Memory::kCpu ? "CPU" : memory == Memory::kCuda ? "CUDA" : "CPU or CUDA";
}

void check_place(const dlpack::Device& device, Memory memory, int64_t count, const Caller& caller) {
  if (memory != Memory::kCuda && is_cpu(device)) return;
  if (memory != Memory::kCpu && is_cuda(device)) return;
  const auto place = [&] {
    if (is_cpu(device)) return std::string("in CPU memory");
    if (is_cuda(device)) return concat("on CUDA device ", device.id);
    return concat("on a device of DLPack type ", device.type);
  };
  throw Error(ErrorKind::kInvalidArgument,
              concat(caller, ": a tensor of ", count, " elements is ", place(), ", but this call ",
                     "works on ", words_of(memory), " memory"));
}

TensorView checked_view(const dlpack::Tensor& tensor, Memory memory, const Caller& caller) {
  TensorView view;
  view.count = 1;
  for (int dim = 0; dim < tensor.dimensions; ++dim) view.count *= tensor.shape[dim];
  check_place(tensor.device, memory, view.count, caller);
  PYCOMM_CHECK(to_dtype(tensor.dtype, &view.dtype), kInvalidArgument, caller, ": a tensor of ",
               view.count, " elements has an unsupported dtype (DLPack code ",
               int{tensor.dtype.code}, ", ", int{tensor.dtype.bits}, " bits)");
  PYCOMM_CHECK(is_contiguous(tensor), kInvalidArgument, caller, ": a tensor of ", view.count, " ",
               name_of(view.dtype),
               " elements is not contiguous; pass x.contiguous(), or use torch.distributed, which "
               "copies for you");
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.shape = {tensor.dimensions, tensor.shape};
  if (!is_cuda(tensor.device)) return view;
  view.cuda_device = tensor.device.id;
  PYCOMM_CHECK(
      reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes_of(view.dtype)) == 0,
      kInvalidArgument, caller, ": a tensor of ", view.count, " ", name_of(view.dtype),
      " elements is at ", view.data, ", not at a multiple of their size");
  return view;
}

// The exchange table of an object's type, remembered for the last type seen: nearly always
// torch.Tensor.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;  // guarded by the GIL
  static const dlpack::ExchangeApi* known_api = nullptr;
  if (type == known_type) return known_api;
  const dlpack::ExchangeApi* api = nullptr;
  py::object capsule =
      py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api"))
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api && (api->version.major != 1 || !api->borrow)) api = nullptr;
  if (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
    Py_INCREF(type);  // so that its address stays its own
  known_type = type;
  known_api = api;
  return api;
}

// Whether object.question() is true; false for libraries whose tensors have no such method.
bool answers_yes(const py::handle& object, PyObject* question) {
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), question));
  if (!answer) PyErr_Clear();
  return answer.ptr() == Py_True;
}

// torch's lazy views: their memory is not what they stand for, and DLPack cannot say so.
void check_not_lazy(const py::handle& object, const dlpack::Tensor& tensor, const Caller& caller) {
  static PyObject* const kIsNeg = PyUnicode_InternFromString("is_neg");
  static PyObject* const kIsConj = PyUnicode_InternFromString("is_conj");
  const bool lazy = answers_yes(object, kIsNeg) ||
                    (tensor.dtype.code == dlpack::kComplex && answers_yes(object, kIsConj));
  PYCOMM_CHECK(!lazy, kInvalidArgument, caller, ": a tensor of shape ",
               std::string(py::str(object.attr("shape"))),
               " is a conjugate or negative view; pass x.resolve_conj().resolve_neg()");
}

// What a user can act on, in place of the producer's own error.
[[noreturn]] void throw_not_plain(const py::handle& object, Memory memory, const Caller& caller) {
  PyErr_Clear();
  const auto text = [&](const char* name) {
    return std::string(py::str(py::getattr(object, name, py::str("unknown"))));
  };
  throw Error(ErrorKind::kInvalidArgument,
              concat(caller, ": a tensor of shape ", text("shape"), ", dtype ", text("dtype"),
                     ", device ", text("device"), " and layout ", text("layout"), " is not plain ",
                     words_of(memory), " memory"));
}

// __dlpack__'s capsule. A producer of CUDA memory orders its work before the stream's; the
// protocol's name of the default stream is 1.
py::object capsule_of(const py::handle& object, Memory memory, const StreamOf& stream) {
  if (memory == Memory::kCpu) return object.attr("__dlpack__")();
  const auto device = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
  if (!is_cuda({device.first, device.second})) return object.attr("__dlpack__")();
  const auto handle = reinterpret_cast<uintptr_t>(stream(device.second));
  return object.attr("__dlpack__")(py::arg("stream") = handle == 0 ? uintptr_t{1} : handle);
}

}  // namespace

TensorView view_of(const py::handle& object, const Caller& caller, Memory memory,
                   const StreamOf& stream) {
  dlpack::Tensor tensor;
  if (const auto* api = exchange_api(Py_TYPE(object.ptr()))) {
    if (api->borrow(object.ptr(), &tensor) != 0) throw_not_plain(object, memory, caller);
    check_not_lazy(object, tensor, caller);
    return checked_view(tensor, memory, caller);
  }
  PYCOMM_CHECK(py::hasattr(object, "__dlpack__"), kInvalidArgument, caller,
               ": expected a tensor, got ", std::string(py::str(py::type::handle_of(object))));
  try {
    // The object owns the memory: the capsule may go at once.
    py::object capsule = capsule_of(object, memory, stream);
    auto* managed =
        static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (!managed) throw py::error_already_set();
    TensorView view = checked_view(managed->tensor, memory, caller);
    view.shape = {};  // the capsule's
    return view;
  } catch (const py::error_already_set&) {
    throw_not_plain(object, memory, caller);
  }
}

}  // namespace pycomm
