// What a rank says when an operation ends without its data. Much of it is about other ranks: their
// headers, their flight recorders and what they report of a failed operation lie in the segment.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <sstream>
#include <thread>
#include <vector>

#include "../call_site.h"
#include "../error.h"
#include "../interrupt.h"
#include "shm_communicator.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;

// How long a rank that sees a mismatch waits for the words of the ranks that must see it too.
constexpr std::chrono::milliseconds kReportTime{500};
// Of the ranks that have not arrived, so many are described.
constexpr int kMostDescribed = 8;

std::string ago(int64_t nanoseconds) {
  std::ostringstream text;
  text.precision(nanoseconds < 10'000'000'000 ? 2 : 3);
  text << static_cast<double>(std::max<int64_t>(nanoseconds, 0)) * 1e-9 << " s";
  return text.str();
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += concat(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

}  // namespace

// ---- calls

std::string ShmCommunicator::own_call() const {
  const RecordView record = recorder_.read(record_);
  std::string line = record.line;
  if (line.empty()) recorder_.set_line(record_, line = find_call_site());
  Request request = *request_;
  if (request.shape.dims == Shape::kUnknown) request.shape = record.shape();
  return concat(
      describe(request),
      announcement_of(rank()).header.has_parts ? " with counts of its own for each rank" : "",
      line.empty() ? "" : " at " + line);
}

std::string ShmCommunicator::where() const {
  return concat("rank ", rank(), ": ", own_call(), " (operation ", sequence_, group_text(), ")");
}

// Tells the others, once, what this rank called in the operation that fails.
void ShmCommunicator::report() const {
  RankArea& mine = segment_->area(rank());
  if (load_acquire(mine.reported.value) == sequence_) return;
  std::strncpy(mine.report, own_call().c_str(), sizeof mine.report - 1);
  store_ordered(mine.reported.value, sequence_);
}

// By its own words or, if it has none to say, by its header.
std::string ShmCommunicator::call_of(int rank) const {
  const RankArea& area = segment_->area(rank);
  if (load_acquire(area.reported.value) == sequence_) return area.report;
  const OperationHeader& header = announcement_of(rank).header;
  Request request;
  request.operation = header.operation;
  request.dtype = header.dtype;
  request.op = header.op;
  request.algorithm = header.algorithm;
  request.count = header.count;
  request.root = header.root;
  Compression compression;
  compression.codec = header.codec;
  if (header.codec.block != kUncompressed)
    request.compression = std::make_shared<const Compression>(compression);
  return concat(describe(request), header.has_parts ? " with counts of its own for each rank" : "");
}

// "rank 1 called ..., ranks 0 and 2 called ...": of the ranks that have entered the operation.
// Every one of them sees the difference, so it is worth waiting for their words.
std::string ShmCommunicator::calls() const {
  report();
  const auto deadline = Clock::now() + kReportTime;
  std::vector<std::pair<std::string, std::vector<int>>> by_call;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!has_entered(peer)) continue;
    while (load_acquire(segment_->area(peer).reported.value) != sequence_ && !is_gone(peer) &&
           Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::string call = call_of(peer);
    const auto same = std::find_if(by_call.begin(), by_call.end(),
                                   [&](const auto& entry) { return entry.first == call; });
    if (same == by_call.end())
      by_call.push_back({call, {peer}});
    else
      same->second.push_back(peer);
  }
  std::string text;
  for (const auto& [call, ranks] : by_call)
    text += concat(text.empty() ? "" : " but ", list(ranks), " called ", call);
  return text;
}

void ShmCommunicator::throw_mismatch(const std::string& difference) const {
  bool has_parts = false;
  for (int peer = 0; peer < world_size(); ++peer)
    has_parts = has_parts || (has_entered(peer) && announcement_of(peer).header.has_parts);
  throw Error(ErrorKind::kMismatch,
              concat("rank ", rank(), ": ranks disagree on operation ", sequence_, group_text(),
                     ": ", calls(), ". ", difference,
                     "Every rank must make the same calls in the same order, with equal counts "
                     "and dtypes."),
              {has_parts ? Cause::kPartsMismatch : Cause::kMismatch});
}

// ---- ranks that are not there

// "last: operation 4, barrier() at train.py:88 in step, completed 3.1 s ago"
std::string ShmCommunicator::last_of(int rank) const {
  if (!records_)
    return concat("it was in operation ", state_of(rank).sequence, " last (PYCOMM_RECORDS is 0)");
  const std::vector<RecordView> all = records(rank);
  const TickScale::Now now = scale();
  const auto told = [](const RecordView& record) {
    return record.operation != Operation::kMeasureLatency && record.started != 0;
  };
  const auto last = std::find_if(all.rbegin(), all.rend(), told);
  if (last == all.rend()) return "it has called nothing yet";
  const uint64_t since = last->finished ? last->finished : last->started;
  return concat(
      "its last call: ", last->is_message() ? std::string("message ") : std::string("operation "),
      last->sequence, ", ", last->describe(), ", ", last->state(), " ",
      ago(now.span(since, now.ticks)), " ago");
}

std::string ShmCommunicator::arrivals() const {
  std::ostringstream here, missing;
  int described = 0;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (has_entered(peer)) {
      here << " " << peer;
      continue;
    }
    missing << (missing.str().empty() ? " " : ", ") << peer;
    if (++described > kMostDescribed) continue;
    missing << " ("
            << (is_gone(peer)                ? "gone; "
                : liveness_.is_stopped(peer) ? "stopped; "
                                             : "")
            << last_of(peer) << ")";
  }
  return concat("ranks in this operation:", here.str(),
                missing.str().empty() ? std::string() : "; not yet:" + missing.str());
}

