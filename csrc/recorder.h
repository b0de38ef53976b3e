// The flight recorder: what a rank did last, in memory that all ranks can read, so that whoever
// waits can tell what the others do, also of a rank that hangs or has died.
//
// A ring of records; the newest overwrites the oldest. One rank writes, from any of its threads;
// everybody reads, at any time, and notices what changed meanwhile by the record's number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clock.h"
#include "common.h"

namespace pycomm {

struct Request;
struct Message;

// The dimensions of a call's tensor, for messages to people; unknown unless somebody says it. They
// are the tensor's own, valid during the call; what comes later reads the record.
struct Shape {
  static constexpr int kMaxDims = 8;
  static constexpr int kUnknown = -1;
  int dims = kUnknown;
  const int64_t* sizes = nullptr;

  Shape() = default;
  Shape(int64_t number, const int64_t* from)
      : dims(number <= kMaxDims ? static_cast<int>(number) : kUnknown), sizes(from) {}
};
std::string to_text(const Shape& shape);  // "[2, 3]"

// One line, so that recording a short call costs little; atomic by the accessors below.
struct alignas(kLineBytes) Record {
  uint64_t number;                           // from 1 on; 0 while it is rewritten
  uint64_t created, started, met, finished;  // ticks; 0: not yet
  int64_t count;
  uint64_t call;   // see Recorder::pack
  uint64_t peers;  // root or peer, and tag
};
// What few calls have.
struct alignas(kLineBytes) RecordDetail {
  int64_t sizes[Shape::kMaxDims];
  char line[2 * kLineBytes];  // the call site
};

struct RecordRing {
  Record* records;
  RecordDetail* details;
  uint64_t capacity;  // a power of two

  static int64_t bytes(int64_t capacity) {
    return capacity * static_cast<int64_t>(sizeof(Record) + sizeof(RecordDetail));
  }
  static RecordRing at(char* memory, int64_t capacity) {
    auto* records = reinterpret_cast<Record*>(memory);
    return {records, reinterpret_cast<RecordDetail*>(records + capacity),
            static_cast<uint64_t>(capacity)};
  }
};

// A record as it was read.
struct RecordView {
  uint64_t number = 0;
  uint64_t created = 0, started = 0, met = 0, finished = 0;
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint32_t sequence = 0;
  int64_t count = 0;
  int32_t peer = 0;  // of a message; of a collective its root
  int32_t tag = 0;
  int dims = Shape::kUnknown;
  int64_t sizes[Shape::kMaxDims];
  bool failed = false;
  std::string line;

  bool is_message() const { return operation == Operation::kSend || operation == Operation::kRecv; }
  const char* state() const {
    if (failed) return "failed";
    return finished ? "completed" : started ? "started" : "scheduled";
  }
  Shape shape() const { return dims == Shape::kUnknown ? Shape() : Shape(dims, sizes); }
  std::string describe()
      const;  // "all_reduce(count=5, dtype=float32, op=sum) at train.py:88 in step"
};

class Recorder {
 public:
  // Works without a ring, too: then it remembers the last operation only.
  Recorder() = default;
  void use(const RecordRing& ring) { ring_ = ring; }

  // A new record, of an operation that waits for its turn or starts now; its number is what the
  // others take.
  uint64_t schedule(const Request& request, const std::string& line);
  uint64_t start(const Request& request, uint32_t sequence, uint64_t now, const std::string& line);
  uint64_t start(const Message& message, uint32_t sequence, uint64_t now, const std::string& line);
  void start(uint64_t number, uint32_t sequence, uint64_t now) {
    Record& record = at(number);
    if (load(record.number) != number) return;
    store(record.call, (load(record.call) & ~kSequenceMask) | sequence);
    store(record.started, now);
  }
  // All ranks have entered it.
  void meet(uint64_t number, uint64_t now) {
    Record& record = at(number);
    if (load(record.number) == number) store(record.met, now);
  }
  void finish(uint64_t number, uint64_t now, bool failed) {
    Record& record = at(number);
    if (load(record.number) != number) return;
    if (__builtin_expect(failed, 0)) store(record.call, load(record.call) | kFailed);
    store(record.finished, now);
  }
  void set_line(uint64_t number, const std::string& line);
  // The record's if it is still there, else an empty one.
  RecordView read(uint64_t number) const {
    const RecordView view = read(ring_, number & (ring_.capacity - 1));
    return number != 0 && view.number == number ? view : RecordView();
  }

  // Any rank's ring: the records that it holds, oldest first.
  static std::vector<RecordView> read_all(const RecordRing& ring);

 private:
  static constexpr uint64_t kSequenceMask = 0xffffffff;
  static constexpr int kOperationShift = 32, kDTypeShift = 40, kOpShift = 48, kDimsShift = 56;
  static constexpr uint64_t kHasLine = UINT64_C(1) << 60, kFailed = UINT64_C(1) << 61;

  static uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }
  static void store(uint64_t& word, uint64_t value) {
    __atomic_store_n(&word, value, __ATOMIC_RELAXED);
  }
  static uint64_t pack(uint32_t sequence, Operation operation, DType dtype, ReduceOp op, int dims);
  uint64_t add(const Request& request, uint32_t sequence, uint64_t now, bool starts,
               const std::string& line);
  uint64_t write(uint64_t call, uint64_t now, bool starts, int64_t count, uint64_t peers,
                 const Shape& shape, const std::string& line);
  void write_line(uint64_t number, const std::string& line);
  Record& at(uint64_t number) { return ring_.records[number & (ring_.capacity - 1)]; }
  static RecordView read(const RecordRing& ring, uint64_t place);

  Record last_{};
  RecordDetail last_detail_{};
  RecordRing ring_{&last_, &last_detail_, 1};
  uint64_t next_ = 0;  // records so far
};

}  // namespace pycomm
