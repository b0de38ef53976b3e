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
  kAborted
};

// The class of pycomm.errors that stands for a kind.
inline const char* class_name(ErrorKind kind) {
  static constexpr const char* kNames[] = {"Error",        "InvalidArgument", "MismatchError",
                                           "TimeoutError", "PeerDiedError",   "AbortedError"};
  return kNames[static_cast<int>(kind)];
}

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
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
