// How a message ends without its data: deadline, abort, a peer's death or departure, destruction.
// Each of them ends the communicator.
#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "../call_site.h"
#include "../error.h"
#include "messenger.h"

namespace pycomm {

// Looks for reasons to end a wait; those that cost a system call only every so often.
void Messenger::look_after() {
  if (over_ || outstanding_ == 0) return;
  const AbortRecord& record = segment_->head().abort;
  if (load_acquire(record.state.value) == kSet)
    return end_all(
        Error(record.kind, concat("another rank reported: ", record.message), record.blame));
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kSleep;
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_ && is_gone(peer)) lose(peer);
  for (const TransferPtr& transfer : outstanding())
    if (now >= transfer->deadline_ && !over_) fail_late(transfer);
}

void Messenger::fail_late(const TransferPtr& transfer) {
  const int peer = source_of(*transfer);
  const bool stopped = peer != kAnySource && liveness_.is_stopped(peer);
  const std::string text =
      concat(call(transfer->message_, transfer->record_), " exceeded its timeout of ",
             transfer->limit_.count(), " ms: ", progress_of(*transfer));
  if (stopped)
    fail(transfer,
         Error(ErrorKind::kPeerDied,
               concat(text, "; its process (", liveness_.process_of(peer),
                      ") stands still, stopped by a signal or a debugger. Continue it (kill -CONT) "
                      "or end it."),
               {Cause::kStopped, peer}));
  else
    fail(transfer, Error(ErrorKind::kTimeout,
                         concat(text, ". Look at what that rank does, or raise the timeout."),
                         {Cause::kTimeout, peer}));
}

bool Messenger::is_gone(int peer) const {
  return load_acquire(segment_->area(peer).departed.value) != 0 || liveness_.is_dead(peer);
}

// A peer is gone. What it sent before is still received; the first transfer that needs more of it
// fails. A receive from any source needs all other ranks, unless one died.
void Messenger::lose(int peer) {
  const RankArea& area = segment_->area(peer);
  const bool left = load_ordered(area.departed.value) != 0;
  while (pull(peer)) continue;
  const auto all_gone = [this] {
    for (int other = 0; other < world_size_; ++other)
      if (other != rank_ && !is_gone(other)) return false;
    return true;
  };
  for (const TransferPtr& transfer : outstanding()) {
    const bool any = transfer->message_.peer == kAnySource && transfer != incoming_[peer].receiver;
    if (any ? left && !all_gone() : source_of(*transfer) != peer) continue;
    return fail(
        transfer,
        Error(ErrorKind::kPeerDied,
              concat(call(transfer->message_, transfer->record_), " lost rank ", peer, " (",
                     liveness_.process_of(peer), "), which ", left ? "left the group" : "died",
                     left && area.farewell[0] ? concat(" because of ", area.farewell) : "", ": ",
                     progress_of(*transfer), ". See that rank's own output."),
              {cause_of_loss(area), peer}));
  }
}

// The rank that a transfer depends on, or -1.
int Messenger::source_of(const Transfer& transfer) const {
  for (int peer = 0; peer < world_size_; ++peer)
    if (incoming_[peer].receiver.get() == &transfer) return peer;
  for (const Unexpected& message : unexpected_)
    if (message.receiver.get() == &transfer) return message.source;
  return transfer.message_.peer;
}

void Messenger::fail(const TransferPtr& transfer, const Error& error) {
  end_(error);
  complete(transfer, -1, std::make_exception_ptr(error));
  end_all(Error(error.kind(), concat("another message failed: ", error.what()), error.blame()));
}

void Messenger::end_all(const Error& reason) {
  if (std::exchange(over_, true)) return;
  if (!closed_) end_(reason);
  for (const TransferPtr& transfer : outstanding())
    complete(transfer, -1,
             std::make_exception_ptr(Error(reason.kind(),
                                           concat(call(transfer->message_, transfer->record_),
                                                  " ended, since ", reason.what()),
                                           reason.blame())));
  receivers_.clear();
  for (Unexpected& message : unexpected_) message.receiver = nullptr;
  for (Incoming& in : incoming_) in.receiver = nullptr;
  for (Outgoing& out : outgoing_) out.queue.clear();
}

std::vector<Messenger::TransferPtr> Messenger::outstanding() const {
  std::vector<TransferPtr> transfers;
  const auto add = [&](const TransferPtr& transfer) {
    if (transfer && !transfer->complete_) transfers.push_back(transfer);
  };
  for (const Outgoing& out : outgoing_) std::for_each(out.queue.begin(), out.queue.end(), add);
  for (const Incoming& in : incoming_) add(in.receiver);
  for (const Unexpected& message : unexpected_) add(message.receiver);
  std::for_each(receivers_.begin(), receivers_.end(), add);
  return transfers;
}

// ---- words

// With the line in the program, if it is known or this thread still stands there.
std::string Messenger::call(const Message& message, uint64_t record) const {
  const RecordView view = record != 0 ? recorder_.read(record) : RecordView();
  const std::string line = view.line.empty() ? find_call_site() : view.line;
  Message shaped = message;
  shaped.shape = view.shape();
  return concat("rank ", rank_, ": ", describe(shaped), line.empty() ? "" : " at " + line);
}

// From the sender's flight recorder, which knows more than the message's header.
std::string Messenger::call_of_sender(int source, const MessageHeader& header) const {
  for (const RecordView& record : Recorder::read_all(segment_->records_of(source)))
    if (record.operation == Operation::kSend && record.peer == rank_ && record.tag == header.tag &&
        record.count == header.count && record.dtype == header.dtype)
      return record.describe();
  Message sent;
  sent.dtype = header.dtype;
  sent.peer = rank_;
  sent.tag = header.tag;
  sent.count = header.count;
  return describe(sent);
}

std::string Messenger::progress_of(const Transfer& transfer) const {
  const Message& message = transfer.message_;
  const int64_t bytes = message.bytes();
  if (message.operation == Operation::kSend)
    return concat("rank ", message.peer, " has not made room for it; ",
                  std::max<int64_t>(transfer.moved_, 0), " of ", bytes, " bytes were sent");
  for (int peer = 0; peer < world_size_; ++peer)
    if (incoming_[peer].receiver.get() == &transfer)
      return concat(incoming_[peer].moved, " of ", bytes, " bytes had arrived from rank ", peer);
  std::set<int32_t> tags;
  for (const Unexpected& other : unexpected_)
    if (message.peer == kAnySource || other.source == message.peer) tags.insert(other.header.tag);
  std::ostringstream text;
  if (message.peer == kAnySource)
    text << "no rank has sent such a message";
  else
    text << "rank " << message.peer << " has sent no such message";
  const char* separator = ", but others with tag ";
  for (const int32_t tag : tags) text << std::exchange(separator, ", ") << tag;
  return text.str();
}

}  // namespace pycomm
