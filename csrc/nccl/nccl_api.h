// The NCCL functions that pycomm calls, as a table that is filled at run time from the library that
// torch has loaded (or any other, such as the tests' fake). What came with a later version is null
// where the library is older; `require` says so in words.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../error.h"
#include "nccl_types.h"

namespace pycomm::nccl {

// What this code was written for; newer libraries keep their interface.
inline constexpr int kOldestVersion = version_code(2, 21);
inline constexpr int kNewestKnownVersion = version_code(2, 32, 99);

// X(member, symbol, parameters), all returning ncclResult_t
#define PYCOMM_NCCL_FUNCTIONS(X)                                                            \
  X(get_version, ncclGetVersion, (int*))                                                    \
  X(get_unique_id, ncclGetUniqueId, (UniqueId*))                                            \
  X(comm_init_rank_config, ncclCommInitRankConfig, (Comm*, int, UniqueId, int, Config*))    \
  X(comm_finalize, ncclCommFinalize, (Comm))                                                \
  X(comm_destroy, ncclCommDestroy, (Comm))                                                  \
  X(comm_abort, ncclCommAbort, (Comm))                                                      \
  X(comm_split, ncclCommSplit, (Comm, int, int, Comm*, Config*))                            \
  X(comm_get_async_error, ncclCommGetAsyncError, (Comm, Result*))                           \
  X(comm_count, ncclCommCount, (Comm, int*))                                                \
  X(comm_user_rank, ncclCommUserRank, (Comm, int*))                                         \
  X(comm_register, ncclCommRegister, (Comm, void*, size_t, void**))                         \
  X(comm_deregister, ncclCommDeregister, (Comm, void*))                                     \
  X(mem_alloc, ncclMemAlloc, (void**, size_t))                                              \
  X(mem_free, ncclMemFree, (void*))                                                         \
  X(red_op_create_pre_mul_sum, ncclRedOpCreatePreMulSum,                                    \
    (RedOp*, void*, DataType, Residence, Comm))                                             \
  X(red_op_destroy, ncclRedOpDestroy, (RedOp, Comm))                                        \
  X(all_reduce, ncclAllReduce, (const void*, void*, size_t, DataType, RedOp, Comm, Stream)) \
  X(broadcast, ncclBroadcast, (const void*, void*, size_t, DataType, int, Comm, Stream))    \
  X(reduce, ncclReduce, (const void*, void*, size_t, DataType, RedOp, int, Comm, Stream))   \
  X(all_gather, ncclAllGather, (const void*, void*, size_t, DataType, Comm, Stream))        \
  X(reduce_scatter, ncclReduceScatter,                                                      \
    (const void*, void*, size_t, DataType, RedOp, Comm, Stream))                            \
  X(send, ncclSend, (const void*, size_t, DataType, int, Comm, Stream))                     \
  X(recv, ncclRecv, (void*, size_t, DataType, int, Comm, Stream))                           \
  X(group_start, ncclGroupStart, ())                                                        \
  X(group_end, ncclGroupEnd, ())

// The same, of what came later: X(member, symbol, major, minor, parameters)
#define PYCOMM_NCCL_LATER_FUNCTIONS(X)                                                        \
  X(comm_shrink, ncclCommShrink, 2, 27, (Comm, int*, int, Comm*, Config*, int))               \
  X(comm_window_register, ncclCommWindowRegister, 2, 27, (Comm, void*, size_t, Window*, int)) \
  X(comm_window_deregister, ncclCommWindowDeregister, 2, 27, (Comm, Window))                  \
  X(comm_revoke, ncclCommRevoke, 2, 29, (Comm, int))                                          \
  X(comm_get_unique_id, ncclCommGetUniqueId, 2, 29, (Comm, UniqueId*))                        \
  X(comm_grow, ncclCommGrow, 2, 29, (Comm, int, const UniqueId*, int, Comm*, Config*))

// What depends on the version, by the name that programs ask for.
struct Capability {
  const char* name;
  int since;  // version code
};
inline constexpr Capability kFloat8{"float8", version_code(2, 24)};
inline constexpr Capability kTrafficClass{"traffic_class", version_code(2, 25)};
inline constexpr Capability kNamedComm{"comm_name", version_code(2, 27)};
inline constexpr Capability kPolicies{"policies", version_code(2, 27)};
inline constexpr Capability kShrink{"shrink", version_code(2, 27)};
inline constexpr Capability kWindows{"windows", version_code(2, 27)};
inline constexpr Capability kRevoke{"revoke", version_code(2, 29)};
inline constexpr Capability kGrow{"grow", version_code(2, 29)};
inline constexpr Capability kCapabilities[] = {kFloat8, kTrafficClass, kNamedComm, kPolicies,
                                               kShrink, kWindows,      kRevoke,    kGrow};

std::string version_text(int code);     // "2.30.7"
const char* name_of(Result result);     // "ncclRemoteError"
const char* advice_for(Result result);  // what to do about it

class NcclApi {
 public:
  // `path`: a file to load; empty: the library that the process has already, else the first of
  // `candidates` that exists. Throws Error if there is none, if several are loaded and `path` does
  // not choose, if a function is missing, or if it is too old.
  static std::shared_ptr<const NcclApi> load(const std::string& path,
                                             const std::vector<std::string>& candidates);

#define PYCOMM_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
  PYCOMM_NCCL_FUNCTIONS(PYCOMM_MEMBER)
#undef PYCOMM_MEMBER
#define PYCOMM_MEMBER(member, symbol, major, minor, parameters) \
  Result(*member) parameters = nullptr;
  PYCOMM_NCCL_LATER_FUNCTIONS(PYCOMM_MEMBER)
#undef PYCOMM_MEMBER
  const char* (*get_error_string)(Result) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;

  int version() const { return version_; }
  const std::string& path() const { return path_; }
  bool has(const Capability& capability) const;
  // Throws InvalidArgument: "shrink needs NCCL 2.27, but ... is 2.21.5".
  void require(const Capability& capability, const std::string& what) const;

  // The error that a result stands for: NCCL's name and number of it, what it said last, and what
  // to do. PeerDiedError for ncclRemoteError, TimeoutError for ncclTimeout, else NcclError.
  Error error(Result result, const std::string& what, Comm comm = nullptr) const;
  // Throws it, unless the call has succeeded or is in progress.
  void check(Result result, const std::string& what, Comm comm = nullptr) const;

 private:
  void fill(void* library);

  std::string path_;
  int version_ = 0;
};

}  // namespace pycomm::nccl
