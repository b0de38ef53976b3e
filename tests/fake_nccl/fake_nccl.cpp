// An NCCL and a CUDA runtime of our own, over host memory, so that csrc/nccl/ can be run and made
// to fail without a GPU. Ranks are processes; they meet in a file under FAKE_NCCL_DIR.
//
// Its limits:
// - A stream is a thread, a kernel a function that it runs: nothing is said about speed, about real
//   kernels, about memory order, or about what a GPU does with many streams at once.
// - All host memory counts as memory of device 0, unless fake_place() says otherwise.
// - One rank's part of a collective takes at most 256 KiB, a message 64 KiB; 8 ranks at most.
// - Calls that differ between ranks hang until the communicator is aborted, as NCCL's often do;
// here
//   they always do. A rank that dies leaves the others hanging.
// - Reductions run in rank order, in float for 16-bit types; 8-bit floats are not reduced.
// - Graphs keep the order in which they were captured, and do not notice streams left unjoined.
// - Of ncclConfig_t only blocking, size, magic and version are looked at.
// Faults are set per process by fake_fault(what, at, value); see `Fault`.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/nccl/nccl_types.h"

using namespace pycomm::nccl;  // NOLINT: this file stands for the library that these types are of

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kPartBytes = 256 << 10, kMessageBytes = 64 << 10;
constexpr int kMostRanks = 8;

void pause_a_little() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

// ---- faults

// what: init_hang, init_error, in_progress (value polls after each call), enqueue_error,
// async_error (the kernel hangs, and the communicator says `value`), kernel_hang, abort_hang,
// split_error, finalize_hang. `at` counts groups of calls from 1; 0: any.
struct Fault {
  int at = 0;
  int value = 0;
};
std::mutex faults_mutex;
std::map<std::string, Fault> faults;

bool fault(const std::string& what, int at = 0, int* value = nullptr) {
  std::lock_guard<std::mutex> lock(faults_mutex);
  const auto found = faults.find(what);
  if (found == faults.end() || (found->second.at != 0 && found->second.at != at)) return false;
  if (value) *value = found->second.value;
  return true;
}

thread_local std::string last_error;
Result refuse(Result result, const std::string& why) {
  last_error = why;
  return result;
}

// ---- streams, events, graphs

using Job = std::function<void()>;
struct FakeStream;
struct Graph {
  std::vector<Job> jobs;
  std::vector<FakeStream*> streams;
};
struct FakeStream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  Graph* graph = nullptr;

  FakeStream() {
    std::thread([this] {
      for (;;) {
        Job job;
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [this] { return !jobs.empty(); });
          job = std::move(jobs.front());
          jobs.pop_front();
        }
        job();
      }
    }).detach();
  }
  void add(Job job) {
    std::atomic<bool> done{false};
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (graph) {
        graph->jobs.push_back(std::move(job));
        return;
      }
      if (is_synchronous()) job = [job = std::move(job), &done] { job(), done = true; };
      jobs.push_back(std::move(job));
      changed.notify_one();
    }
    while (is_synchronous() && !done) pause_a_little();
  }
  // As CUDA_LAUNCH_BLOCKING: for code that does not know that its tensors are on a device.
  static bool is_synchronous() {
    static const bool kIs = std::getenv("FAKE_CUDA_SYNCHRONOUS") != nullptr;
    return kIs;
  }
};
FakeStream* stream_of(Stream stream) {
  static auto* const kDefault = new FakeStream;
  return stream ? static_cast<FakeStream*>(stream) : kDefault;
}

struct Mark {
  std::atomic<bool> done{false};
  Graph* graph = nullptr;
};
struct FakeEvent {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
};

struct Place {
  const char* begin;
  size_t bytes;
  int device;  // -1: the host's
};
std::mutex places_mutex;
std::vector<Place> places;
thread_local int current_device = 0;

int devices() {
  const char* text = std::getenv("FAKE_CUDA_DEVICES");
  return text ? std::atoi(text) : 2;
}

// ---- communicators

