#include "shm_communicator.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "../interrupt.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;

// Spinning pays while every rank has a core; otherwise the peer needs ours.
constexpr Patience kAmple{4000, 200};
constexpr Patience kCrowded{50, 400};

}  // namespace

ShmCommunicator::ShmCommunicator(std::shared_ptr<Segment> segment, int rank,
                                 std::chrono::milliseconds timeout)
    : Communicator(rank, segment->head().world_size, timeout),
      segment_(std::move(segment)),
      heap_(std::make_shared<Heap>(segment_, rank)),
      patience_(kCrowded),
      slots_(*segment_, rank, patience_, *this) {
  RankArea& mine = segment_->area(rank);
  mine.pid = Liveness::own_pid();
  mine.pid_namespace = Liveness::own_pid_namespace();
  sched_getaffinity(0, sizeof mine.cores, &mine.cores);
  probe_word_ = mine.probe_word = random_word();
  mine.probe_address = reinterpret_cast<uint64_t>(&probe_word_);
  execute(Request{});  // after it, what every rank wrote of itself can be read
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int peer = 0; peer < world_size(); ++peer) {
    const RankArea& area = segment_->area(peer);
    liveness_.watch(area.pid, area.pid_namespace);
    CPU_OR(&cores, &cores, &area.cores);
  }
  // Of all ranks' cores together, so that ranks bound to one core each agree that nobody is
  // crowded.
  crowded_ = world_size() > CPU_COUNT(&cores);
  patience_ = crowded_ ? kCrowded : kAmple;
  const int polls = segment_->head().config.spin_polls;
  if (polls >= 0) patience_.spin_polls = polls;
  slots_.set_patience(patience_);
  find_single_copy();
  messenger_ = std::make_shared<Messenger>(segment_, rank, patience_, liveness_,
                                           [this](ErrorKind kind, const std::string& message) {
                                             failed_ = true;
                                             record_abort(kind, message);
                                           });
}

ShmCommunicator::~ShmCommunicator() { end(); }

void ShmCommunicator::end() {
  closing_ = true;
  stop_worker();
  if (messenger_) messenger_->close();
  leave();
}

void ShmCommunicator::shutdown() {
  stop_worker();
  messenger_->finish_sends();
  closing_ = true;
  messenger_->close();
  leave();
}

// Peers that wait for me hear of it; those that wait for others go on.
void ShmCommunicator::leave() {
  RankArea& mine = segment_->area(rank());
  store_ordered(mine.departed.value, 1);
  wake_all(mine);
  for (int peer = 0; peer < world_size(); ++peer)
    futex_wake_all(segment_->area(peer).doorbell.value);
}

std::shared_ptr<Pending> ShmCommunicator::post(const Message& message,
                                               std::shared_ptr<void> keep_alive) {
  check(message);
  check_entry();
  const auto limit = message.timeout.count() > 0 ? message.timeout : timeout();
  return messenger_->post(message, limit, std::move(keep_alive));
}

// ---- one operation

void ShmCommunicator::execute(const Request& request) {
  check_entry();
  ++sequence_;
  request_ = &request;
  limit_ = request.timeout.count() > 0 ? request.timeout : timeout();
  waiting_ = false;
  try {
    dispatch(request);
  } catch (const Error& error) {
    failed_ = true;
    record_abort(error.kind(), error.what());
    throw;
  } catch (...) {  // an interrupt
    failed_ = true;
    record_abort(ErrorKind::kAborted, where() + " was interrupted");
    throw;
  }
}

// ---- the end of a wait

std::string ShmCommunicator::where() const {
  return concat("rank ", rank(), ": ", describe(*request_), " (operation ", sequence_, ")");
}

std::string ShmCommunicator::arrivals() const {
  std::ostringstream here, missing;
  for (int peer = 0; peer < world_size(); ++peer) {
    const OperationHeader& header = segment_->area(peer).announcements[sequence_ & 1].header;
    (reached(load_acquire(header.sequence), sequence_) ? here : missing) << " " << peer;
  }
  return concat("ranks in this operation:", here.str(),
                missing.str().empty() ? std::string() : "; not yet:" + missing.str());
}

