#include "shm_communicator.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "../algorithms/choose.h"
#include "../algorithms/one_shot.h"
#include "../algorithms/ring.h"
#include "../algorithms/two_shot.h"
#include "../interrupt.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;

// Where cores share no cache, temporal slot writes are several times slower than streaming ones;
// else they are faster. Flags tell the two apart: 30-60 ns (near) and 185-235 ns (far) on a Zen 4,
// but 125-170 ns between cores of one Sapphire Rapids socket, where temporal writes still win
// by 1.2.
constexpr uint32_t kFarLatencyNs = 175;
// The fastest batch of round trips counts: the others were disturbed.
constexpr int kProbeBatches = 5;
constexpr int kRoundsPerBatch = 12;
constexpr uint32_t kProbeRounds =
    1 + kProbeBatches * kRoundsPerBatch;  // the first brings both here
// Placement changes while a job runs (the scheduler, or the host under a virtual machine), so it is
// measured again.
constexpr uint64_t kOperationsBetweenProbes = 512;

// Spinning pays while every rank has a core; otherwise the peer needs ours.
constexpr Patience kAmple{4000, 200};
constexpr Patience kCrowded{50, 400};

const char* bytes_at(const void* pointer) { return static_cast<const char*>(pointer); }
char* bytes_at(void* pointer) { return static_cast<char*>(pointer); }

}  // namespace