struct Signature {
  int kind, type, op, root;
  size_t count;
};
struct Seat {
  std::atomic<uint64_t> stage;
  std::atomic<int> here;
  Signature signature;
  char data[kPartBytes];
};
struct Mailbox {
  std::atomic<uint64_t> sent, taken;
  size_t bytes;
  char data[kMessageBytes];
};
struct Shared {
  Seat seats[kMostRanks];
  Mailbox boxes[kMostRanks][kMostRanks];  // [from][to]
};

struct Scaled {
  double factor;
};

}  // namespace

struct pycomm::nccl::ncclComm {
  std::string path;
  int rank = 0, world = 0, device = 0;
  bool blocking = false;
  Shared* shared = nullptr;
  std::atomic<bool> stopped{false};
  std::atomic<int> state{static_cast<int>(Result::kSuccess)};
  std::atomic<int> polls{0};    // that still answer ncclInProgress
  std::atomic<int> running{0};  // jobs
  uint64_t stage = 0;
  int groups = 0, children = 0, registered = 0;
  std::map<int, Scaled> ops;
  uint64_t sent[kMostRanks] = {}, received[kMostRanks] = {};

  void set(Result result) { state = static_cast<int>(result); }

  void attach() {
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) std::abort();
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) std::abort();
    close(file);
    shared = static_cast<Shared*>(memory);
  }
  // Whether all others have come; false if this communicator was stopped first.
  bool meet() {
    shared->seats[rank].here = 1;
    for (int peer = 0; peer < world; ++peer)
      while (!shared->seats[peer].here) {
        if (stopped) return false;
        pause_a_little();
      }
    return true;
  }
  bool barrier() {
    shared->seats[rank].stage = ++stage;
    for (int peer = 0; peer < world; ++peer)
      while (shared->seats[peer].stage < stage) {
        if (stopped) return false;
        pause_a_little();
      }
    return true;
  }
  void hang() {
    while (!stopped) pause_a_little();
  }
};

namespace {

// ---- arithmetic

struct BFloat {
  uint16_t bits;
  operator float() const {  // NOLINT
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  BFloat() = default;
  explicit BFloat(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
};

size_t bytes_of(DataType type) {
  static constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[static_cast<int>(type)];
}

template <class T, class Wide>
void reduce(ncclComm* comm, void* output, size_t first, size_t count, RedOp op) {
  T* to = static_cast<T*>(output);
  const auto from = [&](int rank, size_t i) {
    T value;
    std::memcpy(&value, comm->shared->seats[rank].data + (first + i) * sizeof(T), sizeof value);
    return static_cast<Wide>(value);
  };
  for (size_t i = 0; i < count; ++i) {
    Wide total = from(0, i);
    for (int rank = 1; rank < comm->world; ++rank) {
      const Wide value = from(rank, i);
      total = op == kProd  ? static_cast<Wide>(total * value)
              : op == kMax ? std::max(total, value)
              : op == kMin ? std::min(total, value)
                           : static_cast<Wide>(total + value);
    }
    if (op == kAvg) total = static_cast<Wide>(total / static_cast<Wide>(comm->world));
    to[i] = static_cast<T>(total);
  }
}

void reduce(ncclComm* comm, void* output, size_t first, size_t count, DataType type, RedOp op) {
  switch (type) {
    case DataType::kInt8:
      return reduce<int8_t, int64_t>(comm, output, first, count, op);
    case DataType::kUInt8:
      return reduce<uint8_t, uint64_t>(comm, output, first, count, op);
    case DataType::kInt32:
      return reduce<int32_t, int64_t>(comm, output, first, count, op);
    case DataType::kUInt32:
      return reduce<uint32_t, uint64_t>(comm, output, first, count, op);
    case DataType::kInt64:
      return reduce<int64_t, int64_t>(comm, output, first, count, op);
    case DataType::kUInt64:
      return reduce<uint64_t, uint64_t>(comm, output, first, count, op);
    case DataType::kFloat16:
      return reduce<_Float16, float>(comm, output, first, count, op);
    case DataType::kBFloat16:
      return reduce<BFloat, float>(comm, output, first, count, op);
    case DataType::kFloat32:
      return reduce<float, float>(comm, output, first, count, op);
    default:
      return reduce<double, double>(comm, output, first, count, op);
  }
}

template <class T>
void scale(char* data, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof value);
    value = static_cast<T>(static_cast<float>(value) * static_cast<float>(factor));
    std::memcpy(data + i * sizeof(T), &value, sizeof value);
  }
}
void scale(char* data, size_t count, DataType type, double factor) {
  if (type == DataType::kFloat16) return scale<_Float16>(data, count, factor);
  if (type == DataType::kBFloat16) return scale<BFloat>(data, count, factor);
  if (type == DataType::kFloat32) return scale<float>(data, count, factor);
  for (size_t i = 0; i < count; ++i) {
    double value;
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    value *= factor;
    std::memcpy(data + i * sizeof value, &value, sizeof value);
  }
}

// ---- one group of calls

enum Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter };

