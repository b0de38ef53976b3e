#include "liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "../error.h"
#include "../process.h"
#include "greeting.h"
#include "wait.h"

namespace pycomm {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBeat{100};

// A rank's lock is the byte of the segment at its number.
struct flock byte_of(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

// Whether /proc is of this process' pid namespace, and not of the one around it.
bool proc_shows_pids() {
  char link[16] = "";
  return readlink("/proc/self", link, sizeof link - 1) > 0 && link == std::to_string(getpid());
}

int open_pidfd(uint32_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

// Old kernels have none, and containers may refuse the call.
bool has_pidfds() {
  const int descriptor = open_pidfd(static_cast<uint32_t>(getpid()));
  if (descriptor >= 0) close(descriptor);
  return descriptor >= 0 || errno == EMFILE || errno == ENFILE;
}

}  // namespace

Cause cause_of_loss(const RankArea& area) {
  const uint32_t departed = load_acquire(area.departed.value);
  if (departed == kPresent) return Cause::kDied;
  return departed == kLeft && !area.farewell[0] ? Cause::kLeft : Cause::kExited;
}

Liveness::Liveness(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)),
      rank_(rank),
      pid_namespace_(own_pid_namespace()),
      watched_(static_cast<size_t>(segment_->head().world_size)) {}

Liveness::~Liveness() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  heart_stops_.notify_all();
  if (heart_.joinable()) heart_.join();
  for (const Watched& peer : watched_)
    if (peer.descriptor >= 0) close(peer.descriptor);
  if (lock_descriptor_ >= 0) close(lock_descriptor_);
}

void Liveness::introduce() {
  RankArea& mine = segment_->area(rank_);
  mine.pid_namespace = pid_namespace_;
  mine.no_pidfd = has_pidfds() ? 0 : 1;
  host_name().copy(mine.host, sizeof mine.host - 1);
  store_release(mine.pid, static_cast<uint32_t>(getpid()));
}

bool Liveness::is_me(int rank) const {  // ranks may be threads of one process
  return rank == rank_ ||
         (segment_->area(rank).pid == static_cast<uint32_t>(getpid()) && shares_namespace(rank));
}

// False also if the system tells neither namespace.
bool Liveness::shares_namespace(int rank) const {
  return pid_namespace_ != 0 && segment_->area(rank).pid_namespace == pid_namespace_;
}

bool Liveness::shares_pids(int rank) const {
  const LifeSign how = segment_->head().config.liveness;
  const bool both_may = !segment_->area(rank_).no_pidfd && !segment_->area(rank).no_pidfd;
  return how == LifeSign::kPid || (how == LifeSign::kAuto && both_may && shares_namespace(rank));
}

void Liveness::begin() {
  const LifeSign how = segment_->head().config.liveness;
  bool all_by_pid = true;
  for (int peer = 0; peer < segment_->head().world_size; ++peer) {
    PYCOMM_CHECK(how != LifeSign::kPid || is_me(peer) || shares_namespace(peer), kInvalidArgument,
                 "rank ", rank_, " cannot watch rank ", peer, " by its pid: it is ",
                 process_of(peer), ". Set PYCOMM_LIVENESS to auto.");
    PYCOMM_CHECK(how != LifeSign::kPid || !segment_->area(peer).no_pidfd, kInvalidArgument, "rank ",
                 peer,
                 " cannot watch others by their pids: the kernel refuses it "
                 "pidfd_open. Set PYCOMM_LIVENESS to auto.");
    all_by_pid = all_by_pid && (is_me(peer) || shares_pids(peer));
  }
  if (all_by_pid) return;
  RankArea& mine = segment_->area(rank_);
  const bool heart = how == LifeSign::kHeartbeat || !take_lock();
  if (heart) heart_ = std::thread([this] { beat(); });
  store_release(mine.watched_by, heart ? kByHeartbeat : kByLock);
}

void Liveness::forget() {
  if (lock_descriptor_ >= 0) close(std::exchange(lock_descriptor_, -1));
}

// ---- the lock

// On a file description of its own: the descriptor that was handed out is shared by all ranks.
bool Liveness::take_lock() {
  const std::string path = concat("/proc/self/fd/", segment_->descriptor());
  lock_descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct flock lock = byte_of(rank_);
  return lock_descriptor_ >= 0 && fcntl(lock_descriptor_, F_OFD_SETLK, &lock) == 0;
}

bool Liveness::holds_lock(int rank) const {
  struct flock lock = byte_of(rank);
  if (lock_descriptor_ < 0 || fcntl(lock_descriptor_, F_OFD_GETLK, &lock) != 0) return true;
  return lock.l_type != F_UNLCK;
}

// ---- the heartbeat

void Liveness::beat() {
  std::unique_lock<std::mutex> lock(mutex_);
  RankArea& mine = segment_->area(rank_);
  do {
    store_release(mine.heartbeat, mine.heartbeat + 1);
  } while (!heart_stops_.wait_for(lock, kBeat, [this] { return stopping_; }));
}

bool Liveness::is_silent(int rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Watched& peer = watched_[rank];
  const uint32_t beats = load_acquire(segment_->area(rank).heartbeat);
  const auto now = Clock::now();
  if (peer.since == Clock::time_point() || beats != peer.beats) {
    peer.beats = beats;
    peer.since = now;
  }
  return now - peer.since > kSilence;
}

// ---- questions

bool Liveness::is_dead(int rank) const {
  const RankArea& area = segment_->area(rank);
  const uint32_t pid = load_acquire(area.pid);
  if (pid == 0 || is_me(rank)) return false;
  if (!shares_pids(rank)) {
    const uint32_t by = load_acquire(area.watched_by);
    return by == kByLock ? !holds_lock(rank) : by == kByHeartbeat && is_silent(rank);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Watched& peer = watched_[rank];
  if (peer.descriptor < 0 && !peer.gone) {
    peer.descriptor = open_pidfd(pid);
    peer.gone = peer.descriptor < 0 && errno == ESRCH;
  }
  if (peer.descriptor < 0) return peer.gone;
  pollfd entry{peer.descriptor, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

bool Liveness::is_stopped(int rank) const {
  const RankArea& area = segment_->area(rank);
  if (load_acquire(area.pid) == 0 || is_me(rank) || !shares_pids(rank) || !proc_shows_pids())
    return false;
  const std::optional<ProcessStat> found = stat_of(area.pid);
  return found && (found->state == 'T' || found->state == 't');
}

std::string Liveness::process_of(int rank) const {
  const RankArea& area = segment_->area(rank);
  if (is_me(rank) || area.pid_namespace == pid_namespace_) return concat("pid ", area.pid);
  const std::string host = area.host;
  return concat("pid ", area.pid, " in another pid namespace",
                host == host_name() ? "" : concat(", that of host ", host));
}

}  // namespace pycomm