ShmCommunicator::ShmCommunicator(std::shared_ptr<Segment> segment, int rank,
                                 std::chrono::milliseconds timeout)
    : Communicator(rank, segment->head().world_size, timeout),
      segment_(std::move(segment)),
      patience_(kCrowded),
      slots_(*segment_, rank, patience_, *this) {
  RankArea& mine = segment_->area(rank);
  mine.pid = Liveness::own_pid();
  mine.pid_namespace = Liveness::own_pid_namespace();
  sched_getaffinity(0, sizeof mine.cores, &mine.cores);
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

void ShmCommunicator::dispatch(const Request& request) {
  switch (request.operation) {
    case Operation::kAllReduce:
      return all_reduce(request);
    case Operation::kBroadcast:
      return broadcast(request);
    case Operation::kAllGather:
      return all_gather(request);
    case Operation::kReduceScatter:
      return reduce_scatter(request);
    case Operation::kBarrier:
      announce(request);
      return meet();
    case Operation::kMeasureLatency:
      announce(request);
      meet();
      return measure_latency();
    default:
      PYCOMM_CHECK(false, kError, where(), " is not done yet");
  }
}

void ShmCommunicator::all_reduce(const Request& request) {
  const RealView real = real_view(request.dtype);
  const int64_t count = request.count * real.components, bytes = request.bytes();
  const char* input = bytes_at(request.input);
  char* output = bytes_at(request.output);
  const Algorithm algorithm = choose_all_reduce(request.algorithm, bytes);

  if (bytes <= kEagerBytes && algorithm == Algorithm::kOneShot) {
    announce(request, input, bytes);
    meet();
    const char* sources[kMaxRanks];
    for (int peer = 0; peer < world_size(); ++peer) sources[peer] = announcement_of(peer).payload;
    const Math math(request.dtype, request.op, world_size(), false);
    if (count > 0) math.reduce_all(sources, nullptr, output, count);
    return;
  }
  announce(request);
  meet();
  const Math math = chunked_math(request);
  switch (algorithm) {
    case Algorithm::kOneShot:
      return slots_.advance(one_shot_all_reduce(slots_, math, input, output, count));
    case Algorithm::kRing:
      return slots_.advance(ring_all_reduce(slots_, math, input, output, count));
    default:
      return slots_.advance(two_shot_all_reduce(slots_, math, input, output, count));
  }
}

void ShmCommunicator::broadcast(const Request& request) {
  const int64_t bytes = request.bytes();
  char* data = bytes_at(request.output);
  const bool root = rank() == request.root;
  if (bytes <= kEagerBytes) {
    announce(request, data, root ? bytes : 0);
    meet();
    if (!root) copy(data, announcement_of(request.root).payload, bytes, false);
    return;
  }
  announce(request);
  meet();
  const RealView real = real_view(request.dtype);
  slots_.advance(one_shot_broadcast(slots_, chunked_math(request), data,
                                    request.count * real.components, request.root));
}

void ShmCommunicator::all_gather(const Request& request) {
  const int64_t bytes = request.bytes();
  const char* input = bytes_at(request.input);
  const auto output_of = [&](int peer) {
    return request.outputs.empty() ? bytes_at(request.output) + peer * bytes
                                   : bytes_at(request.outputs[peer].data);
  };
  if (bytes <= kEagerBytes) {
    announce(request, input, bytes);
    meet();
    for (int peer = 0; peer < world_size(); ++peer)
      copy(output_of(peer), announcement_of(peer).payload, bytes, false);
    return;
  }
  announce(request);
  meet();
  const RealView real = real_view(request.dtype);
  slots_.advance(one_shot_all_gather(slots_, chunked_math(request), input, output_of,
                                     request.count * real.components));
}

void ShmCommunicator::reduce_scatter(const Request& request) {
  const RealView real = real_view(request.dtype);
  const int64_t count = request.count * real.components, bytes = request.bytes();
  const auto input_of = [&](int peer) {
    return request.inputs.empty() ? bytes_at(request.input) + peer * bytes
                                  : bytes_at(request.inputs[peer].data);
  };
  char* output = bytes_at(request.output);
  if (bytes * world_size() <= kEagerBytes) {
    char* payload = segment_->area(rank()).announcements[sequence_ & 1].payload;
    for (int peer = 0; peer < world_size(); ++peer)
      copy(payload + peer * bytes, input_of(peer), bytes, false);
    announce(request);
    meet();
    const char* sources[kMaxRanks];
    for (int peer = 0; peer < world_size(); ++peer)
      sources[peer] = announcement_of(peer).payload + rank() * bytes;
    const Math math(request.dtype, request.op, world_size(), false);
    if (count > 0) math.reduce_all(sources, nullptr, output, count);
    return;
  }
  announce(request);
  meet();
  slots_.advance(two_shot_reduce_scatter(slots_, chunked_math(request), input_of, output, count));
}

// ---- the head of an operation

// Announcement s lies where s - 2 lay. That is safe to overwrite: I finished s - 1 only after
// seeing every peer enter s - 1, and a peer enters s - 1 after it has read all it wanted of s - 2.
void ShmCommunicator::announce(const Request& request, const void* payload, int64_t payload_bytes) {
  Announcement& mine = announcement_of(rank());
  if (payload_bytes > 0) std::memcpy(mine.payload, payload, static_cast<size_t>(payload_bytes));
  OperationHeader& header = mine.header;
  header.operation = request.operation;
  header.dtype = request.dtype;
  header.op = request.op;
  header.algorithm = request.algorithm;
  header.count = request.count;
  header.root = request.root;
  set_and_wake(header.sequence, sequence_, segment_->area(rank()).entered.sleepers);
}

// Every rank sees every peer's header, whatever it needs from it: so a mismatch is noticed on all
// ranks, and no operation returns before all ranks have entered it.
void ShmCommunicator::meet() {
  const OperationHeader& mine = announcement_of(rank()).header;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    OperationHeader& theirs = announcement_of(peer).header;
    if (!reached(load_acquire(theirs.sequence), sequence_))
      wait_until(theirs.sequence, sequence_, segment_->area(peer).entered.sleepers, patience_,
                 WaitGuard{*this, peer});
    const bool same = mine.operation == theirs.operation && mine.dtype == theirs.dtype &&
                      mine.op == theirs.op && mine.algorithm == theirs.algorithm &&
                      mine.count == theirs.count && mine.root == theirs.root;
    if (__builtin_expect(!same, 0)) throw_mismatch(peer);
  }
}

void ShmCommunicator::throw_mismatch(int peer) {
  const auto call = [this](int rank) {
    const OperationHeader& header = announcement_of(rank).header;
    Request request;
    request.operation = header.operation;
    request.dtype = header.dtype;
    request.op = header.op;
    request.algorithm = header.algorithm;
    request.count = header.count;
    request.root = header.root;
    return concat("rank ", rank, " called ", describe(request));
  };
  const int first = std::min(rank(), peer), second = std::max(rank(), peer);
  throw Error(
      ErrorKind::kMismatch,
      concat("ranks disagree on operation ", sequence_, ": ", call(first), " but ", call(second),
             ". Every rank must make the same calls in the same order, with equal counts "
             "and dtypes."));
}

Math ShmCommunicator::chunked_math(const Request& request) {
  measure_latency_now_and_then();
  return Math(request.dtype, request.op, world_size(), stream_);
}

// ---- placement