struct Collective {
  Signature signature;
  const void* input;
  void* output;
  size_t count;  // of the input
  double factor = 1;
};
struct Transfer {
  bool sends;
  int peer;
  void* data;
  size_t bytes;
  bool done = false;
};
struct Calls {
  ncclComm* comm;
  Stream stream;
  std::vector<Collective> collectives;
  std::vector<Transfer> transfers;
};

thread_local int depth = 0;
thread_local std::vector<Calls> pending;
thread_local Result first_bad = Result::kSuccess;

void run(ncclComm* comm, const Collective& call) {
  const auto type = static_cast<DataType>(call.signature.type);
  const size_t size = bytes_of(type), bytes = call.count * size;
  Seat& own = comm->shared->seats[comm->rank];
  own.signature = call.signature;
  if (call.input) std::memcpy(own.data, call.input, bytes);
  if (call.factor != 1) scale(own.data, call.count, type, call.factor);
  if (!comm->barrier()) return;
  for (int peer = 0; peer < comm->world; ++peer)
    if (std::memcmp(&comm->shared->seats[peer].signature, &own.signature, sizeof(Signature)) != 0)
      return comm->hang();
  const int root = call.signature.root;
  const auto op = static_cast<RedOp>(call.signature.op);
  switch (call.signature.kind) {
    case kAllReduce:
      reduce(comm, call.output, 0, call.count, type, op);
      break;
    case kReduce:
      if (root == comm->rank) reduce(comm, call.output, 0, call.count, type, op);
      break;
    case kBroadcast:
      std::memmove(call.output, comm->shared->seats[root].data, bytes);
      break;
    case kAllGather:
      for (int peer = 0; peer < comm->world; ++peer)
        std::memcpy(static_cast<char*>(call.output) + static_cast<size_t>(peer) * bytes,
                    comm->shared->seats[peer].data, bytes);
      break;
    default: {
      const size_t part = call.count / static_cast<size_t>(comm->world);
      reduce(comm, call.output, part * static_cast<size_t>(comm->rank), part, type, op);
    }
  }
  comm->barrier();
}

bool move(ncclComm* comm, Transfer& transfer) {
  const int from = transfer.sends ? comm->rank : transfer.peer;
  const int to = transfer.sends ? transfer.peer : comm->rank;
  Mailbox& box = comm->shared->boxes[from][to];
  if (transfer.sends) {
    if (box.taken != comm->sent[to]) return false;
    box.bytes = transfer.bytes;
    std::memcpy(box.data, transfer.data, transfer.bytes);
    box.sent = ++comm->sent[to];
  } else {
    if (box.sent != comm->received[from] + 1) return false;
    if (box.bytes != transfer.bytes) return false;  // never fits: hangs
    std::memcpy(transfer.data, box.data, transfer.bytes);
    box.taken = ++comm->received[from];
  }
  return true;
}

