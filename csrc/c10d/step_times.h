// How long the steps of a DDP module take, and what its communication adds to them.
#pragma once

#include <atomic>
#include <cstdint>

#include "../clock.h"

namespace pycomm {

// A step goes from a synchronised forward to the end of its backward. Exposed is what is not hidden
// behind the computation of gradients: averaging in the thread that runs backward, and everything
// from the last gradient to the end.
class StepTimes {
 public:
  struct Totals {
    int64_t steps;
    double seconds, seconds_backward, seconds_exposed;
  };

  void forward_begins() { forward_ = ticks(); }
  void backward_begins() {
    backward_ = last_gradient_ = ticks();
    averaging_ = averaging_before_last_ = 0;
  }
  void gradient_came() {
    last_gradient_ = ticks();
    averaging_before_last_ = averaging_.load(std::memory_order_relaxed);
  }
  // From any of the threads that run backward.
  void averaged(uint64_t began) {
    averaging_.fetch_add(ticks() - began, std::memory_order_relaxed);
  }
  void backward_ended() {
    if (forward_ == 0) return;  // of a forward that was not synchronised, or counted already
    const uint64_t now = ticks();
    ++steps_;
    all_ += now - forward_;
    backwards_ += now - backward_;
    exposed_ += now - last_gradient_ + averaging_before_last_;
    forward_ = 0;
  }

  Totals totals() const {
    const TickScale::Now scale = scale_.now();
    const auto seconds = [&](uint64_t span) {
      return static_cast<double>(span) * scale.nanoseconds_per_tick * 1e-9;
    };
    return {steps_, seconds(all_), seconds(backwards_), seconds(exposed_)};
  }

 private:
  const TickScale scale_;
  int64_t steps_ = 0;
  uint64_t all_ = 0, backwards_ = 0, exposed_ = 0;           // ticks
  uint64_t forward_ = 0, backward_ = 0, last_gradient_ = 0;  // when
  std::atomic<uint64_t> averaging_{0};
  uint64_t averaging_before_last_ = 0;
};

}  // namespace pycomm
