// What blocking calls have to do with Python: Ctrl-C and other signals end them, and their failures
// are told. Each module sets its own check.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>

namespace pycomm {

// How long a waiting thread sleeps at most before it looks for interrupts, deadline and dead peers.
inline constexpr std::chrono::milliseconds kSleep{50};

inline std::function<void()>& interrupt_hook() {
  static std::function<void()> hook;
  return hook;
}
inline void set_interrupt_check(std::function<void()> check) {
  interrupt_hook() = std::move(check);
}
// Told when an operation has failed on this rank, if its thread can be told (not a worker).
inline std::function<void(const std::string&)>& failure_hook() {
  static std::function<void(const std::string&)> hook;
  return hook;
}
inline void tell_failure(const std::string& report) {
  if (failure_hook()) failure_hook()(report);
}
// Called about every kSleep by a caller's thread that waits; ends the wait by throwing.
inline void check_interrupt() {
  if (interrupt_hook()) interrupt_hook()();
}

}  // namespace pycomm