void run(const std::shared_ptr<Calls>& calls) {
  ncclComm* comm = calls->comm;
  for (const Collective& call : calls->collectives)
    if (!comm->stopped) run(comm, call);
  std::vector<Transfer> transfers = calls->transfers;  // of this run, since graphs run again
  for (bool all = false; !all && !comm->stopped;) {
    all = true;
    bool blocked_send[kMostRanks] = {}, blocked_recv[kMostRanks] = {};
    for (Transfer& transfer : transfers) {
      bool& blocked = (transfer.sends ? blocked_send : blocked_recv)[transfer.peer];
      if (!transfer.done && !blocked) transfer.done = move(comm, transfer);
      blocked = blocked || !transfer.done;
      all = all && transfer.done;
    }
    if (!all) pause_a_little();
  }
}

Result launch(Calls calls) {
  ncclComm* comm = calls.comm;
  const int number = ++comm->groups;
  int value = 0;
  if (fault("enqueue_error", number, &value))
    return refuse(static_cast<Result>(value), "planted: enqueue_error");
  const bool hangs = fault("kernel_hang", number);
  const bool fails = fault("async_error", number, &value);
  const Result failure = static_cast<Result>(value);
  auto shared = std::make_shared<Calls>(std::move(calls));
  stream_of(shared->stream)->add([=] {
    ++comm->running;
    if (fails) comm->set(failure);
    if (hangs || fails)
      comm->hang();
    else if (!comm->stopped)
      run(shared);
    --comm->running;
  });
  if (comm->blocking) return Result::kSuccess;
  if (!fault("in_progress", number, &value)) return Result::kSuccess;
  comm->polls = value;
  return Result::kInProgress;
}

Calls& calls_of(ncclComm* comm, Stream stream) {
  for (Calls& calls : pending)
    if (calls.comm == comm && calls.stream == stream) return calls;
  pending.push_back({comm, stream, {}, {}});
  return pending.back();
}

Result bad(Result result, const std::string& why) {
  if (depth > 0) first_bad = result;
  return refuse(result, why);
}

}  // namespace

API Result ncclGroupStart() {
  ++depth;
  return Result::kSuccess;
}

API Result ncclGroupEnd() {
  if (--depth > 0) return Result::kSuccess;
  Result result = std::exchange(first_bad, Result::kSuccess);
  for (Calls& calls : pending) {
    if (result != Result::kSuccess && result != Result::kInProgress) break;
    const Result launched = launch(std::move(calls));
    if (launched != Result::kSuccess) result = launched;
  }
  pending.clear();
  return result;
}

namespace {

Result add(ncclComm* comm, Stream stream, Collective call) {
  if (!comm) return bad(Result::kInvalidArgument, "the communicator is null");
  if (call.count * bytes_of(static_cast<DataType>(call.signature.type)) > kPartBytes)
    return bad(Result::kInvalidUsage, "the fake takes 256 KiB at most");
  if (call.signature.op > kAvg) {
    call.factor = comm->ops.at(call.signature.op).factor;
    call.signature.op = kSum;
  }
  ncclGroupStart();
  calls_of(comm, stream).collectives.push_back(call);
  return ncclGroupEnd();
}

Result add(ncclComm* comm, Stream stream, Transfer transfer) {
  if (!comm) return bad(Result::kInvalidArgument, "the communicator is null");
  if (transfer.bytes > kMessageBytes)
    return bad(Result::kInvalidUsage, "the fake takes messages of 64 KiB at most");
  ncclGroupStart();
  calls_of(comm, stream).transfers.push_back(transfer);
  return ncclGroupEnd();
}

}  // namespace

// ---- the functions of nccl.h

