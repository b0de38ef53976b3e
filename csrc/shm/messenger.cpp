#include "messenger.h"

#include <algorithm>
#include <new>
#include <utility>

#include "../error.h"

namespace pycomm {
namespace {

MessageHeader header_of(const Message& message) {
  return {message.count, message.tag, message.dtype};
}

std::unique_ptr<char[]> allocate(int64_t bytes) {
  return std::unique_ptr<char[]>(new (std::nothrow) char[static_cast<size_t>(bytes)]);
}

// A call moves no more than this much of a message at once, however fast the other side is.
constexpr int kPiecesPerPost = 16;

}  // namespace

Messenger::Messenger(std::shared_ptr<Segment> segment, const Origin& origin, int rank,
                     const Patience& patience, const Liveness& liveness, Recorder& recorder,
                     Count count, End end)
    : segment_(std::move(segment)),
      origin_(origin),
      rank_(rank),
      world_size_(segment_->head().world_size),
      patience_(patience),
      liveness_(liveness),
      recorder_(recorder),
      count_(std::move(count)),
      end_(std::move(end)) {
  const int64_t capacity = segment_->head().config.channel_bytes;
  for (int peer = 0; peer < world_size_; ++peer) {
    const Ring out(segment_->ring_of(rank, peer), capacity);
    const Ring in(segment_->ring_of(peer, rank), capacity);
    outgoing_.push_back({ChannelWriter(segment_->channel(rank, peer), out), {}});
    incoming_.push_back({ChannelReader(segment_->channel(peer, rank), in)});
  }
}

// ---- sends

Messenger::TransferPtr Messenger::send(const Message& message, std::chrono::milliseconds limit,
                                       std::shared_ptr<void>& keep_alive) {
  if (message.peer == rank_) {
    send_to_self(message);
    return nullptr;
  }
  Outgoing& out = outgoing_[message.peer];
  int64_t moved = kNotBegun;
  const bool departed = load_acquire(segment_->area(message.peer).departed.value) != 0;
  if (out.queue.empty() && __builtin_expect(!departed, 1)) {
    const MessageHeader header = header_of(message);
    for (int piece = 0; piece < kPiecesPerPost && moved < message.bytes(); ++piece) {
      if (!out.writer.write(header, message.data, message.bytes(), &moved)) break;
      ring(message.peer);
    }
    if (moved == message.bytes()) return nullptr;
  }
  auto transfer =
      std::make_shared<Transfer>(shared_from_this(), message, limit, std::move(keep_alive));
  transfer->moved_ = moved;
  transfer->record_ = recording_;
  transfer->started_ = posting_at_;
  out.queue.push_back(transfer);
  ++outstanding_;
  if (departed) lose(message.peer);
  return transfer;
}

// Always complete at once: it goes to a posted receive, or waits in the heap.
void Messenger::send_to_self(const Message& message) {
  const MessageHeader header = header_of(message);
  const int64_t bytes = message.bytes();
  if (const TransferPtr receiver = take_receiver(rank_, message.tag)) {
    if (!fits(receiver, rank_, header)) return;
    if (bytes > 0) std::memmove(receiver->message_.data, message.data, static_cast<size_t>(bytes));
    return complete(receiver, rank_);
  }
  Unexpected copied{rank_, header, allocate(bytes), true};
  PYCOMM_CHECK(copied.bytes, kError, call(message), ": no memory to keep ", bytes, " bytes");
  if (bytes > 0) copy(copied.bytes.get(), message.data, bytes, false);
  unexpected_.push_back(std::move(copied));
}

// Writes a piece of what waits for one rank. Whether anything moved.
bool Messenger::push(int destination) {
  Outgoing& out = outgoing_[destination];
  const TransferPtr transfer = out.queue.front();
  const Message& message = transfer->message_;
  if (!out.writer.write(header_of(message), message.data, message.bytes(), &transfer->moved_))
    return false;
  ring(destination);
  if (transfer->moved_ == message.bytes()) {
    out.queue.pop_front();
    complete(transfer, -1);
  }
  return true;
}

// ---- receives

Messenger::TransferPtr Messenger::receive(const Message& message, std::chrono::milliseconds limit,
                                          std::shared_ptr<void>& keep_alive) {
  auto transfer =
      std::make_shared<Transfer>(shared_from_this(), message, limit, std::move(keep_alive));
  transfer->record_ = recording_;
  transfer->started_ = posting_at_;
  ++outstanding_;
  if (take_unexpected(transfer)) return transfer;
  receivers_.push_back(transfer);
  ++(message.peer == kAnySource ? any_receivers_ : incoming_[message.peer].receivers);
  for (int peer = 0; peer < world_size_ && !transfer->complete_; ++peer)
    if (message.peer == peer || message.peer == kAnySource)
      for (int piece = 0; piece < kPiecesPerPost && !transfer->complete_; ++piece)
        if (!pull(peer)) break;
  return transfer;
}

// The first posted receive that takes such a message, or null.
Messenger::TransferPtr Messenger::take_receiver(int source, int32_t tag) {
  if (any_receivers_ + incoming_[source].receivers == 0) return nullptr;
  const auto found =
      std::find_if(receivers_.begin(), receivers_.end(), [&](const TransferPtr& receiver) {
        const Message& wanted = receiver->message_;
        return wanted.tag == tag && (wanted.peer == source || wanted.peer == kAnySource);
      });
  if (found == receivers_.end()) return nullptr;
  TransferPtr receiver = std::move(*found);
  receivers_.erase(found);
  --(receiver->message_.peer == kAnySource ? any_receivers_ : incoming_[source].receivers);
  return receiver;
}

// Gives a receive the first message in the heap that it takes. One that is still arriving is
// handed over at its end.
bool Messenger::take_unexpected(const TransferPtr& receiver) {
  const Message& wanted = receiver->message_;
  const auto found =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
        return message.header.tag == wanted.tag && !message.receiver &&
               (wanted.peer == message.source || wanted.peer == kAnySource);
      });
  if (found == unexpected_.end()) return false;
  if (!found->complete) {
    found->receiver = receiver;
    return true;
  }
  if (fits(receiver, found->source, found->header)) {
    copy(wanted.data, found->bytes.get(), wanted.bytes(), false);
    complete(receiver, found->source);
  }
  unexpected_.erase(found);
  return true;
}

