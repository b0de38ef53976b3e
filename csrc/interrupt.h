// Lets Ctrl-C and other signals end a blocking call. Each module sets its own check.
#pragma once

#include <chrono>
#include <functional>
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
// Called about every kSleep by a caller's thread that waits; ends the wait by throwing.
inline void check_interrupt() {
  if (interrupt_hook()) interrupt_hook()();
}

}  // namespace pycomm