API Result ncclAllReduce(const void* in, void* out, size_t count, DataType type, RedOp op,
                         ncclComm* comm, Stream stream) {
  return add(comm, stream, {{kAllReduce, static_cast<int>(type), op, 0, count}, in, out, count});
}
API Result ncclBroadcast(const void* in, void* out, size_t count, DataType type, int root,
                         ncclComm* comm, Stream stream) {
  return add(comm, stream, {{kBroadcast, static_cast<int>(type), 0, root, count}, in, out, count});
}
API Result ncclReduce(const void* in, void* out, size_t count, DataType type, RedOp op, int root,
                      ncclComm* comm, Stream stream) {
  return add(comm, stream, {{kReduce, static_cast<int>(type), op, root, count}, in, out, count});
}
API Result ncclAllGather(const void* in, void* out, size_t count, DataType type, ncclComm* comm,
                         Stream stream) {
  return add(comm, stream, {{kAllGather, static_cast<int>(type), 0, 0, count}, in, out, count});
}
API Result ncclReduceScatter(const void* in, void* out, size_t count, DataType type, RedOp op,
                             ncclComm* comm, Stream stream) {
  const size_t all = comm ? count * static_cast<size_t>(comm->world) : count;
  return add(comm, stream, {{kReduceScatter, static_cast<int>(type), op, 0, count}, in, out, all});
}
API Result ncclSend(const void* data, size_t count, DataType type, int peer, ncclComm* comm,
                    Stream stream) {
  return add(comm, stream, Transfer{true, peer, const_cast<void*>(data), count * bytes_of(type)});
}
API Result ncclRecv(void* data, size_t count, DataType type, int peer, ncclComm* comm,
                    Stream stream) {
  return add(comm, stream, Transfer{false, peer, data, count * bytes_of(type)});
}

API Result ncclRedOpCreatePreMulSum(RedOp* op, void* scalar, DataType type, Residence residence,
                                    ncclComm* comm) {
  if (residence != Residence::kHostImmediate)
    return refuse(Result::kInvalidUsage, "the fake takes factors on the host only");
  double factor = 0;
  if (type == DataType::kFloat16) factor = static_cast<float>(*static_cast<_Float16*>(scalar));
  if (type == DataType::kBFloat16) factor = *static_cast<BFloat*>(scalar);
  if (type == DataType::kFloat32) factor = *static_cast<float*>(scalar);
  if (type == DataType::kFloat64) factor = *static_cast<double*>(scalar);
  *op = 5;
  while (comm->ops.count(*op) != 0) ++*op;
  comm->ops[*op] = {factor};
  return Result::kSuccess;
}
API Result ncclRedOpDestroy(RedOp op, ncclComm* comm) {
  return comm->ops.erase(op) == 1 ? Result::kSuccess
                                  : refuse(Result::kInvalidArgument, "there is no such operation");
}

API Result ncclGetVersion(int* version) {
  const char* text = std::getenv("FAKE_NCCL_VERSION");
  *version = text ? std::atoi(text) : 23007;
  return Result::kSuccess;
}
API const char* ncclGetErrorString(Result result) {
  return result == Result::kSuccess ? "no error" : "an error of the fake's";
}
API const char* ncclGetLastError(ncclComm*) { return last_error.c_str(); }

API Result ncclGetUniqueId(UniqueId* id) {
  const char* folder = std::getenv("FAKE_NCCL_DIR");
  static std::atomic<int> number{0};
  std::snprintf(id->internal, sizeof id->internal, "%s/%d.%d", folder ? folder : "/tmp", getpid(),
                number++);
  return Result::kSuccess;
}

namespace {

// Starts what takes time: at once, or in a thread while the communicator is in progress.
Result start(ncclComm* comm, bool blocking, std::function<Result()> job) {
  if (blocking) {
    const Result result = job();
    comm->set(result);
    return result;
  }
  comm->set(Result::kInProgress);
  ++comm->running;
  std::thread([comm, job = std::move(job)] {
    const Result result = job();
    if (!comm->stopped) comm->set(result);
    --comm->running;
  }).detach();
  return Result::kInProgress;
}

ncclComm* make(const std::string& path, int rank, int world, bool blocking) {
  auto* comm = new ncclComm;
  comm->path = path;
  comm->rank = rank;
  comm->world = world;
  comm->blocking = blocking;
  comm->device = current_device;
  return comm;
}

Result begin(ncclComm* comm, ncclComm** place) {
  *place = comm;
  return start(comm, comm->blocking, [comm]() -> Result {
    int value = 0;
    if (fault("init_error", 0, &value)) return refuse(static_cast<Result>(value), "planted");
    if (fault("init_hang")) comm->hang();
    if (comm->stopped) return Result::kInternalError;
    comm->attach();
    return comm->meet() ? Result::kSuccess : Result::kInternalError;
  });
}

bool is_valid(const Config* config) {
  const char* text = std::getenv("FAKE_NCCL_VERSION");
  const auto version = static_cast<unsigned>(text ? std::atoi(text) : 23007);
  return config->magic == kMagic && config->size <= sizeof(Config) && config->version <= version;
}

}  // namespace