void ShmCommunicator::throw_late(int peer) const {
  const bool stopped = liveness_.is_stopped(peer);
  const std::string text =
      concat(where(), " exceeded its timeout of ", limit_.count(), " ms, waiting for rank ", peer);
  if (stopped)
    throw Error(ErrorKind::kPeerDied,
                concat(text, ", whose process (", liveness_.process_of(peer),
                       ") stands still, stopped by a signal or a debugger; ", arrivals(),
                       ". Continue it (kill -CONT) or end it."),
                {Cause::kStopped, peer});
  throw Error(
      ErrorKind::kTimeout,
      concat(text, "; ", arrivals(), ". Look at what those ranks do, or raise the timeout."),
      {Cause::kTimeout, peer});
}

// One that left in good order did not mean to take part: then the ranks made different calls.
void ShmCommunicator::lost_peer(int peer) const {
  const RankArea& area = segment_->area(peer);
  const uint32_t departed = load_acquire(area.departed.value);
  const std::string farewell = departed == kPresent ? "" : area.farewell;
  if (departed == kLeft && farewell.empty())
    throw Error(ErrorKind::kMismatch,
                concat(where(), " waits for rank ", peer, " (", liveness_.process_of(peer),
                       "), which has destroyed the group; ", last_of(peer),
                       ". That rank makes one call less, or this one a call too many: every rank "
                       "must make the same calls in the same order."),
                {Cause::kLeft, peer});
  const std::string how = departed == kPresent ? "died"
                          : farewell.empty()   ? "ended without destroying its process group"
                                               : "left the group because of " + farewell;
  throw Error(
      ErrorKind::kPeerDied,
      concat(where(), " lost rank ", peer, " (", liveness_.process_of(peer), "), which ", how, "; ",
             meeting_ ? arrivals() : last_of(peer), ". See that rank's own output."),
      {cause_of_loss(area), peer});
}

// After this rank has left, which had made fewer calls than a peer.
void ShmCommunicator::throw_left_early(int peer, uint32_t sequence) const {
  const RankArea& area = segment_->area(peer);
  const auto deadline = Clock::now() + kReportTime;
  while (load_acquire(area.reported.value) != sequence && !is_gone(peer) && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const bool reported = load_acquire(area.reported.value) == sequence;
  throw Error(
      ErrorKind::kMismatch,
      concat("rank ", rank(), ": destroys the process group", group_text(), " after operation ",
             sequence_, ", but rank ", peer, " (pid ", area.pid,
             ") called another: ", reported ? area.report : last_of(peer),
             ". That rank makes a call too many, or this one a call less: every rank must make "
             "the same calls in the same order. The group is destroyed all the same."),
      {Cause::kLeft, rank()});
}

// ---- two groups entered in different order

// What a process calls in this group, if it waits there for this rank, who has not called it; in a
// thread that can do nothing else meanwhile.
std::optional<ShmCommunicator::Crossing> ShmCommunicator::awaited_by(
    const RankArea& process) const {
  for (int peer = 0; peer < world_size(); ++peer) {
    const RankArea& area = segment_->area(peer);
    if (peer == rank() || area.pid != process.pid || area.pid_namespace != process.pid_namespace)
      continue;
    const std::vector<RecordView> all = records(peer);
    const auto last = std::find_if(all.rbegin(), all.rend(),
                                   [](const auto& record) { return !record.is_message(); });
    if (last == all.rend() || last->finished != 0 || last->created != last->started ||
        reached(sequence_, last->sequence))
      return {};
    return Crossing{segment_, peer, last->sequence, last->describe(), group_text()};
  }
  return {};
}

// Rank a waits in one group for b, which waits in another for a: neither wait can end, if the
// threads that wait are the only ones that ever call operations. Both groups end of it: the peer's
// wait, too, would never end otherwise.
void ShmCommunicator::check_for_crossing(int peer) const {
  const RankArea& theirs = segment_->area(peer);
  if (!meeting_ || has_entered(peer) || Worker::is_current_thread() ||
      load_acquire(segment_->area(rank()).many_callers) || load_acquire(theirs.many_callers))
    return;
  std::optional<Crossing> found;
  registry::visit([&](ShmCommunicator& other) {
    if (&other != this) found = other.awaited_by(theirs);
    return found.has_value();
  });
  if (!found) return;
  report();
  const RankArea& area = found->segment->area(found->rank);
  const auto deadline = Clock::now() + kReportTime;
  while (load_acquire(area.reported.value) != found->sequence && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (load_acquire(area.reported.value) == found->sequence) found->call = area.report;
  const Error error(
      ErrorKind::kMismatch,
      concat(where(), " waits for rank ", peer, " (", liveness_.process_of(peer),
             "), which waits for this rank in another group: ", found->call, " (operation ",
             found->sequence, found->group, "). Every rank must use the groups in the same order."),
      {Cause::kCrossing, peer});
  registry::visit([&](ShmCommunicator& other) {
    if (other.segment_ == found->segment)
      other.record_abort(Error(error.kind(), error.what(), {Cause::kCrossing, found->rank}));
    return other.segment_ == found->segment;
  });
  throw error;
}

}  // namespace pycomm
