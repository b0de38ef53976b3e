// What a rank tells the others, and what it says when an operation ends without its data.
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "../process.h"
#include "nccl_communicator.h"
#include "watchdog.h"

namespace pycomm::nccl {
namespace {

using Clock = NcclWork::Clock;
using Milliseconds = std::chrono::milliseconds;

// How long between two looks at the events of what is under way.
constexpr Milliseconds kLook{2}, kLongLook{20};
// A rank of another host that has not been heard of for so many heartbeats has died.
constexpr int kSilentBeats = 20;
// Of the ranks that have not come, so many are described.
constexpr int kMostDescribed = 8;

constexpr const char* kFailureKey = "failure";
std::string state_key(int rank) { return concat("state/", rank); }

// When the process was started; 0: there is no such process, or it has ended.
uint64_t start_time(int pid) {
  const std::optional<ProcessStat> found = stat_of(pid);
  return found && found->state != 'Z' ? found->start_time : 0;
}

// The same for processes that see each other's ids.
std::string host_key() { return concat(boot_id(), "/", own_pid_namespace()); }

std::string encode(const Error& error, int rank) {
  return concat(static_cast<int>(error.kind()), " ", static_cast<int>(error.blame().cause), " ",
                error.blame().culprit, " ", rank, " ", error.what());
}

struct Told {
  Error error;
  int rank;
};
std::optional<Told> decode(const std::string& text) {
  std::istringstream stream(text);
  int kind = 0, cause = 0, culprit = 0, rank = 0;
  if (!(stream >> kind >> cause >> culprit >> rank) || kind < 0 ||
      kind > static_cast<int>(ErrorKind::kNccl) || cause < 0 ||
      cause > static_cast<int>(Cause::kTimeout))
    return {};
  stream.get();
  std::string words((std::istreambuf_iterator<char>(stream)), {});
  return Told{Error(static_cast<ErrorKind>(kind), words, {static_cast<Cause>(cause), culprit}),
              rank};
}

}  // namespace

std::string PeerState::encode() const {
  return concat(pid, " ", start_time, " ", host, " ", beat, " ", entered, " ", waiting, " ", lanes,
                " ", left ? 1 : 0, "\n", call, "\n", farewell);
}

std::optional<PeerState> PeerState::decode(const std::string& text) {
  PeerState state;
  std::istringstream stream(text);
  int left = 0;
  if (!(stream >> state.pid >> state.start_time >> state.host >> state.beat >> state.entered >>
        state.waiting >> state.lanes >> left))
    return {};
  state.left = left != 0;
  stream.get();
  std::getline(stream, state.call);
  state.farewell.assign(std::istreambuf_iterator<char>(stream), {});
  return state;
}

// ---- what the others are told

void NcclCommunicator::publish_state() {
  static const std::string host = host_key();
  PeerState state;
  state.pid = getpid();
  state.start_time = start_time(state.pid);
  state.host = host;
  state.entered = static_cast<uint32_t>(sequence_.load());
  state.lanes = lanes_begun_;
  state.left = closing_;
  if (const auto work = oldest()) {
    state.waiting = work->sequence();
    if (settings_.check != CheckLevel::kOff) state.call = work->call();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state.beat = ++beat_;
    state.farewell = farewell_;
  }
  try {
    board_->set(state_key(rank()), state.encode());
  } catch (...) {  // the Store may be gone when this rank leaves
  }
}

std::optional<PeerState> NcclCommunicator::peer_state(int rank) const {
  try {
    const std::optional<std::string> text = board_->get(state_key(rank));
    return text ? PeerState::decode(*text) : std::nullopt;
  } catch (...) {
    return {};
  }
}

// ---- failures

void NcclCommunicator::check_entry() {
  PYCOMM_CHECK(!closing_, kAborted, "rank ", rank(), ": this communicator has been shut down");
  if (__builtin_expect(!failed_, 1)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const ErrorKind kind =
      std::exchange(failure_told_, true) ? ErrorKind::kAborted : failure_->kind();
  throw Error(kind,
              concat("rank ", rank(), ": this communicator ended before: ", failure_->what(),
                     " -- destroy the process group and initialise it again to go on."),
              failure_->blame());
}

// The first failure of any rank is the one that the others report.
Error NcclCommunicator::fail(const Error& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) {
      failure_told_ = true;
      return error;
    }
    failure_ = error;
    failed_here_ = failure_told_ = true;
  }
  failed_ = true;
  Error first = error;
  try {
    const std::string own = encode(error, rank());
    const std::string there = board_->set_first(kFailureKey, own);
    const std::optional<Told> told = there == own ? std::nullopt : decode(there);
    if (told && told->rank != rank()) {
      first = Error(told->error.kind(),
                    concat(error.what(), " -- before that, rank ", told->rank,
                           " reported: ", told->error.what()),
                    told->error.blame());
      std::lock_guard<std::mutex> lock(mutex_);
      failure_ = told->error;
      failed_here_ = false;
    }
  } catch (...) {  // without the Store every rank fails by itself
  }
  take_failure(first);
  return first;
}

