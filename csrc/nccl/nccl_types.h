// The part of NCCL's and CUDA's binary interface that pycomm uses, so that building needs neither's
// headers. tests/nccl_layout.cpp compares it with the real nccl.h where there is one.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace pycomm::nccl {

// ---- NCCL

using Comm = struct ncclComm*;
using Window = struct ncclWindow_vidmem*;
using RedOp = int;  // an enum there, of which new values are made at run time

inline constexpr int kUniqueIdBytes = 128;
struct UniqueId {
  char internal[kUniqueIdBytes];
};

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // since 2.30
};

enum class DataType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat8E4M3 = 10,  // since 2.24
  kFloat8E5M2 = 11,
};

inline constexpr RedOp kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4;
enum class Residence : int { kDevice = 0, kHostImmediate = 1 };

inline constexpr int kNoColor = -1;
inline constexpr int kShrinkDefault = 0, kShrinkAbort = 1;
inline constexpr int kRevokeDefault = 0;
inline constexpr int kWindowDefault = 0, kWindowSymmetric = 1;
inline constexpr size_t kWindowAlignment = 4096;

inline constexpr int kUndefined = INT_MIN;
inline constexpr unsigned kMagic = 0xcafebeef;

// 2.21 -> 22100
constexpr int version_code(int major, int minor, int patch = 0) {
  return major * 10000 + minor * 100 + patch;
}

// ncclConfig_t. A library takes the fields that it knows, as told by `size` and `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = kMagic;
  unsigned version = 0;
  int blocking = kUndefined;          // 2.14
  int cga_cluster_size = kUndefined;  // 2.17, to net_name
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;     // 2.18
  int traffic_class = kUndefined;   // 2.25
  const char* comm_name = nullptr;  // 2.27, to nvls_ctas
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
};

// ---- CUDA

using Stream = void*;
using Event = void*;

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorNotReady = 600;
inline constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;
inline constexpr int kMemcpyDefault = 4;  // the direction follows from the addresses
inline constexpr int kCaptureNone = 0;
inline constexpr int kCaptureModeThreadLocal = 1;

enum class MemoryType : int { kUnregistered = 0, kHost = 1, kDevice = 2, kManaged = 3 };

// cudaPointerAttributes; the padding is for fields that later versions append.
struct PointerAttributes {
  MemoryType type = MemoryType::kUnregistered;
  int device = -1;
  void* device_pointer = nullptr;
  void* host_pointer = nullptr;
  long reserved[8] = {};
};

}  // namespace pycomm::nccl
