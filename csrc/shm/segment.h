// The shared segment of one communicator: its layout, and the anonymous memory behind it.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "../algorithms/choose.h"
#include "../common.h"
#include "../error.h"
#include "../kernels/codec.h"
#include "../recorder.h"
#include "../slots.h"

namespace pycomm {

// kAuto follows the measured flag latency between the ranks.
enum class Choice : uint32_t { kAuto, kNever, kAlways };

// How peers are watched: see liveness.h. kAuto: by pid where pids are comparable, else by lock, and
// where that fails by heartbeat.
enum class LifeSign : uint32_t { kAuto, kPid, kLock, kHeartbeat };

// Chosen by rank 0, stored in the segment, read by all: ranks can never disagree on it.
struct ShmConfig {
  int64_t slot_bytes = 128 << 10;
  int32_t slots =
      8;  // a power of two, since chunk numbers wrap; at least 4, the depth of the pipelines
  int32_t spin_polls = -1;             // polls before yielding; -1: by cores
  int64_t channel_bytes = 1 << 20;     // ring of a pair of ranks' messages; a power of two
  Choice streaming = Choice::kAuto;    // whether slots are written past the caches
  int64_t heap_bytes = 0;              // address space per rank for shared tensors (heap.h)
  Choice single_copy = Choice::kAuto;  // whether other ranks' private memory is read, if all can
  int32_t records = 512;  // of the flight recorder, per rank; a power of two, or 0 for none
  LifeSign liveness = LifeSign::kAuto;
  AllReduceTable all_reduce;
  uint32_t check_headers = 1;  // 0: for benchmarks/overhead.py only
};

// A word that one rank writes and others wait for. Atomic by the accessors of wait.h.
struct alignas(kSeparationBytes) Flag {
  uint32_t value;
  uint32_t sleepers;  // how many waiters sleep in the kernel and want a wake
};

inline constexpr int32_t kUncompressed = -1;

// The head of every operation. `sequence` is written last: it announces the header and what lies
// behind it.
struct OperationHeader {
  uint32_t sequence;
  Operation operation;
  DType dtype;
  ReduceOp op;
  Algorithm algorithm;
  int64_t count;
  int32_t root;
  Codec codec;         // of a compressed all_reduce; of others, block is kUncompressed
  uint32_t mixture;    // of its dtypes: see Compression
  uint32_t has_parts;  // whether `parts` below holds the counts, in place of `count`
  double factor;       // of this rank's contribution to a premul_sum
  uint64_t address;    // of the tensor, for its own process
  int64_t place;       // 1 + offset in this rank's heap of the tensor that peers may use, or 0
};

// What this rank sends to and expects from another, in elements, and where what it sends lies in
// its own process.
struct Part {
  int64_t sends;
  int64_t receives;
  uint64_t address;
};

// An operation's header, and behind it as much data as fits: a short message travels with its
// header (eager).
inline constexpr int64_t kEagerBytes = 16 << 10;
struct alignas(kSeparationBytes) Announcement {
  OperationHeader header;
  char payload[kEagerBytes];
  Part parts[kMaxRanks];
};

struct RankArea {
  Flag stages[kStages];  // chunks finished, per stage
  Flag entered;          // its `sleepers` belongs to the announcements' sequences
  Flag latency_probe;
  Announcement announcements[2];  // operation s uses s % 2: see ShmCommunicator::meet
  Flag departed;                  // one of Departure, once the rank has left
  Flag reads_peers;               // 1: it cannot read some peer's memory; 2: it can
  uint64_t probe_word;            // a random word, and where else in its process it lies
  uint64_t probe_address;
  Flag doorbell;           // counts what happened to a sleeping rank's messages
  uint32_t pid;            // 0: not here yet
  uint64_t pid_namespace;  // inode; a pid means nothing in another one
  uint32_t no_pidfd;       // 1: the kernel refuses it pidfds, so pids do not help it
  char host[65];           // a container's is its own, usually
  uint32_t watched_by;     // by those for whom it does not
  uint32_t heartbeat;
  uint32_t flag_latency_ns;
  cpu_set_t cores;  // on which this rank may run
  // What this rank called in the operation that failed: see diagnosis.cpp.
  Flag reported;  // its sequence
  char report[1024];
  char farewell[512];     // why it left, if that was an exception
  uint32_t many_callers;  // more than one of its threads has called operations
  // The segment that the ranks of `heirs` (a bit each) go on with, if this rank is their first.
  Flag offered;  // counts the offers
  uint64_t heirs;
  char offer[512];
};

// How a rank that is gone went: by destroying the group, or by ending its process without.
enum Departure : uint32_t { kPresent = 0, kLeft = 1, kExited = 2 };
// RankArea::watched_by
enum : uint32_t { kByPid = 0, kByLock = 1, kByHeartbeat = 2 };

// One direction of one pair of ranks' messages: see channel.h. Both count bytes and never wrap.
struct ChannelHead {
  alignas(kSeparationBytes) uint64_t written;  // by the source
  alignas(kSeparationBytes) uint64_t read;     // by the destination
};

// Written once, by the first rank that fails.
inline constexpr uint32_t kClean = 0, kWriting = 1, kSet = 2;
struct AbortRecord {
  Flag state;  // kClean, kWriting, kSet
  ErrorKind kind;
  Blame blame;
  int32_t rank;  // that reports it
  char message[8192];
};

struct SegmentHead {
  uint64_t nonce;
  int32_t world_size;
  ShmConfig config;
  AbortRecord abort;
};

// A mapping of the segment, and a descriptor of its own while it is needed.
class Segment {
 public:
  // Maps new anonymous memory (memfd), initialised for `world_size` ranks; *descriptor receives it,
  // for the peers.
  static std::shared_ptr<Segment> create(int world_size, const ShmConfig& config, int* descriptor);
  // Maps a peer's segment and checks that it is the one that `nonce` names.
  static std::shared_ptr<Segment> open(int descriptor, uint64_t nonce);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentHead& head() { return *reinterpret_cast<SegmentHead*>(base_); }
  RankArea& area(int rank) { return *reinterpret_cast<RankArea*>(base_ + area_offset(rank)); }
  char* slots_of(int rank) { return base_ + slots_offset(rank); }
  RecordRing records_of(int rank) {
    const int64_t capacity = head().config.records;
    return RecordRing::at(base_ + records_offset() + rank * RecordRing::bytes(capacity), capacity);
  }
  // Open until close_descriptor(), from which on it is -1.
  int descriptor() const { return descriptor_; }
  void close_descriptor();
  char* heap_of(int rank) {
    const int64_t ranks = world_size();
    return base_ + rings_offset() + ranks * ranks * head().config.channel_bytes +
           rank * head().config.heap_bytes;
  }
  ChannelHead& channel(int source, int destination) {
    return reinterpret_cast<ChannelHead*>(base_ + channels_offset())[pair(source, destination)];
  }
  char* ring_of(int source, int destination) {
    return base_ + rings_offset() + pair(source, destination) * head().config.channel_bytes;
  }

 private:
  Segment(char* base, int64_t bytes, int descriptor)
      : base_(base), bytes_(bytes), descriptor_(descriptor) {}
  int64_t area_offset(int rank) const;
  int64_t slots_offset(int rank) const;
  int64_t channels_offset() const { return slots_offset(world_size()); }
  int64_t records_offset() const;
  int64_t rings_offset() const;
  int world_size() const { return reinterpret_cast<const SegmentHead*>(base_)->world_size; }
  // A destination's channels lie together: it looks at all of them.
  int64_t pair(int source, int destination) const { return destination * world_size() + source; }
  static int64_t total_bytes(int world_size, const ShmConfig& config);

  char* base_;
  int64_t bytes_;
  std::atomic<int> descriptor_;
};

}  // namespace pycomm