void NcclCommunicator::take_failure(const Error& error) {
  std::vector<std::shared_ptr<NcclWork>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = error;
    works = works_;
    // Who waits for one of them hears of it.
    failure_told_ = failure_told_ || std::any_of(works.begin(), works.end(), [](const auto& work) {
                      return !work->is_settled();
                    });
  }
  failed_ = true;
  // Before NCCL is stopped: a kernel that is stopped ends as if it had done its work.
  for (const auto& work : works) {
    const std::string name = where(*work);
    const bool own = std::string(error.what()).compare(0, name.size(), name) == 0;
    work->fail(std::make_exception_ptr(
        own ? error
            : Error(error.kind(), concat(name, " ended, since ", error.what()), error.blame())));
  }
  stop_lanes();
}

void NcclCommunicator::fail_interrupted(const char* what) {
  fail(Error(ErrorKind::kAborted, concat("rank ", rank(), " was interrupted in ", what),
             {Cause::kInterrupted, rank()}));
}

bool NcclCommunicator::read_failure() {
  if (failed_) return true;
  std::optional<Told> told;
  try {
    const std::optional<std::string> text = board_->get(kFailureKey);
    if (text) told = decode(*text);
  } catch (...) {
    return false;
  }
  if (!told || told->rank == rank()) return false;
  take_failure(Error(told->error.kind(),
                     concat("rank ", told->rank, " reported: ", told->error.what()),
                     told->error.blame()));
  return true;
}

// ---- the watchdog's round

std::shared_ptr<NcclWork> NcclCommunicator::oldest() const {
  std::vector<std::shared_ptr<NcclWork>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    works = works_;
  }
  for (const auto& work : works)
    if (!work->poll()) return work;  // without the lock: it may call back
  return nullptr;
}

// Takes note of what has started and ended.
void NcclCommunicator::reap() {
  std::vector<std::shared_ptr<NcclWork>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    works = works_;
  }
  for (const auto& work : works) work->poll();  // without the lock: it may call back
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& work : works) {
    const bool starts = work->note_start(), ends = work->note_end();
    for (const NcclWork::Part& part : work->parts()) {
      if (starts && part.record != 0 && part.sequence != 0)
        recorder_.start(part.record, part.sequence, ticks());
      if (ends && part.record != 0)
        recorder_.finish(part.record, work->finished(), work->has_failed());
      if (ends && !work->has_failed())
        count(part.operation, part.bytes, work->enqueued(), 0, work->finished());
    }
  }
  // Failed ones keep their memory until NCCL has ended.
  works_.erase(
      std::remove_if(works_.begin(), works_.end(),
                     [](const auto& work) { return work->is_settled() && !work->has_failed(); }),
      works_.end());
}

Clock::time_point NcclCommunicator::tick() {
  reap();
  const auto now = Clock::now();
  if (closing_ || failed_) return now + std::chrono::hours(1);
  const auto work = oldest();
  try {
    check_async_errors();
    if (now >= next_beat_) {
      next_beat_ = now + settings_.heartbeat;
      publish_state();
      if (read_failure()) return now + std::chrono::hours(1);
      if (work && now - work->since() > settings_.heartbeat) look_for_lost(false);
    }
    check_deadlines();
  } catch (const Error& error) {
    fail(error);
  }
  if (!work) return next_beat_;
  const bool young = now - work->since() < std::chrono::milliseconds(200);
  return std::min(next_beat_, now + (young ? kLook : kLongLook));
}

// One that another rank's end may explain waits for its explanation for a while.
void NcclCommunicator::check_async_errors() {
  const auto now = Clock::now();
  if (suspected_) {
    look_for_lost(true);
    read_failure();
    if (!failed_ && now >= judge_at_) throw Error(*suspected_);
    return;
  }
  std::vector<std::shared_ptr<CommHandle>> comms;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, lane] : lanes_) comms.push_back(lane.comm);
  }
  for (const auto& comm : comms) {
    const Result result = comm->async_error();
    if (result == Result::kSuccess || result == Result::kInProgress) continue;
    const auto work = oldest();
    const Error error = api_->error(
        result, work ? where(*work) : concat("rank ", rank(), ": between operations"), comm->get());
    if (result != Result::kRemoteError && result != Result::kSystemError) throw error;
    suspected_ = error;
    judge_at_ = now + 2 * settings_.heartbeat;
  }
}

void NcclCommunicator::check_deadlines() {
  const auto now = Clock::now();
  const auto work = oldest();
  if (!work || now - work->since() < work->limit()) {
    suspicious_ = false;
    return;
  }
  if (!std::exchange(suspicious_, true)) {
    judge_at_ = now + 2 * settings_.heartbeat;  // in which the others say where they are
    publish_state();
    return;
  }
  if (now >= judge_at_) throw diagnose(*work);
}

