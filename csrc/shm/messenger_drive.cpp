// Who moves a rank's messages: the thread that posts, the threads that wait, and the helper thread
// for what nobody waits for.
#include <sched.h>

#include <algorithm>
#include <utility>

#include "../call_site.h"
#include "../interrupt.h"
#include "messenger.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

// Between two looks at abort, peers and deadlines.
constexpr uint32_t kPollsPerLook = 256;
// The helper looks this often whether somebody must be helped; after this many looks in vain it
// parks, and the next transfer pays for a wake.
constexpr milliseconds kTick{1};
constexpr int kTicksToPark = 50;
// It does not spin: the cores belong to those who wait.
constexpr int kHelperYields = 10;
// How long a thread tries to get the lock before it sleeps for it: a piece or two.
constexpr int kLockPolls = 2000;

// Its dimensions are the tensor's, who may change them while the message is under way.
Message shapeless(Message message) {
  message.shape = {};
  return message;
}

struct Counted {
  std::atomic<int>& count;
  explicit Counted(std::atomic<int>& counter) : count(counter) { ++count; }
  ~Counted() { --count; }
};

}  // namespace

// The lock, for those who must have it: drivers, who come back for it all the time, give way.
std::unique_lock<std::mutex> Messenger::lock() {
  std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
  if (held) return held;
  const Counted asking(asking_);
  for (int poll = 0; poll < kLockPolls; ++poll) {
    cpu_relax();
    if (held.try_lock()) return held;
  }
  held.lock();
  return held;
}

// ---- Transfer

Transfer::Transfer(std::shared_ptr<Messenger> messenger, const Message& message, milliseconds limit,
                   std::shared_ptr<void> keep_alive)
    : Pending(messenger->origin_),
      messenger_(std::move(messenger)),
      message_(shapeless(message)),
      limit_(limit),
      keep_alive_(std::move(keep_alive)) {}

bool Transfer::is_done() { return Pending::is_done() || messenger_->drive(this, false).done; }

bool Transfer::wait(milliseconds at_most) {
  return Pending::is_done() || messenger_->wait_for(*this, at_most);
}

// ---- posting

std::shared_ptr<Pending> Messenger::post(const Message& message, milliseconds limit,
                                         std::shared_ptr<void> keep_alive) {
  std::unique_lock<std::mutex> held = lock();
  PYCOMM_CHECK(!over_, kAborted, call(message), ": this communicator has ended");
  posting_at_ = ticks();
  recording_ = recorder_.start(message, ++posted_, posting_at_,
                               call_sites() == CallSites::kAlways ? find_call_site() : "");
  const TransferPtr transfer = message.operation == Operation::kSend
                                   ? send(message, limit, keep_alive)
                                   : receive(message, limit, keep_alive);
  if (transfer && !transfer->complete_) {
    transfer->deadline_ = Clock::now() + limit;
    wake_helper();
  }
  if (!transfer) {
    const uint64_t now = ticks();
    recorder_.finish(recording_, now, false);
    count_(message, posting_at_, now);
  }
  settle(held);
  return transfer;
}

void Messenger::finish_sends() {
  std::vector<TransferPtr> sends;
  {
    const auto held = lock();
    for (const Outgoing& out : outgoing_)
      sends.insert(sends.end(), out.queue.begin(), out.queue.end());
  }
  for (const TransferPtr& send : sends) send->wait(milliseconds(0));
}

void Messenger::close() {
  {
    auto held = lock();
    closed_ = true;
    end_all(Error(ErrorKind::kAborted, "its process group was destroyed", {Cause::kLeft, rank_}));
    settle(held);
  }
  helper_wake_.notify_all();
  wake_own();
  if (!helper_.joinable()) return;
  if (helper_.get_id() == std::this_thread::get_id())  // a callback destroys the communicator
    helper_.detach();
  else
    helper_.join();
}

// ---- driving

// Moves what can be moved. Thoroughly: even if another thread has the lock, and looks for reasons
// to end.
Messenger::Drove Messenger::drive(Transfer* transfer, bool thoroughly) {
  std::unique_lock<std::mutex> held(mutex_, std::defer_lock);
  if (thoroughly)
    held = lock();
  else if (asking_.load(std::memory_order_relaxed) > 0 || !held.try_lock())
    return {transfer && transfer->Pending::is_done(), false, false};
  Drove drove;
  drove.progress = move_everything();
  if (thoroughly) look_after();
  drove.idle = outstanding_ == 0;
  drove.done = transfer && transfer->complete_;
  settle(held);
  // Another thread may be about to settle it.
  drove.done = drove.done && transfer->Pending::is_done();
  return drove;
}

