// A clock that costs a few nanoseconds to read, for the flight recorder: processor ticks where they
// run evenly and alike on all cores, the monotonic clock elsewhere.
#pragma once

#include <time.h>

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace pycomm {

inline int64_t nanoseconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// Whether all cores' tick counters run at one constant rate ("invariant TSC", Intel SDM vol. 3,
// "Time-Stamp Counter"). The same on all ranks of a host.
inline bool ticks_are_even() {
#if defined(__x86_64__)
  static const bool even = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 8 & 1) != 0;
  }();
  return even;
#else
  return false;
#endif
}

inline uint64_t ticks() {
#if defined(__x86_64__)
  if (__builtin_expect(ticks_are_even(), 1)) return __rdtsc();
#endif
  return static_cast<uint64_t>(nanoseconds(CLOCK_MONOTONIC));
}

// Turns ticks into time. Its rate is taken over its own life, so a young one waits for a moment.
class TickScale {
 public:
  TickScale() : ticks_(ticks()), time_(nanoseconds(CLOCK_MONOTONIC)) {}

  struct Now {
    uint64_t ticks;
    int64_t time;  // since the epoch
    double nanoseconds_per_tick;
    // Since the epoch; 0 for 0, which means "not yet".
    int64_t epoch_of(uint64_t then) const { return then == 0 ? 0 : time - span(then, ticks); }
    int64_t span(uint64_t from, uint64_t to) const {
      return static_cast<int64_t>(static_cast<double>(static_cast<int64_t>(to - from)) *
                                  nanoseconds_per_tick);
    }
  };
  Now now() const {
    for (;;) {
      const uint64_t at = ticks();
      const int64_t time = nanoseconds(CLOCK_MONOTONIC);  // nobody sets it meanwhile
      if (time - time_ < kLeastSpan) continue;
      const double rate = ticks_are_even()
                              ? static_cast<double>(time - time_) / static_cast<double>(at - ticks_)
                              : 1.0;
      return {at, nanoseconds(CLOCK_REALTIME), rate};
    }
  }

 private:
  static constexpr int64_t kLeastSpan = 1000000;  // 1 ms
  const uint64_t ticks_;
  const int64_t time_;
};

}  // namespace pycomm