// A receive that does not fit its message fails, on all ranks.
bool Messenger::fits(const TransferPtr& receiver, int source, const MessageHeader& header) {
  const Message& wanted = receiver->message_;
  if (__builtin_expect(wanted.count == header.count && wanted.dtype == header.dtype, 1))
    return true;
  fail(receiver,
       Error(ErrorKind::kMismatch,
             concat(call(wanted, receiver->record_), ": the message for it is rank ", source, "'s ",
                    call_of_sender(source, header),
                    ". Both calls must name the same count and dtype; messages of one tag arrive "
                    "in the order in which they were sent."),
             {Cause::kMessageMismatch, source}));
  return false;
}

// Reads a piece of what comes from one rank, if a receive may want it. Whether anything moved.
bool Messenger::pull(int source) {
  Incoming& in = incoming_[source];
  if (over_ || !in.reader.has_news()) return false;
  if (in.moved == kNotBegun && !begin_message(source)) return false;
  char* to =
      in.receiver ? static_cast<char*>(in.receiver->message_.data) : in.unexpected->bytes.get();
  bool freed = false;
  in.reader.read(to, in.header.bytes(), &in.moved, &freed);
  if (freed) ring(source);
  if (in.moved == in.header.bytes()) end_message(source);
  return true;
}

// Decides where the message at the head of a channel goes. Without a receive for it, it stays,
// and holds up its sender, unless a posted receive may take a later message of this channel.
bool Messenger::begin_message(int source) {
  Incoming& in = incoming_[source];
  if (any_receivers_ + in.receivers == 0) return false;
  in.header = in.reader.header();
  if (TransferPtr receiver = take_receiver(source, in.header.tag)) {
    if (!fits(receiver, source, in.header)) return false;
    in.receiver = std::move(receiver);
    return true;
  }
  std::unique_ptr<char[]> bytes = allocate(in.header.bytes());
  if (!bytes) {
    end_all(Error(ErrorKind::kError,
                  concat("rank ", rank_, " has no memory for a message of ", in.header.bytes(),
                         " bytes that rank ", source, " sent before one that is waited for"),
                  {Cause::kOther, rank_}));
    return false;
  }
  in.unexpected = unexpected_.insert(unexpected_.end(), {source, in.header, std::move(bytes)});
  return true;
}

void Messenger::end_message(int source) {
  Incoming& in = incoming_[source];
  in.moved = kNotBegun;
  if (const TransferPtr receiver = std::exchange(in.receiver, nullptr))
    return complete(receiver, source);
  in.unexpected->complete = true;
  if (const TransferPtr receiver = std::exchange(in.unexpected->receiver, nullptr)) {
    if (fits(receiver, source, in.header)) {
      copy(receiver->message_.data, in.unexpected->bytes.get(), in.header.bytes(), false);
      complete(receiver, source);
    }
    unexpected_.erase(in.unexpected);
  }
}

// ---- both

// One piece in every direction. Whether anything moved.
bool Messenger::move_everything() {
  bool progress = false;
  if (over_ || outstanding_ == 0) return false;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (!outgoing_[peer].queue.empty()) progress = push(peer) || progress;
    const Incoming& in = incoming_[peer];
    if (any_receivers_ + in.receivers > 0 || in.moved != kNotBegun)
      progress = pull(peer) || progress;
  }
  return progress;
}

void Messenger::complete(const TransferPtr& transfer, int from, std::exception_ptr outcome) {
  transfer->complete_ = true;
  transfer->from_ = from;
  const uint64_t now = ticks();
  recorder_.finish(transfer->record_, now, outcome != nullptr);
  if (!outcome) count_(transfer->message_, transfer->started_, now);
  transfer->outcome_ = std::move(outcome);
  --outstanding_;
  completed_.push_back(transfer);
}

// Wakes a rank that sleeps, after a change of what it waits for: see Sleeper.
void Messenger::ring(int peer) {
  Flag& doorbell = segment_->area(peer).doorbell;
  if (__builtin_expect(load_ordered(doorbell.sleepers) == 0, 1)) return;
  __atomic_add_fetch(&doorbell.value, 1, __ATOMIC_SEQ_CST);
  futex_wake_all(doorbell.value);
}

}  // namespace pycomm