API Result ncclCommInitRankConfig(ncclComm** place, int world, UniqueId id, int rank,
                                  Config* config) {
  if (!is_valid(config)) return refuse(Result::kInvalidArgument, "the configuration is malformed");
  if (world > kMostRanks) return refuse(Result::kInvalidArgument, "the fake has 8 ranks at most");
  return begin(make(id.internal, rank, world, config->blocking == 1), place);
}

API Result ncclCommFinalize(ncclComm* comm) {
  return start(comm, comm->blocking, [comm] {
    if (fault("finalize_hang")) comm->hang();
    return !comm->stopped && comm->barrier() ? Result::kSuccess : Result::kInternalError;
  });
}
API Result ncclCommDestroy(ncclComm* comm) {
  if (comm->registered != 0) return refuse(Result::kInvalidUsage, "memory is still registered");
  comm->stopped = true;
  return Result::kSuccess;
}
API Result ncclCommAbort(ncclComm* comm) {
  while (fault("abort_hang")) pause_a_little();
  comm->stopped = true;
  while (comm->running != 0) pause_a_little();
  return Result::kSuccess;
}
API Result ncclCommRevoke(ncclComm* comm, int) {
  comm->stopped = true;
  return Result::kSuccess;
}

API Result ncclCommSplit(ncclComm* comm, int color, int key, ncclComm** place, Config* config) {
  if (!is_valid(config)) return refuse(Result::kInvalidArgument, "the configuration is malformed");
  const int number = ++comm->children;
  const bool blocking = config->blocking == 1;
  return start(comm, blocking, [=]() -> Result {
    int value = 0;
    if (fault("split_error", 0, &value)) return refuse(static_cast<Result>(value), "planted");
    const int own[2] = {color, key};
    std::memcpy(comm->shared->seats[comm->rank].data, own, sizeof own);
    if (!comm->barrier()) return Result::kInternalError;
    int rank = 0, world = 0;
    for (int peer = 0; peer < comm->world; ++peer) {
      int theirs[2];
      std::memcpy(theirs, comm->shared->seats[peer].data, sizeof theirs);
      if (theirs[0] != color) continue;
      ++world;
      if (theirs[1] < key || (theirs[1] == key && peer < comm->rank)) ++rank;
    }
    if (!comm->barrier()) return Result::kInternalError;
    if (color < 0) return Result::kSuccess;
    const std::string path =
        comm->path + ".s" + std::to_string(number) + "." + std::to_string(color);
    const Result result = begin(make(path, rank, world, blocking), place);
    return result == Result::kInProgress ? Result::kSuccess : result;
  });
}

API Result ncclCommShrink(ncclComm* comm, int* list, int length, ncclComm** place, Config* config,
                          int flags) {
  if (!is_valid(config)) return refuse(Result::kInvalidArgument, "the configuration is malformed");
  if (comm->stopped && flags != kShrinkAbort)
    return refuse(Result::kInvalidUsage,
                  "a stopped communicator shrinks by NCCL_SHRINK_ABORT only");
  std::string path = comm->path + ".k" + std::to_string(++comm->children);
  int rank = comm->rank;
  for (int i = 0; i < length; ++i) {
    path += "-" + std::to_string(list[i]);
    if (list[i] < comm->rank) --rank;
  }
  return begin(make(path, rank, comm->world - length, config->blocking == 1), place);
}

