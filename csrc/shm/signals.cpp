// Signals between ranks outside of collective operations.
#include <chrono>

#include "shm_communicator.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void ShmCommunicator::raise_signal(void* signal) {
  check_process();
  Flag& flag = *static_cast<Flag*>(signal);
  set_and_wake(flag.value, flag.value + 1, flag.sleepers);
}

// Ends a wait for a signal, like check_wait that of an operation.
class ShmCommunicator::SignalGuard {
 public:
  SignalGuard(const ShmCommunicator& owner, int peer, std::chrono::milliseconds limit)
      : owner_(owner), peer_(peer), limit_(limit), began_(Clock::now()) {}

  bool check(bool sleeping) const {
    if (owner_.has_ended()) owner_.throw_ended(where());
    if (load_acquire(owner_.segment_->area(peer_).departed.value) != 0) return false;
    if (Clock::now() - began_ >= limit_)
      throw Error(ErrorKind::kTimeout,
                  concat(where(), " exceeded its timeout of ", limit_.count(),
                         " ms. Look at what that rank does, or raise the timeout."),
                  {Cause::kTimeout, peer_});
    if (!sleeping) return true;
    if (!Worker::is_current_thread()) check_interrupt();
    return !owner_.liveness_.is_dead(peer_);
  }
  [[noreturn]] void lost() const {
    throw Error(ErrorKind::kPeerDied,
                concat(where(), " lost that rank (", owner_.liveness_.process_of(peer_),
                       "), which died or left the group. See its own output."),
                {cause_of_loss(owner_.segment_->area(peer_)), peer_});
  }

 private:
  std::string where() const {
    return concat("rank ", owner_.rank(), ": waiting for a signal of rank ", peer_);
  }
  const ShmCommunicator& owner_;
  const int peer_;
  const std::chrono::milliseconds limit_;
  const Clock::time_point began_;
};

void ShmCommunicator::await_signal(void* signal, uint32_t target, int peer,
                                   std::chrono::milliseconds timeout) {
  check_process();
  Flag& flag = *static_cast<Flag*>(signal);
  if (reached(load_acquire(flag.value), target)) return;
  wait_until(flag.value, target, flag.sleepers, patience_,
             SignalGuard(*this, peer, timeout.count() > 0 ? timeout : this->timeout()));
}

}  // namespace pycomm
