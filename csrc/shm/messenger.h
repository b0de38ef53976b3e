// Messages between two ranks: which send meets which receive, and who moves the bytes.
//
// There is no thread that must run for a message to travel. A call moves what it can at once;
// whoever waits for a message moves all messages of this rank meanwhile; and while some are
// outstanding that nobody waits for, a helper thread does.
//
//   transfer      a message of this rank that was posted and is not done
//   outstanding   transfers that are not complete
//   unexpected    a message that had to leave its channel before its receive was posted: it stood
//                 before another one that a posted receive may be waiting for
//   driving       moving whatever can be moved, under the lock
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../communicator.h"
#include "../error.h"
#include "../forks.h"
#include "../recorder.h"
#include "channel.h"
#include "liveness.h"
#include "segment.h"
#include "wait.h"

namespace pycomm {

class Messenger;

class Transfer : public Pending {
 public:
  Transfer(std::shared_ptr<Messenger> messenger, const Message& message,
           std::chrono::milliseconds limit, std::shared_ptr<void> keep_alive);
  bool is_done() override;
  // With a limit it leaves it to the caller to listen to interrupts in between.
  bool wait(std::chrono::milliseconds at_most) override;
  int source() const override { return source_.load(std::memory_order_relaxed); }

 private:
  friend class Messenger;
  const std::shared_ptr<Messenger> messenger_;
  const Message message_;
  const std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point deadline_{};  // set while it is outstanding
  std::shared_ptr<void> keep_alive_;
  int64_t moved_ = kNotBegun;          // of a send: bytes in the channel
  uint64_t record_ = 0, started_ = 0;  // in the flight recorder
  // Set under the messenger's lock, when nothing touches the message's memory any more.
  bool complete_ = false;
  int from_ = -1;
  std::exception_ptr outcome_;
  std::atomic<int> source_{-1};  // from_, once it is done
};

class Messenger : public std::enable_shared_from_this<Messenger> {
 public:
  // Ends the communicator on all ranks, if it has not ended yet; called under the lock.
  using End = std::function<void(const Error&)>;
  // Counts a message that is done, with its start and end in ticks; under the lock.
  using Count = std::function<void(const Message&, uint64_t, uint64_t)>;
  Messenger(std::shared_ptr<Segment> segment, const Origin& origin, int rank,
            const Patience& patience, const Liveness& liveness, Recorder& recorder, Count count,
            End end);

  // See Communicator::post. A send that is complete already is null.
  std::shared_ptr<Pending> post(const Message& message, std::chrono::milliseconds limit,
                                std::shared_ptr<void> keep_alive);
  // Waits until all sends are complete, or have failed.
  void finish_sends();
  // Ends what is outstanding, and the helper. Afterwards neither `end` nor `liveness` is used.
  void close();

 private:
  friend class Transfer;
  using Clock = std::chrono::steady_clock;
  using TransferPtr = std::shared_ptr<Transfer>;

  struct Outgoing {  // to one rank
    ChannelWriter writer;
    std::deque<TransferPtr> queue;
  };
  struct Unexpected {
    int source;
    MessageHeader header;
    std::unique_ptr<char[]> bytes;
    bool complete = false;
    TransferPtr receiver = nullptr;  // posted while the message was still arriving
  };
  struct Incoming {  // from one rank
    ChannelReader reader;
    int64_t receivers = 0;  // posted for this source alone, and without a message
    // The message that is being read, if `moved` says so, and where it goes.
    int64_t moved = kNotBegun;
    MessageHeader header{};
    TransferPtr receiver = nullptr;
    std::list<Unexpected>::iterator unexpected{};
  };
  struct Drove {
    bool done;      // the transfer that is waited for
    bool progress;  // anything moved
    bool idle;      // nothing is outstanding
  };

  // messenger.cpp: matching and moving; under the lock.
  TransferPtr send(const Message& message, std::chrono::milliseconds limit,
                   std::shared_ptr<void>& keep_alive);
  TransferPtr receive(const Message& message, std::chrono::milliseconds limit,
                      std::shared_ptr<void>& keep_alive);
  void send_to_self(const Message& message);
  bool move_everything();
  bool push(int destination);
  bool pull(int source);
  bool begin_message(int source);
  void end_message(int source);
  TransferPtr take_receiver(int source, int32_t tag);
  bool take_unexpected(const TransferPtr& receiver);
  bool fits(const TransferPtr& receiver, int source, const MessageHeader& header);
  void complete(const TransferPtr& transfer, int from, std::exception_ptr outcome = nullptr);
  void ring(int peer);

  // messenger_end.cpp: how waits end without data; under the lock.
  void look_after();
  bool is_gone(int peer) const;
  int source_of(const Transfer& transfer) const;
  void lose(int peer);
  void fail(const TransferPtr& transfer, const Error& error);
  void fail_late(const TransferPtr& transfer);
  void end_all(const Error& reason);
  std::vector<TransferPtr> outstanding() const;
  std::string progress_of(const Transfer& transfer) const;
  std::string call(const Message& message, uint64_t record = 0) const;
  std::string call_of_sender(int source, const MessageHeader& header) const;

  // messenger_drive.cpp: who moves, and when.
  std::unique_lock<std::mutex> lock();
  bool wait_for(Transfer& transfer, std::chrono::milliseconds at_most);
  Drove drive(Transfer* transfer, bool thoroughly);
  Drove sleep(Transfer* transfer, std::chrono::milliseconds at_most);
  void settle(std::unique_lock<std::mutex>& held);
  void wake_own();
  void wake_helper();
  void help();
  void help_along();

  const std::shared_ptr<Segment> segment_;
  const Origin origin_;
  const int rank_;
  const int world_size_;
  const Patience patience_;
  const Liveness& liveness_;
  Recorder& recorder_;
  const Count count_;
  const End end_;

  std::mutex mutex_;            // the lock
  std::atomic<int> asking_{0};  // threads that must have it: drivers give way to them
  std::deque<Outgoing> outgoing_;
  std::deque<Incoming> incoming_;
  std::deque<TransferPtr> receivers_;  // posted and without a message, in order
  int64_t any_receivers_ = 0;          // of them, those for any source
  std::list<Unexpected> unexpected_;   // in the order of arrival
  int64_t outstanding_ = 0;
  bool over_ = false;    // the communicator has ended: nothing moves any more
  bool closed_ = false;  // by its owner
  Clock::time_point next_look_{};
  uint32_t posted_ = 0;     // messages so far
  uint64_t recording_ = 0;  // the record of the message that is being posted, and its start
  uint64_t posting_at_ = 0;

  // Complete, but not done: callbacks run without the lock, in the order of completion, on one
  // thread at a time.
  std::deque<TransferPtr> completed_;
  std::thread::id settling_;

  std::atomic<int> drivers_{0};  // threads in wait_for
  std::atomic<int> asleep_{0};   // of them, those that sleep
  std::thread helper_;
  std::condition_variable helper_wake_;
  bool helper_parked_ = false;
};

}  // namespace pycomm
