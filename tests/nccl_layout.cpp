// csrc/nccl/nccl_types.h against the real nccl.h: compiled, and not run, by tests/test_nccl_api.py.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "../csrc/nccl/nccl_types.h"

namespace ours = pycomm::nccl;

#define SAME(a, b) static_assert(static_cast<long>(a) == static_cast<long>(b), #a " is not " #b)
#define SAME_FIELD(a, b) SAME(offsetof(ours::Config, a), offsetof(ncclConfig_t, b))

SAME(sizeof(ours::UniqueId), sizeof(ncclUniqueId));
SAME(sizeof(ours::Result), sizeof(ncclResult_t));
SAME(sizeof(ours::DataType), sizeof(ncclDataType_t));
SAME(sizeof(ours::RedOp), sizeof(ncclRedOp_t));
SAME(ours::Result::kUnhandledCudaError, ncclUnhandledCudaError);
SAME(ours::Result::kSystemError, ncclSystemError);
SAME(ours::Result::kInternalError, ncclInternalError);
SAME(ours::Result::kInvalidArgument, ncclInvalidArgument);
SAME(ours::Result::kInvalidUsage, ncclInvalidUsage);
SAME(ours::Result::kRemoteError, ncclRemoteError);
SAME(ours::Result::kInProgress, ncclInProgress);
SAME(ours::DataType::kInt8, ncclInt8);
SAME(ours::DataType::kUInt8, ncclUint8);
SAME(ours::DataType::kInt32, ncclInt32);
SAME(ours::DataType::kUInt32, ncclUint32);
SAME(ours::DataType::kInt64, ncclInt64);
SAME(ours::DataType::kUInt64, ncclUint64);
SAME(ours::DataType::kFloat16, ncclFloat16);
SAME(ours::DataType::kFloat32, ncclFloat32);
SAME(ours::DataType::kFloat64, ncclFloat64);
SAME(ours::DataType::kBFloat16, ncclBfloat16);
SAME(ours::kSum, ncclSum);
SAME(ours::kProd, ncclProd);
SAME(ours::kMax, ncclMax);
SAME(ours::kMin, ncclMin);
SAME(ours::kAvg, ncclAvg);
SAME(ours::Residence::kHostImmediate, ncclScalarHostImmediate);
SAME(ours::kNoColor, NCCL_SPLIT_NOCOLOR);
SAME(ours::kUndefined, NCCL_CONFIG_UNDEF_INT);
SAME(ours::kMagic, NCCL_API_MAGIC);
SAME(ours::version_code(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NCCL_VERSION_CODE);
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
SAME_FIELD(min_ctas, minCTAs);
SAME_FIELD(max_ctas, maxCTAs);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
SAME(ours::DataType::kFloat8E4M3, ncclFloat8e4m3);
SAME(ours::DataType::kFloat8E5M2, ncclFloat8e5m2);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 25, 0)
SAME_FIELD(traffic_class, trafficClass);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
SAME_FIELD(comm_name, commName);
SAME_FIELD(collnet_enable, collnetEnable);
SAME_FIELD(cta_policy, CTAPolicy);
SAME_FIELD(shrink_share, shrinkShare);
SAME_FIELD(nvls_ctas, nvlsCTAs);
SAME(ours::kShrinkAbort, NCCL_SHRINK_ABORT);
SAME(ours::kWindowSymmetric, NCCL_WIN_COLL_SYMMETRIC);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0)
SAME(ours::Result::kTimeout, ncclTimeout);
SAME(ours::kRevokeDefault, NCCL_REVOKE_DEFAULT);
SAME(ours::kWindowAlignment, NCCL_WIN_REQUIRED_ALIGNMENT);
#endif

// CUDA's part.
SAME(ours::kCudaErrorNotReady, cudaErrorNotReady);
SAME(ours::kStreamNonBlocking, cudaStreamNonBlocking);
SAME(ours::kEventDisableTiming, cudaEventDisableTiming);
SAME(ours::kMemcpyDefault, cudaMemcpyDefault);
SAME(ours::kCaptureModeThreadLocal, cudaStreamCaptureModeThreadLocal);
SAME(ours::kCaptureNone, cudaStreamCaptureStatusNone);
SAME(ours::MemoryType::kDevice, cudaMemoryTypeDevice);
SAME(ours::MemoryType::kManaged, cudaMemoryTypeManaged);
SAME(offsetof(ours::PointerAttributes, device), offsetof(cudaPointerAttributes, device));
static_assert(sizeof(ours::PointerAttributes) >= sizeof(cudaPointerAttributes));
