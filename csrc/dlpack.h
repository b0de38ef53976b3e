// The part of the DLPack 1.x binary interface that pycomm consumes, so that any array library's
// tensors can be passed without its headers. Field order and meaning are the standard's
// (https://dmlc.github.io/dlpack).
#pragma once

#include <cstdint>

namespace pycomm::dlpack {

struct Version {
  uint32_t major;
  uint32_t minor;
};
struct Device {
  int32_t type;
  int32_t id;
};
inline constexpr int32_t kCpu = 1;
inline constexpr int32_t kCuda = 2;
inline constexpr int32_t kCudaHost = 3;
inline constexpr int32_t kCudaManaged = 13;

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
};
struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t dimensions;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};
// What the capsule of __dlpack__() ("dltensor") holds.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
// The table behind type(x).__dlpack_c_exchange_api__ ("dlpack_exchange_api"): conversions without
// Python calls.
struct ExchangeApi {
  Version version;
  ExchangeApi* older;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*borrow)(void* object,
                Tensor* out);  // valid while the object lives; -1: a Python exception is set
  void* current_work_stream;
};

}  // namespace pycomm::dlpack