void ShmCommunicator::measure_latency_now_and_then() {
  const ShmConfig& config = segment_->head().config;
  if (chunked_operations_++ % kOperationsBetweenProbes != 0) return;
  if (config.streaming != Streaming::kAuto) {
    stream_ = config.streaming == Streaming::kAlways;
  } else if (crowded_) {
    stream_ = false;  // ranks take turns on a core and its caches
  } else {
    measure_latency();
    stream_ = segment_->area(0).flag_latency_ns > kFarLatencyNs;
  }
}

// Rank 0 exchanges a flag with each peer in turn; the slowest peer counts, and all ranks learn it.
void ShmCommunicator::measure_latency() {
  Flag& flag0 = segment_->area(0).latency_probe;
  const uint32_t base0 = probe_base_;  // rank 0's flag before this measurement
  probe_base_ += static_cast<uint32_t>(world_size() - 1) * kProbeRounds + 1;
  if (rank() == 0) {
    double slowest = 0;
    for (int peer = 1; peer < world_size(); ++peer)
      slowest = std::max(slowest, round_trip_ns(peer, base0 + (peer - 1) * kProbeRounds) / 2);
    segment_->area(0).flag_latency_ns = static_cast<uint32_t>(slowest);
    set_and_wake(flag0.value, probe_base_, flag0.sleepers);
    return;
  }
  const uint32_t turn = base0 + static_cast<uint32_t>(rank() - 1) * kProbeRounds;
  Flag& mine = segment_->area(rank()).latency_probe;
  for (uint32_t round = 1; round <= kProbeRounds; ++round) {
    wait_for_flag(0, flag0, turn + round);
    set_and_wake(mine.value, turn + round, mine.sleepers);
  }
  wait_for_flag(0, flag0, probe_base_);
}

// Rank 0's side of the exchange with one peer: kProbeRounds flags from `turn` on, each answered.
double ShmCommunicator::round_trip_ns(int peer, uint32_t turn) {
  Flag& mine = segment_->area(0).latency_probe;
  Flag& theirs = segment_->area(peer).latency_probe;
  const auto exchange = [&] {
    set_and_wake(mine.value, ++turn, mine.sleepers);
    wait_for_flag(peer, theirs, turn);
  };
  exchange();
  double fastest = 1e9;
  for (int batch = 0; batch < kProbeBatches; ++batch) {
    const auto began = Clock::now();
    for (int round = 0; round < kRoundsPerBatch; ++round) exchange();
    const std::chrono::duration<double, std::nano> took = Clock::now() - began;
    fastest = std::min(fastest, took.count() / kRoundsPerBatch);
  }
  return fastest;
}

void ShmCommunicator::wait_for_flag(int peer, Flag& flag, uint32_t target) const {
  wait_until(flag.value, target, flag.sleepers, patience_, WaitGuard{*this, peer});
}

double ShmCommunicator::flag_latency_ns() {
  Request request;
  request.operation = Operation::kMeasureLatency;
  run(request);
  return segment_->area(0).flag_latency_ns;
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
  throw_if_ended();
  if (load_acquire(segment_->area(peer).departed.value) != 0) return false;
  if (!sleeping) return true;
  const auto now = Clock::now();
  if (!std::exchange(waiting_, true)) wait_began_ = now;
  const auto limit = request_->timeout.count() > 0 ? request_->timeout : timeout();
  PYCOMM_CHECK(now - wait_began_ < limit, kTimeout, where(), " exceeded its timeout of ",
               limit.count(), " ms, waiting for rank ", peer, "; ", arrivals(),
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

// In the middle of an operation: what another rank reported, or the end of this communicator.
void ShmCommunicator::throw_if_ended() const {
  PYCOMM_CHECK(!closing_, kAborted, where(), " ended: its process group was destroyed");
  const AbortRecord& record = segment_->head().abort;
  if (__builtin_expect(load_acquire(record.state.value) != kSet, 1)) return;
  throw Error(static_cast<ErrorKind>(record.kind),
              concat(where(), " ended, since another rank reported: ", record.message));
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
  std::strncpy(record.message, message.c_str(), sizeof record.message - 1);
  store_ordered(record.state.value, kSet);
  for (int peer = 0; peer < world_size(); ++peer) wake_all(segment_->area(peer));
}

void ShmCommunicator::abort(const std::string& reason) {
  record_abort(ErrorKind::kAborted, concat("rank ", rank(), " aborted: ", reason));
}

}  // namespace pycomm