API Result ncclCommGetUniqueId(ncclComm* comm, UniqueId* id) {
  std::snprintf(id->internal, sizeof id->internal, "%s.g%d", comm->path.c_str(),
                comm->children + 1);
  return Result::kSuccess;
}
API Result ncclCommGrow(ncclComm* comm, int world, const UniqueId* id, int rank, ncclComm** place,
                        Config* config) {
  if (!is_valid(config)) return refuse(Result::kInvalidArgument, "the configuration is malformed");
  if (!comm && !id) return refuse(Result::kInvalidArgument, "a new rank needs the id");
  const std::string path =
      comm ? comm->path + ".g" + std::to_string(++comm->children) : std::string(id->internal);
  return begin(make(path, comm ? comm->rank : rank, world, config->blocking == 1), place);
}

API Result ncclCommGetAsyncError(ncclComm* comm, Result* result) {
  if (comm->polls > 0) {
    --comm->polls;
    *result = Result::kInProgress;
  } else {
    *result = static_cast<Result>(comm->state.load());
  }
  return Result::kSuccess;
}
API Result ncclCommCount(ncclComm* comm, int* count) {
  *count = comm->world;
  return Result::kSuccess;
}
API Result ncclCommUserRank(ncclComm* comm, int* rank) {
  *rank = comm->rank;
  return Result::kSuccess;
}
API Result ncclCommRegister(ncclComm* comm, void* data, size_t, void** handle) {
  ++comm->registered;
  *handle = data;
  return Result::kSuccess;
}
API Result ncclCommDeregister(ncclComm* comm, void*) {
  --comm->registered;
  return Result::kSuccess;
}
API Result ncclCommWindowRegister(ncclComm* comm, void* data, size_t, Window* window, int) {
  ++comm->registered;
  return start(comm, comm->blocking, [=] {
    *window = static_cast<Window>(data);
    return comm->barrier() ? Result::kSuccess : Result::kInternalError;
  });
}
API Result ncclCommWindowDeregister(ncclComm* comm, Window) {
  --comm->registered;
  return Result::kSuccess;
}
API Result ncclMemAlloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return Result::kSuccess;
}
API Result ncclMemFree(void* data) {
  std::free(data);
  return Result::kSuccess;
}

// ---- the functions of cuda_runtime_api.h

