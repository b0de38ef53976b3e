// One exception type whose kind decides the Python class, and the checks that throw it.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycomm {

// Each kind is a class of pycomm.errors: Error, InvalidArgument, MismatchError, TimeoutError, ...
enum class ErrorKind : uint8_t {
  kError,
  kInvalidArgument,
  kMismatch,
  kTimeout,
  kPeerDied,
  kAborted,
  kNccl
};

// The class of pycomm.errors that stands for a kind.
inline const char* class_name(ErrorKind kind) {
  static constexpr const char* kNames[] = {"Error",        "InvalidArgument", "MismatchError",
                                           "TimeoutError", "PeerDiedError",   "AbortedError",
                                           "NcclError"};
  return kNames[static_cast<int>(kind)];
}

// Why a group ended, for programs that read failures (pycomm.trace): finer than the class.
enum class Cause : uint8_t {
  kOther,
  kInterrupted,      // Ctrl-C, or another signal whose handler raised
  kAborted,          // abort() or shrink() was called
  kCrossing,         // two groups were entered in different order
  kLeft,             // a rank destroyed the group while others needed it
  kMismatch,         // ranks called different things
  kPartsMismatch,    // the same, in calls of which each rank has counts of its own
  kMessageMismatch,  // a send and its receive differ
  kStopped,          // a rank's process stands still
  kDied,
  kExited,  // a rank's process ended without destroying the group, or left with an exception
  kTimeout
};

inline const char* name_of(Cause cause) {
  static constexpr const char* kNames[] = {
      "other",          "interrupted",      "aborted", "crossing", "left",   "mismatch",
      "parts_mismatch", "message_mismatch", "stopped", "died",     "exited", "timeout"};
  return kNames[static_cast<int>(cause)];
}

// The cause, and the rank of the group that is to blame; -1 where that cannot be told. Of a
// timeout it is the rank that was waited for.
struct Blame {
  Cause cause = Cause::kOther;
  int culprit = -1;
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, Blame blame = {})
      : std::runtime_error(message), kind_(kind), blame_(blame) {}
  ErrorKind kind() const noexcept { return kind_; }
  Blame blame() const noexcept { return blame_; }

 private:
  ErrorKind kind_;
  Blame blame_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace pycomm

// Throws Error(kind, concat(...)) unless the condition holds. The message is built only on failure.
#define PYCOMM_CHECK(condition, kind, ...)                                             \
  do {                                                                                 \
    if (__builtin_expect(!(condition), 0))                                             \
      throw ::pycomm::Error(::pycomm::ErrorKind::kind, ::pycomm::concat(__VA_ARGS__)); \
  } while (0)

// The same for a system call whose failure left its reason in errno.
#define PYCOMM_CHECK_SYSTEM(condition, ...) \
  PYCOMM_CHECK(condition, kError, __VA_ARGS__, ": ", std::strerror(errno))