// Whether a rank has ended without which this one's operation cannot.
void NcclCommunicator::look_for_lost(bool always) {
  const auto work = oldest();
  if (!work && !always) return;
  static const std::string host = host_key();
  const uint32_t sequence = work ? work->sequence() : 0;
  const std::string what = work ? where(*work) : concat("rank ", rank(), ": between operations,");
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::optional<PeerState> state = peer == rank() ? std::nullopt : peer_state(peer);
    if (!state) continue;
    Heard& heard = heard_[static_cast<size_t>(peer)];
    const auto now = Clock::now();
    if (heard.beat != state->beat) heard = {state->beat, now};
    const bool lacks = sequence == 0 || state->entered < sequence;
    if (state->left && !lacks) continue;
    if (state->left && state->farewell.empty())
      throw Error(ErrorKind::kMismatch,
                  concat(what, " waits for rank ", peer, " (pid ", state->pid,
                         "), which has destroyed the group after operation ", state->entered,
                         ". That rank makes one call less, or this one a call too many: every rank "
                         "must make the same calls in the same order."),
                  {Cause::kLeft, peer});
    const bool is_near = state->host == host;
    const bool died = is_near && start_time(state->pid) != state->start_time;
    const bool silent = !is_near && now - heard.at > kSilentBeats * settings_.heartbeat;
    if (!state->left && !died && !silent) continue;
    throw Error(
        ErrorKind::kPeerDied,
        concat(what, " lost rank ", peer, " (pid ", state->pid, "), which ",
               state->left ? "left the group because of " + state->farewell
               : died ? "died"
                      : "has not been heard of for " + std::to_string(kSilentBeats) + " heartbeats",
               "; it told last of operation ", state->entered, ". See that rank's own output."),
        {state->left ? Cause::kExited : Cause::kDied, peer});
  }
}

// "rank 1 (pid 123) has called 6 operations and waits for operation 6, barrier()"
std::string NcclCommunicator::standing(const PeerState& state, uint32_t sequence) const {
  std::string text = concat(" (pid ", state.pid, ") has called ", state.entered, " operations");
  if (state.waiting != 0 && state.waiting != sequence)
    text += concat(" and waits for operation ", state.waiting,
                   state.call.empty() ? "" : ", " + state.call);
  return text;
}

Error NcclCommunicator::diagnose(const NcclWork& work) {
  const uint32_t sequence = work.sequence();
  std::string missing, here, calls = concat("rank ", rank(), " called ", work.call());
  int first = -1, others = 0, described = 0;
  bool differ = false;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const std::optional<PeerState> state = peer_state(peer);
    if (state && state->entered >= sequence && sequence != 0) {
      here += concat(here.empty() ? "" : ", ", peer);
      if (state->waiting != sequence || state->call.empty() || settings_.check == CheckLevel::kOff)
        continue;
      // Where the call came from may differ.
      const auto bare = [](const std::string& call) { return call.substr(0, call.find(" at ")); };
      differ = differ || bare(state->call) != bare(work.call());
      calls += concat(", rank ", peer, " called ", state->call);
      continue;
    }
    if (first < 0) first = peer;
    if (++described > kMostDescribed) {
      ++others;
      continue;
    }
    missing += concat(missing.empty() ? "rank " : ", rank ", peer,
                      state ? standing(*state, sequence) : " has not made its communicator yet");
  }
  const bool comparable = work.parts().size() == 1 && sequence != 0 &&
                          work.parts()[0].operation != Operation::kGather &&
                          work.parts()[0].operation != Operation::kScatter &&
                          work.parts()[0].operation != Operation::kAllToAll;
  if (differ && comparable)
    return Error(
        ErrorKind::kMismatch,
        concat("rank ", rank(), ": ranks disagree on operation ", sequence, group_text(), ": ",
               calls,
               ". Every rank must make the same calls in the same order, with equal counts "
               "and dtypes."),
        {Cause::kMismatch});
  if (others > 0) missing += concat(" and ", others, " more");
  const bool started = const_cast<NcclWork&>(work).has_started();
  return Error(
      ErrorKind::kTimeout,
      concat(where(work), " exceeded its timeout of ", work.limit().count(), " ms; ",
             started ? "its kernel had started"
                     : "its kernel had not started, since earlier work on its stream is not done",
             missing.empty() ? sequence == 0 ? "" : "; all ranks have called it"
             : sequence == 0 ? "; elsewhere: " + missing
                             : concat("; ranks in this operation: ", rank(),
                                      here.empty() ? "" : ", ", here, "; not yet: ", missing),
             ". Look at what those ranks do, or raise the timeout."),
      {Cause::kTimeout, first});
}

}  // namespace pycomm::nccl
