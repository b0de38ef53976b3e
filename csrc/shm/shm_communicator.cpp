#include "shm_communicator.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "../call_site.h"
#include "../interrupt.h"
#include "../test_fault.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;

// Spinning pays while every rank has a core; otherwise the peer needs ours.
constexpr Patience kAmple{4000, 200};
constexpr Patience kCrowded{50, 400};

// How long a wait lasts before a deadlock with another group is looked for.
constexpr std::chrono::milliseconds kCrossingTime{400};
// How long a rank that destroys its group looks whether all others do so too.
constexpr std::chrono::milliseconds kPartingTime{250};

}  // namespace

ShmCommunicator::ShmCommunicator(std::shared_ptr<Segment> segment, int rank,
                                 std::chrono::milliseconds timeout)
    : Communicator(rank, segment->head().world_size, timeout),
      segment_(std::move(segment)),
      heap_(std::make_shared<Heap>(segment_, rank)),
      liveness_(segment_, rank),
      patience_(kCrowded),
      checks_headers_(segment_->head().config.check_headers != 0),
      records_(segment_->head().config.records > 0),
      slots_(*segment_, rank, patience_, *this) {
  RankArea& mine = segment_->area(rank);
  sched_getaffinity(0, sizeof mine.cores, &mine.cores);
  probe_word_ = mine.probe_word = random_word();
  mine.probe_address = reinterpret_cast<uint64_t>(&probe_word_);
  liveness_.introduce();
  execute(Request{});  // after it, what every rank wrote of itself can be read
  if (records_) recorder_.use(segment_->records_of(rank));
  liveness_.begin();
  segment_->close_descriptor();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int peer = 0; peer < world_size(); ++peer)
    CPU_OR(&cores, &cores, &segment_->area(peer).cores);
  // Of all ranks' cores together, so that ranks bound to one core each agree that nobody is
  // crowded.
  crowded_ = world_size() > CPU_COUNT(&cores);
  patience_ = crowded_ ? kCrowded : kAmple;
  const int polls = segment_->head().config.spin_polls;
  if (polls >= 0) patience_.spin_polls = polls;
  slots_.set_patience(patience_);
  find_single_copy();
  messenger_ = std::make_shared<Messenger>(
      segment_, origin(), rank, patience_, liveness_, recorder_,
      [this](const Message& message, uint64_t started, uint64_t finished) {
        count(message.operation, message.bytes(), started, 0, finished);
      },
      [this](const Error& error) {
        failed_ = true;
        record_abort(error);
      });
  registry::add(this);
}

ShmCommunicator::~ShmCommunicator() { end(); }

void ShmCommunicator::end() {
  registry::remove(this);
  closing_ = true;
  stop_worker();
  if (messenger_) messenger_->close();
  leave(kExited);
}

void ShmCommunicator::shutdown() {
  if (is_forked() || closing_) return;
  stop_worker();
  messenger_->finish_sends();
  const bool in_good_order = !failed_ && (!has_ended() || a_call_found_one_gone()) &&
                             segment_->area(rank()).farewell[0] == '\0';
  closing_ = true;
  messenger_->close();
  leave(kLeft);
  if (in_good_order) see_others_leave();
}

// It ended because a rank called what another one, that had left, did not: the fault may be this
// rank's as well.
bool ShmCommunicator::a_call_found_one_gone() const {
  const std::optional<Error> failure = failure_report();
  return failure && failure->blame().cause == Cause::kLeft;
}