// Makes complete transfers done: drops what they kept alive, and runs their callbacks, which may
// use this messenger.
void Messenger::settle(std::unique_lock<std::mutex>& held) {
  if (__builtin_expect(completed_.empty(), 1)) return;
  const auto self = std::this_thread::get_id(), before = settling_;
  if (before != std::thread::id() && before != self) return;  // that thread goes on with ours
  settling_ = self;
  while (!completed_.empty()) {
    const TransferPtr transfer = std::move(completed_.front());
    completed_.pop_front();
    held.unlock();
    transfer->keep_alive_ = nullptr;
    transfer->source_.store(transfer->from_, std::memory_order_relaxed);
    transfer->finish(transfer->outcome_);
    // A thread that announced its sleep after this has seen that its transfer is done.
    if (asleep_.fetch_add(0) > 0) wake_own();
    held.lock();
  }
  settling_ = before;
}

void Messenger::wake_own() {
  Flag& doorbell = segment_->area(rank_).doorbell;
  __atomic_add_fetch(&doorbell.value, 1, __ATOMIC_SEQ_CST);
  futex_wake_all(doorbell.value);
}

// Sleeps until the doorbell rings, unless there is something to do. What peers publish after the
// announcement rings it; what they published before is seen by the drive behind it.
Messenger::Drove Messenger::sleep(Transfer* transfer, milliseconds at_most) {
  Flag& doorbell = segment_->area(rank_).doorbell;
  const Sleeper sleeper(doorbell.sleepers);
  const uint32_t seen = load_ordered(doorbell.value);
  const Drove drove = drive(transfer, true);
  if (!drove.done && !drove.progress && !(drove.idle && !transfer))
    futex_wait(doorbell.value, seen, at_most);
  return drove;
}

bool Messenger::wait_for(Transfer& transfer, milliseconds at_most) {
  const Counted driving(drivers_);
  const bool limited = at_most.count() > 0;
  const auto until = limited ? Clock::now() + at_most : Clock::time_point::max();
  const milliseconds slice = limited ? std::min(at_most, kSleep) : kSleep;
  int idle = 0;  // polls since anything moved
  for (uint32_t poll = 1;; ++poll) {
    const bool tired = idle >= patience_.spin_polls + patience_.yields;
    const bool look = tired || poll % kPollsPerLook == 0;
    Drove drove;
    if (tired) {
      const Counted asleep(asleep_);
      drove = sleep(&transfer, slice);
    } else {
      drove = drive(&transfer, look);
    }
    if (drove.done) return true;
    if (look && Clock::now() >= until) return transfer.Pending::is_done();
    if (tired && !limited && !Worker::is_current_thread()) check_interrupt();
    idle = drove.progress ? 0 : idle + !tired;
    if (idle < patience_.spin_polls)
      cpu_relax();
    else if (!tired)
      sched_yield();
  }
}

// ---- the helper

void Messenger::wake_helper() {
  if (!helper_.joinable())
    helper_ = std::thread([self = shared_from_this()] { self->help(); });
  else if (helper_parked_)
    helper_wake_.notify_one();
}

void Messenger::help() {
  int looks = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto closed = [this] { return closed_; };
  while (!helper_wake_.wait_for(lock, kTick, closed)) {
    if (outstanding_ > 0) {
      looks = 0;
      lock.unlock();
      help_along();
      lock.lock();
    } else if (++looks >= kTicksToPark) {
      helper_parked_ = true;
      helper_wake_.wait(lock, [this] { return closed_ || outstanding_ > 0; });
      helper_parked_ = false;
    }
  }
}

// Moves messages until none is outstanding or a thread waits, who does it better.
void Messenger::help_along() {
  if (drivers_ > 0) {
    drive(nullptr, true);  // deadlines, should all waits be too short to look at them
    return;
  }
  for (int idle = 0; drivers_ == 0;) {
    const Drove drove = idle < kHelperYields ? drive(nullptr, false) : sleep(nullptr, kSleep);
    if (drove.idle) return;
    idle = drove.progress ? 0 : idle + 1;
    if (idle > 0 && idle < kHelperYields) sched_yield();
  }
}

}  // namespace pycomm