API int cudaGetDevice(int* device) {
  *device = current_device;
  return kCudaSuccess;
}
API int cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return 101;  // cudaErrorInvalidDevice
  current_device = device;
  return kCudaSuccess;
}
API int cudaGetDeviceCount(int* count) {
  *count = devices();
  return *count < 0 ? 35 : *count == 0 ? 100 : kCudaSuccess;
}
API int cudaStreamCreateWithPriority(Stream* stream, unsigned, int) {
  *stream = new FakeStream;
  return kCudaSuccess;
}
API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kCudaSuccess;
}
API int cudaStreamDestroy(Stream) { return kCudaSuccess; }  // its thread may still have work
API int cudaStreamWaitEvent(Stream stream, Event event, unsigned) {
  auto* fake = static_cast<FakeEvent*>(event);
  std::lock_guard<std::mutex> lock(fake->mutex);
  const std::shared_ptr<Mark> mark = fake->mark;
  if (!mark) return kCudaSuccess;
  FakeStream* waiter = stream_of(stream);
  if (waiter->graph && mark->graph != waiter->graph) return 905;  // cudaErrorStreamCaptureIsolation
  if (mark->graph && !waiter->graph) {
    waiter->graph = mark->graph;  // it joins the capture
    mark->graph->streams.push_back(waiter);
  }
  if (!mark->graph)
    waiter->add([mark] {
      while (!mark->done) pause_a_little();
    });
  return kCudaSuccess;
}
API int cudaStreamIsCapturing(Stream stream, int* status) {
  *status = stream_of(stream)->graph ? 1 : kCaptureNone;
  return kCudaSuccess;
}
API int cudaThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current = 0;
  std::swap(*mode, current);
  return kCudaSuccess;
}
API int cudaEventCreateWithFlags(Event* event, unsigned) {
  *event = new FakeEvent;
  return kCudaSuccess;
}
API int cudaEventRecord(Event event, Stream stream) {
  auto* fake = static_cast<FakeEvent*>(event);
  auto mark = std::make_shared<Mark>();
  mark->graph = stream_of(stream)->graph;
  stream_of(stream)->add([mark] { mark->done = true; });
  std::lock_guard<std::mutex> lock(fake->mutex);
  fake->mark = std::move(mark);
  return kCudaSuccess;
}
API int cudaEventQuery(Event event) {
  auto* fake = static_cast<FakeEvent*>(event);
  std::lock_guard<std::mutex> lock(fake->mutex);
  if (!fake->mark) return kCudaSuccess;
  if (fake->mark->graph) return 907;  // cudaErrorCapturedEvent
  return fake->mark->done ? kCudaSuccess : kCudaErrorNotReady;
}
API int cudaEventDestroy(Event event) {
  delete static_cast<FakeEvent*>(event);
  return kCudaSuccess;
}
API int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, Stream stream) {
  stream_of(stream)->add([=] { std::memcpy(to, from, bytes); });
  return kCudaSuccess;
}
API int cudaMalloc(void** data, size_t bytes) {
  *data = std::calloc(1, bytes);
  return kCudaSuccess;
}
API int cudaFree(void* data) {
  std::free(data);
  return kCudaSuccess;
}
API int cudaMallocHost(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
API int cudaFreeHost(void* data) { return cudaFree(data); }
API int cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
  std::lock_guard<std::mutex> lock(places_mutex);
  attributes->type = MemoryType::kDevice;
  attributes->device = 0;
  for (const Place& place : places) {
    const auto* at = static_cast<const char*>(pointer);
    if (at < place.begin || at >= place.begin + place.bytes) continue;
    attributes->device = place.device;
    if (place.device < 0) attributes->type = MemoryType::kUnregistered;
  }
  return kCudaSuccess;
}
API int cudaGetLastError() { return kCudaSuccess; }
API const char* cudaGetErrorString(int error) {
  return error == 35    ? "CUDA driver version is insufficient for CUDA runtime version"
         : error == 100 ? "no CUDA-capable device is detected"
                        : "an error of the fake's";
}

// ---- for the tests

API void fake_fault(const char* what, int at, int value) {
  std::lock_guard<std::mutex> lock(faults_mutex);
  faults[what] = {at, value};
}
API void fake_clear_faults() {
  std::lock_guard<std::mutex> lock(faults_mutex);
  faults.clear();
}
API void fake_place(const void* data, size_t bytes, int device) {
  std::lock_guard<std::mutex> lock(places_mutex);
  places.push_back({static_cast<const char*>(data), bytes, device});
}
// All memory is device 0's again: what a test placed was freed, and the next one has it.
API void fake_forget_places() {
  std::lock_guard<std::mutex> lock(places_mutex);
  places.clear();
}
API void* fake_stream() { return new FakeStream; }
// Blocks a stream until the word is not zero.
API void fake_block(void* stream, const int* word) {
  stream_of(stream)->add([word] {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0) pause_a_little();
  });
}
API void fake_synchronize(void* stream) {
  std::atomic<bool> done{false};
  stream_of(stream)->add([&done] { done = true; });
  while (!done) pause_a_little();
}
API void fake_begin_capture(void* stream) {
  FakeStream* fake = stream_of(stream);
  fake->graph = new Graph;
  fake->graph->streams.push_back(fake);
}
API void* fake_end_capture(void* stream) {
  Graph* graph = stream_of(stream)->graph;
  for (FakeStream* joined : graph->streams) joined->graph = nullptr;
  return graph;
}
API void fake_launch_graph(void* graph, void* stream) {
  for (const Job& job : static_cast<Graph*>(graph)->jobs) stream_of(stream)->add(job);
}