// False: the peer is gone, but may have posted what is waited for before it went.
bool ShmCommunicator::check_wait(int peer, bool sleeping) const {
  if (__builtin_expect(has_ended(), 0)) throw_ended(where());
  if (load_acquire(segment_->area(peer).departed.value) != 0) return false;
  if (!sleeping) return true;
  const auto now = Clock::now();
  if (!std::exchange(waiting_, true)) wait_began_ = now;
  PYCOMM_CHECK(now - wait_began_ < limit_, kTimeout, where(), " exceeded its timeout of ",
               limit_.count(), " ms, waiting for rank ", peer, "; ", arrivals(),
               ". Look at what those ranks do, or raise the timeout.");
  if (!Worker::is_current_thread()) check_interrupt();
  return !liveness_.is_dead(peer);
}

void ShmCommunicator::lost_peer(int peer) const {
  const RankArea& area = segment_->area(peer);
  const uint32_t even = load_acquire(area.announcements[0].header.sequence);
  const uint32_t odd = load_acquire(area.announcements[1].header.sequence);
  throw Error(ErrorKind::kPeerDied,
              concat(where(), " lost rank ", peer, " (pid ", area.pid, "), which ",
                     load_acquire(area.departed.value) ? "left the group" : "died",
                     " after entering operation ", reached(even, odd) ? even : odd, "; ",
                     arrivals(), ". See that rank's own output."));
}

// In the middle of an operation: whether another rank has reported a failure, or this communicator
// is coming to its end.
bool ShmCommunicator::has_ended() const {
  return closing_ || load_acquire(segment_->head().abort.state.value) == kSet;
}

void ShmCommunicator::throw_ended(const std::string& where) const {
  PYCOMM_CHECK(!closing_, kAborted, where, " ended: its process group was destroyed");
  const AbortRecord& record = segment_->head().abort;
  throw Error(static_cast<ErrorKind>(record.kind),
              concat(where, " ended, since another rank reported: ", record.message));
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
  const ErrorKind kind =
      failed_.exchange(true) ? ErrorKind::kAborted : static_cast<ErrorKind>(record.kind);
  throw Error(kind, concat("rank ", rank(), ": this communicator ended before: ", report,
                           " -- destroy the process group and initialise it again to go on."));
}

void ShmCommunicator::wake_all(RankArea& area) {
  for (Flag& stage : area.stages) futex_wake_all(stage.value);
  for (Announcement& announcement : area.announcements)
    futex_wake_all(announcement.header.sequence);
  futex_wake_all(area.latency_probe.value);
  futex_wake_all(area.doorbell.value);
}

// The first failure of any rank is the one that the others report.
void ShmCommunicator::record_abort(ErrorKind kind, const std::string& message) {
  AbortRecord& record = segment_->head().abort;
  uint32_t clean = kClean;
  if (!__atomic_compare_exchange_n(&record.state.value, &clean, kWriting, false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST))
    return;
  record.kind = static_cast<int32_t>(kind);
  record.rank = rank();
  std::strncpy(record.message, message.c_str(), sizeof record.message - 1);
  store_ordered(record.state.value, kSet);
  for (int peer = 0; peer < world_size(); ++peer) wake_all(segment_->area(peer));
}

Failure ShmCommunicator::failure() const {
  const AbortRecord& record = segment_->head().abort;
  if (load_acquire(record.state.value) != kSet) return Failure::kNone;
  if (static_cast<ErrorKind>(record.kind) == ErrorKind::kTimeout) return Failure::kTimeout;
  return record.rank == rank() ? Failure::kHere : Failure::kElsewhere;
}

void ShmCommunicator::abort(const std::string& reason) {
  record_abort(ErrorKind::kAborted, concat("rank ", rank(), " aborted: ", reason));
}

}  // namespace pycomm