// A peer that calls an operation more hears of it from its own wait; so does this rank, here. Its
// call is looked at behind its end, and behind a failure, since either may be what the call led to.
void ShmCommunicator::see_others_leave() const {
  const auto deadline = Clock::now() + kPartingTime;
  const auto look = [this](int peer) {
    const uint32_t theirs = state_of(peer).sequence;
    if (theirs != sequence_ && reached(theirs, sequence_)) throw_left_early(peer, theirs);
  };
  for (int peer = 0; peer < world_size();) {
    const bool failed = load_acquire(segment_->head().abort.state.value) != kClean;
    const bool gone = is_gone(peer);
    look(peer);
    if (failed || Clock::now() >= deadline) {
      for (++peer; peer < world_size(); ++peer) look(peer);
    } else if (gone) {
      ++peer;
    } else {
      check_interrupt();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// Peers that wait for me hear of it; those that wait for others go on.
void ShmCommunicator::leave(Departure how) {
  RankArea& mine = segment_->area(rank());
  if (load_acquire(mine.departed.value) != kPresent) return;
  store_ordered(mine.departed.value, how);
  wake_all(mine);
  for (int peer = 0; peer < world_size(); ++peer)
    futex_wake_all(segment_->area(peer).doorbell.value);
}

void ShmCommunicator::set_farewell(const std::string& reason) {
  RankArea& mine = segment_->area(rank());
  if (is_forked() || load_acquire(mine.departed.value) != kPresent) return;
  std::strncpy(mine.farewell, reason.c_str(), sizeof mine.farewell - 1);
}

std::shared_ptr<Pending> ShmCommunicator::post(const Message& message,
                                               std::shared_ptr<void> keep_alive) {
  check_process();
  check(message);
  check_entry();
  if (__builtin_expect(registry::note_caller(), 0))
    store_release(segment_->area(rank()).many_callers, 1);
  const auto limit = message.timeout.count() > 0 ? message.timeout : timeout();
  return messenger_->post(message, limit, std::move(keep_alive));
}

// ---- one operation

void ShmCommunicator::execute(const Request& request) {
  check_entry();
  begin(request);
  try {
    test_fault_point(rank(), sequence_, TestFault::kAtEntry);
    dispatch(request);
  } catch (const Error& error) {
    fail(error);
    throw;
  } catch (...) {  // an interrupt
    fail(Error(ErrorKind::kAborted, where() + " was interrupted", {Cause::kInterrupted, rank()}));
    throw;
  }
  finish(false);
}

void ShmCommunicator::begin(const Request& request) {
  ++sequence_;
  request_ = &request;
  limit_ = request.timeout.count() > 0 ? request.timeout : timeout();
  waiting_ = waited_ = false;
  met_ = started_ = 0;
  record_ = request.record;
  if (__builtin_expect(registry::note_caller(), 0))
    store_release(segment_->area(rank()).many_callers, 1);
  if (!records_) return;
  started_ = ticks();
  if (record_ != 0)
    recorder_.start(record_, sequence_, started_);
  else
    record_ =
        recorder_.start(request, sequence_, started_,
                        call_sites() == CallSites::kAlways ? find_call_site() : std::string());
}

void ShmCommunicator::finish(bool failed) {
  if (!records_) return;
  // A short operation ends with the meeting, but for copying a few bytes.
  const uint64_t now = is_short() && !failed && met_ != 0 ? met_ : ticks();
  recorder_.finish(record_, now, failed);
  if (!failed && messenger_) count(request_->operation, request_->bytes(), started_, met_, now);
}

void ShmCommunicator::fail(const Error& error) {
  report();
  finish(true);
  failed_ = true;
  record_abort(error);
  tell_failure(failure_report().value_or(error).what());
}

// ---- the end of a wait

// False: the peer is gone, but may have posted what is waited for before it went.
bool ShmCommunicator::check_wait(int peer, bool sleeping) const {
  waited_ = true;
  if (__builtin_expect(has_ended(), 0)) throw_ended(where());
  if (load_acquire(segment_->area(peer).departed.value) != kPresent) return false;
  if (!sleeping) return true;
  const auto now = Clock::now();
  if (!std::exchange(waiting_, true)) wait_began_ = now;
  if (now - wait_began_ >= limit_) throw_late(peer);
  if (!Worker::is_current_thread()) check_interrupt();
  if (now - wait_began_ >= kCrossingTime) check_for_crossing(peer);
  if (meeting_) look_around(peer);
  return !liveness_.is_dead(peer);
}

// One late rank must not hide what another has done already.
void ShmCommunicator::look_around(int peer) const {
  for (int other = 0; other < world_size(); ++other) {
    if (other == rank() || other == peer) continue;
    if (has_entered(other) ? agrees_with(other) : !is_gone(other)) continue;
    if (!has_entered(other)) lost_peer(other);
    throw_mismatch("");
  }
}

bool ShmCommunicator::is_gone(int peer) const {
  return load_acquire(segment_->area(peer).departed.value) != kPresent || liveness_.is_dead(peer);
}

// In the middle of an operation: whether another rank has reported a failure, or this communicator
// is coming to its end.
bool ShmCommunicator::has_ended() const {
  return closing_ || load_acquire(segment_->head().abort.state.value) == kSet;
}

void ShmCommunicator::throw_ended(const std::string& where) const {
  if (closing_)
    throw Error(ErrorKind::kAborted, where + " ended: its process group was destroyed",
                {Cause::kLeft, rank()});
  const AbortRecord& record = segment_->head().abort;
  throw Error(record.kind, concat(where, " ended, since another rank reported: ", record.message),
              record.blame);
}

// At the start of one. The first call after a failure elsewhere reports its kind, later ones that
// all is over.
void ShmCommunicator::check_entry() {
  PYCOMM_CHECK(!closing_, kAborted, "rank ", rank(), ": this communicator has been shut down");
  const AbortRecord& record = segment_->head().abort;
  const bool recorded = load_acquire(record.state.value) == kSet;
  if (__builtin_expect(!recorded && !failed_, 1)) return;
  // Failed here while another rank still writes its report: that must not be read yet.
  const char* report = recorded ? record.message : "several ranks failed at once";
  const ErrorKind kind = failed_.exchange(true) ? ErrorKind::kAborted : record.kind;
  throw Error(kind,
              concat("rank ", rank(), ": this communicator ended before: ", report,
                     " -- destroy the process group and initialise it again to go on."),
              recorded ? record.blame : Blame());
}

void ShmCommunicator::wake_all(RankArea& area) {
  for (Flag& stage : area.stages) futex_wake_all(stage.value);
  for (Announcement& announcement : area.announcements)
    futex_wake_all(announcement.header.sequence);
  futex_wake_all(area.latency_probe.value);
  futex_wake_all(area.doorbell.value);
}

// The first failure of any rank is the one that the others report.
void ShmCommunicator::record_abort(const Error& error) {
  AbortRecord& record = segment_->head().abort;
  uint32_t clean = kClean;
  if (!__atomic_compare_exchange_n(&record.state.value, &clean, kWriting, false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST))
    return;
  record.kind = error.kind();
  record.blame = error.blame();
  record.rank = rank();
  std::strncpy(record.message, error.what(), sizeof record.message - 1);
  store_ordered(record.state.value, kSet);
  for (int peer = 0; peer < world_size(); ++peer) wake_all(segment_->area(peer));
}

Failure ShmCommunicator::failure() const {
  const AbortRecord& record = segment_->head().abort;
  if (load_acquire(record.state.value) != kSet) return Failure::kNone;
  if (record.kind == ErrorKind::kTimeout) return Failure::kTimeout;
  return record.rank == rank() ? Failure::kHere : Failure::kElsewhere;
}

std::optional<Error> ShmCommunicator::failure_report() const {
  const AbortRecord& record = segment_->head().abort;
  if (load_acquire(record.state.value) != kSet) return {};
  return Error(record.kind, record.message, record.blame);
}

void ShmCommunicator::abort(const std::string& reason, Cause cause) {
  check_process();
  record_abort(
      Error(ErrorKind::kAborted, concat("rank ", rank(), " aborted: ", reason), {cause, rank()}));
}

// ---- what can be known of a rank

std::vector<RecordView> ShmCommunicator::records(int rank) const {
  return Recorder::read_all(segment_->records_of(rank));
}

RankState ShmCommunicator::state_of(int rank) const {
  const RankArea& area = segment_->area(rank);
  const uint32_t even = load_acquire(area.announcements[0].header.sequence);
  const uint32_t odd = load_acquire(area.announcements[1].header.sequence);
  RankState state;
  state.pid = static_cast<int>(load_acquire(area.pid));
  state.alive = !liveness_.is_dead(rank);
  state.stopped = liveness_.is_stopped(rank);
  state.left = load_acquire(area.departed.value) != kPresent;
  state.sequence = reached(even, odd) ? even : odd;
  if (state.left) state.farewell = area.farewell;
  return state;
}

}  // namespace pycomm
