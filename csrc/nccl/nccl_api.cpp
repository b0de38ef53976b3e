#include "nccl_api.h"

#include <dlfcn.h>

#include <algorithm>

#include "library.h"

namespace pycomm::nccl {

std::string version_text(int code) {
  return concat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

const char* name_of(Result result) {
  switch (result) {
    case Result::kSuccess:
      return "ncclSuccess";
    case Result::kUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case Result::kSystemError:
      return "ncclSystemError";
    case Result::kInternalError:
      return "ncclInternalError";
    case Result::kInvalidArgument:
      return "ncclInvalidArgument";
    case Result::kInvalidUsage:
      return "ncclInvalidUsage";
    case Result::kRemoteError:
      return "ncclRemoteError";
    case Result::kInProgress:
      return "ncclInProgress";
    case Result::kTimeout:
      return "ncclTimeout";
  }
  return "an unknown result";
}

const char* advice_for(Result result) {
  switch (result) {
    case Result::kUnhandledCudaError:
      return "A CUDA call failed: see whether the GPU is usable (nvidia-smi), and whether an "
             "earlier "
             "kernel has failed.";
    case Result::kSystemError:
      return "A system call failed: look at memory and file limits, /dev/shm and the network; "
             "NCCL_DEBUG=WARN prints which.";
    case Result::kInternalError:
      return "NCCL found itself in a state that it did not expect; NCCL_DEBUG=WARN prints where.";
    case Result::kInvalidArgument:
    case Result::kInvalidUsage:
      return "Do two ranks use one GPU, or do ranks call different things? NCCL_DEBUG=WARN prints "
             "more.";
    case Result::kRemoteError:
      return "Another rank has ended or cannot be reached; see that rank's own output.";
    default:
      return "NCCL_DEBUG=WARN prints more.";
  }
}

namespace {

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::shared_ptr<const NcclApi> NcclApi::load(const std::string& path,
                                             const std::vector<std::string>& candidates) {
  const std::vector<std::string> loaded = loaded_libraries("libnccl.so");
  PYCOMM_CHECK(!path.empty() || loaded.size() <= 1, kError,
               "several NCCL libraries are loaded in this process: ", list(loaded),
               ". Set PYCOMM_NCCL_LIB to the one that torch uses.");
  auto api = std::make_shared<NcclApi>();
  api->path_ = find_library(path, loaded, candidates);
  PYCOMM_CHECK(!api->path_.empty(), kError, "no NCCL library is loaded in this process",
               candidates.empty() ? "" : ", and there is none at ", list(candidates),
               ". Install a CUDA build of torch, or set PYCOMM_NCCL_LIB to libnccl.so.2.");
  void* library = open_library(api->path_, "the NCCL library");
  api->fill(library);
  return api;
}

void NcclApi::fill(void* library) {
#define PYCOMM_FIND(member, symbol, parameters)                                       \
  member = reinterpret_cast<decltype(member)>(dlsym(library, #symbol));               \
  PYCOMM_CHECK(member, kError, path_,                                                 \
               " has no function " #symbol ": it is no NCCL library, or older than ", \
               version_text(kOldestVersion));
  PYCOMM_NCCL_FUNCTIONS(PYCOMM_FIND)
#undef PYCOMM_FIND
  get_error_string =
      reinterpret_cast<decltype(get_error_string)>(dlsym(library, "ncclGetErrorString"));
  get_last_error = reinterpret_cast<decltype(get_last_error)>(dlsym(library, "ncclGetLastError"));
  PYCOMM_CHECK(get_error_string && get_last_error, kError, path_,
               " has no ncclGetErrorString or ncclGetLastError: it is no NCCL library");
  const Result result = get_version(&version_);
  PYCOMM_CHECK(result == Result::kSuccess, kError, path_, ": ncclGetVersion returned ",
               name_of(result));
  PYCOMM_CHECK(version_ >= kOldestVersion, kError, path_, " is NCCL ", version_text(version_),
               ", but pycomm needs ", version_text(kOldestVersion),
               " or later. Install a newer nvidia-nccl wheel, or set PYCOMM_NCCL_LIB.");
#define PYCOMM_FIND(member, symbol, major, minor, parameters) \
  if (version_ >= version_code(major, minor))                 \
    member = reinterpret_cast<decltype(member)>(dlsym(library, #symbol));
  PYCOMM_NCCL_LATER_FUNCTIONS(PYCOMM_FIND)
#undef PYCOMM_FIND
}

bool NcclApi::has(const Capability& capability) const {
  const std::string name = capability.name;
  if (name == kShrink.name) return comm_shrink != nullptr;
  if (name == kWindows.name) return comm_window_register && comm_window_deregister;
  if (name == kRevoke.name) return comm_revoke != nullptr;
  if (name == kGrow.name) return comm_grow && comm_get_unique_id;
  return version_ >= capability.since;
}

void NcclApi::require(const Capability& capability, const std::string& what) const {
  PYCOMM_CHECK(has(capability), kInvalidArgument, what, " needs NCCL ",
               version_text(capability.since), " or later, but ", path_, " is ",
               version_text(version_));
}

Error NcclApi::error(Result result, const std::string& what, Comm comm) const {
  const char* said = get_last_error(comm);
  const ErrorKind kind = result == Result::kRemoteError ? ErrorKind::kPeerDied
                         : result == Result::kTimeout   ? ErrorKind::kTimeout
                                                        : ErrorKind::kNccl;
  const Cause cause = result == Result::kTimeout ? Cause::kTimeout : Cause::kOther;
  return Error(kind,
               concat(what, ": NCCL ", version_text(version_), " reports ", name_of(result), " (",
                      static_cast<int>(result), "), ", get_error_string(result),
                      said && *said ? concat("; it said last: ", said) : std::string(), ". ",
                      advice_for(result)),
               {cause});
}

void NcclApi::check(Result result, const std::string& what, Comm comm) const {
  if (__builtin_expect(result != Result::kSuccess && result != Result::kInProgress, 0))
    throw error(result, what, comm);
}

}  // namespace pycomm::nccl
