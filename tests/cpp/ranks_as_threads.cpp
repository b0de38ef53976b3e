// Tests of the communication core in which ranks are threads that share one mapping of a segment,
// so that sanitizers see every access of every rank. No torch, no Python, no test framework:
// tests/cpp/run.sh builds and runs it.
//
// The shared part first (checks, threads as ranks, data whose results are exactly predictable),
// then one block per subject; main() lists them.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/algorithms/exchange.h"
#include "../../csrc/algorithms/one_shot.h"
#include "../../csrc/algorithms/ring.h"
#include "../../csrc/algorithms/two_shot.h"
#include "../../csrc/kernels/isa.h"
#include "../../csrc/shm/shm_communicator.h"

namespace {

using namespace pycomm;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<char>;

// ---- checks -------------------------------------------------------------------------------------

std::atomic<int64_t> passed{0}, failed{0};

void check(bool condition, const std::string& what) {
  if (condition) {
    passed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  if (failed.fetch_add(1) >= 20) std::_Exit(1);
}

// What went wrong in `act`: its kind and message, or none.
struct Outcome {
  bool threw = false;
  ErrorKind kind = ErrorKind::kError;
  std::string message = "(nothing was thrown)";
};
Outcome outcome_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return {true, error.kind(), error.what()};
  } catch (const std::exception& error) {
    return {true, ErrorKind::kError, concat("not a pycomm::Error: ", error.what())};
  }
  return {};
}

void check_throws(ErrorKind kind, const std::string& part, const std::string& where,
                  const std::function<void()>& act) {
  const Outcome outcome = outcome_of(act);
  check(outcome.threw && outcome.kind == kind && outcome.message.find(part) != std::string::npos,
        concat(where, ": expected kind ", static_cast<int>(kind), " with '", part, "', got kind ",
               static_cast<int>(outcome.kind), ": ", outcome.message));
}

// ---- threads as ranks ---------------------------------------------------------------------------

constexpr milliseconds kPatient{60000};

std::shared_ptr<Segment> new_segment(int world_size, const ShmConfig& config) {
  int descriptor = -1;
  std::shared_ptr<Segment> segment = Segment::create(world_size, config, &descriptor);
  close(descriptor);
  return segment;
}

ShmConfig small_slots(Choice streaming, int slots = 4) {
  ShmConfig config;
  config.slot_bytes = 4096;
  config.slots = slots;
  config.streaming = streaming;
  // Never with streaming and always without: every grid runs both.
  if (streaming == Choice::kAlways) config.single_copy = Choice::kNever;
  if (streaming == Choice::kNever) config.single_copy = Choice::kAlways;
  return config;
}

void on_threads(int number, const std::function<void(int)>& act) {
  std::vector<std::thread> threads;
  for (int index = 0; index < number; ++index)
    threads.emplace_back([&act, index] {
      const Outcome outcome = outcome_of([&] { act(index); });
      check(!outcome.threw, concat("thread ", index, " threw: ", outcome.message));
    });
  for (std::thread& thread : threads) thread.join();
}

// Runs act(communicator) on every rank of a new group.
void on_ranks(int world_size, const ShmConfig& config, milliseconds timeout,
              const std::function<void(ShmCommunicator&)>& act) {
  const std::shared_ptr<Segment> segment = new_segment(world_size, config);
  on_threads(world_size, [&](int rank) {
    ShmCommunicator communicator(segment, rank, timeout);
    act(communicator);
  });
}

// Opens once, for all who wait: order among ranks that the communicator must not provide.
class Gate {
 public:
  void open() { open_.store(true); }
  void pass() const {
    while (!open_.load()) std::this_thread::sleep_for(milliseconds(1));
  }

 private:
  std::atomic<bool> open_{false};
};

// ---- predictable data ---------------------------------------------------------------------------

constexpr int kPeriod = 13;  // coprime to every chunk and shard, so that a misplaced part shows

// What `rank` contributes at position `at`: small integers, exact in every dtype, whose reductions
// over 8 ranks are too.
int64_t value_of(ReduceOp op, int rank, int64_t at) {
  const int64_t mixed = (at % kPeriod * 5 + rank * 3) % 7;  // 0..6
  if (op == ReduceOp::kProduct) return mixed == 0 && rank < 6 ? 2 : (mixed % 2 ? 1 : -1);
  return mixed - 3;
}

void put(DType dtype, char* to, double value) {
  const auto store = [to](auto typed) { std::memcpy(to, &typed, sizeof typed); };
  switch (dtype) {
    case DType::kInt8:
      return store(static_cast<int8_t>(value));
    case DType::kInt64:
      return store(static_cast<int64_t>(value));
    case DType::kFloat16:
      return store(float_to_half(static_cast<float>(value)));
    case DType::kFloat32:
      return store(static_cast<float>(value));
    case DType::kComplex64:
      return store(std::pair<float, float>(static_cast<float>(value), static_cast<float>(-value)));
    default:
      std::abort();
  }
}

// `count` elements whose value at `at` is value(at % kPeriod).
template <class Value>
Bytes elements(DType dtype, int64_t count, Value&& value) {
  const size_t element = static_cast<size_t>(bytes_of(dtype));
  const size_t total = element * static_cast<size_t>(count);
  Bytes data(std::max(total, element * kPeriod));
  for (int at = 0; at < kPeriod; ++at) put(dtype, data.data() + at * element, value(at));
  for (size_t done = element * kPeriod; done < total; done *= 2)
    std::memcpy(data.data() + done, data.data(), std::min(done, total - done));
  data.resize(total);
  return data;
}

Bytes contribution(DType dtype, ReduceOp op, int rank, int64_t shift, int64_t count) {
  return elements(dtype, count,
                  [&](int at) { return static_cast<double>(value_of(op, rank, at + shift)); });
}

Bytes reduction(DType dtype, ReduceOp op, int world_size, int64_t shift, int64_t count) {
  return elements(dtype, count, [&](int at) -> double {
    int64_t result = value_of(op, 0, at + shift);
    for (int rank = 1; rank < world_size; ++rank) {
      const int64_t next = value_of(op, rank, at + shift);
      if (op == ReduceOp::kMin)
        result = std::min(result, next);
      else if (op == ReduceOp::kMax)
        result = std::max(result, next);
      else if (op == ReduceOp::kProduct)
        result *= next;
      else
        result += next;
    }
    if (op != ReduceOp::kAvg) return static_cast<double>(result);
    if (dtype == DType::kInt8 || dtype == DType::kInt64)
      return static_cast<double>(result / world_size);
    return static_cast<float>(result) / static_cast<float>(world_size);
  });
}

// One call with its buffers and what must come out. The user's memory begins one element off a
// cache line.
struct Call {
  Request request;
  std::string name;
  Bytes input, output, expected;
  size_t input_at = 0, output_at = 0;  // where the tensors begin in the buffers

  void verify(int rank) const {
    check(output.size() - output_at == expected.size() &&
              std::equal(expected.begin(), expected.end(),
                         output.begin() + static_cast<std::ptrdiff_t>(output_at)),
          concat("rank ", rank, ": wrong result of ", name));
  }
};

Bytes shifted(const Bytes& data, size_t by) {
  Bytes moved(by, 0);
  moved.insert(moved.end(), data.begin(), data.end());
  return moved;
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

enum class Form { kSingle, kList, kUneven };

// Elements that rank `from` has for rank `to` in a call that asks for parts of request.count.
// Uneven ones are 0, 1/2, 1 and 3/2 of that.
int64_t part_of(const Request& request, Form form, int from, int to) {
  if (form != Form::kUneven) return request.count;
  if (request.operation == Operation::kAllGather) to = 0;
  if (request.operation == Operation::kReduceScatter) from = 0;
  return request.count * ((2 * from + to) % 4) / 2;
}

template <class Part, class Data>
void cut(std::vector<Part>& parts, Data* data, const std::vector<int64_t>& counts,
         int64_t element) {
  for (const int64_t count : counts) {
    parts.push_back({data, count});
    data += count * element;
  }
}

// `call.request` says what; fills in the buffers of `rank`. The call must not move afterwards.
void prepare(Call& call, int rank, int world_size, Form form, bool in_place) {
  Request& request = call.request;
  const Request asked = request;
  const DType dtype = request.dtype;
  const int root = request.root;
  const size_t off = static_cast<size_t>(bytes_of(dtype));
  call.name = concat(describe(request), form == Form::kList ? " list" : "",
                     form == Form::kUneven ? " uneven" : "", in_place ? " in place" : "", " world ",
                     world_size);
  call.input_at = call.output_at = off;
  const auto part = [&](int from, int to) { return part_of(asked, form, from, to); };
  const auto message = [&](int from, int to, int64_t count) {
    return contribution(dtype, ReduceOp::kSum, from, to, count);
  };
  Bytes input;
  std::vector<int64_t> sends, receives;  // elements, where there are parts
  bool has_output = true;
  switch (request.operation) {
    case Operation::kReduce:
      has_output = rank == root;
      [[fallthrough]];
    case Operation::kAllReduce:
      input = contribution(dtype, request.op, rank, 0, request.count);
      if (has_output) call.expected = reduction(dtype, request.op, world_size, 0, request.count);
      break;
    case Operation::kBroadcast:
      call.expected = message(root, 0, request.count);
      break;
    case Operation::kGather:
      has_output = rank == root;
      [[fallthrough]];
    case Operation::kAllGather:
      request.count = part(rank, root);
      input = message(rank, 0, request.count);
      for (int peer = 0; has_output && peer < world_size; ++peer) {
        receives.push_back(part(peer, root));
        append(call.expected, message(peer, 0, receives.back()));
      }
      break;
    case Operation::kScatter:
      request.count = part(root, rank);
      for (int peer = 0; rank == root && peer < world_size; ++peer) {
        sends.push_back(part(root, peer));
        append(input, message(root, peer, sends.back()));
      }
      call.expected = message(root, rank, request.count);
      break;
    case Operation::kReduceScatter:
      request.count = part(0, rank);
      for (int peer = 0; peer < world_size; ++peer) {
        sends.push_back(part(0, peer));
        append(input, contribution(dtype, request.op, rank, peer, sends.back()));
      }
      call.expected = reduction(dtype, request.op, world_size, rank, request.count);
      break;
    case Operation::kAllToAll:
      request.count = 0;
      for (int peer = 0; peer < world_size; ++peer) {
        sends.push_back(part(rank, peer));
        append(input, message(rank, peer, sends.back()));
        request.count += sends.back();
        receives.push_back(part(peer, rank));
        append(call.expected, message(peer, rank, receives.back()));
      }
      break;
    default:
      break;
  }
  call.input = shifted(input, off);
  call.output = Bytes(off + call.expected.size(), '\x55');
  char* output = call.output.data() + off;
  if (request.operation == Operation::kBroadcast && rank == root)
    std::copy(call.expected.begin(), call.expected.end(), output);
  const bool has_input = request.operation != Operation::kScatter;  // but parts, on the root
  request.input = has_input ? call.input.data() + off : nullptr;
  request.output = has_output ? output : nullptr;
  if (in_place && has_output) {  // all_reduce and reduce only
    std::copy(input.begin(), input.end(), output);
    request.input = output;
  }
  const bool only_lists = request.operation == Operation::kGather ||
                          request.operation == Operation::kScatter ||
                          request.operation == Operation::kAllToAll;
  if (form == Form::kSingle && !only_lists) return;
  const char* sent = call.input.data() + off;
  cut(request.inputs, sent, sends, bytes_of(dtype));
  cut(request.outputs, output, receives, bytes_of(dtype));
}

// ---- the grid: every operation, exact -----------------------------------------------------------

constexpr int64_t kCounts[] = {0, 1, 7, 1000, 5000, 20000};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kInt8, DType::kInt64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};
constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kTwoShot,
                                     Algorithm::kRing};

// Submits calls, some asynchronous with several in flight, and verifies each when it is done.
class Submitter {
 public:
  explicit Submitter(ShmCommunicator& communicator) : communicator_(communicator) {}
  ~Submitter() { finish(0); }

  void submit(const Request& request, Form form = Form::kSingle) {
    const uint64_t number = submitted_++;
    auto call = std::make_unique<Call>();
    call->request = request;
    const bool reduces_whole =
        request.operation == Operation::kAllReduce || request.operation == Operation::kReduce;
    prepare(*call, communicator_.rank(), communicator_.world_size(), form,
            reduces_whole && number % 2 == 0);
    const bool async = number % 5 != 0;
    std::shared_ptr<Pending> pending = communicator_.submit(call->request, async, nullptr);
    check((pending != nullptr) == async, "submit returns a Pending for asynchronous calls only");
    if (pending)
      in_flight_.push_back({std::move(pending), std::move(call)});
    else
      call->verify(communicator_.rank());
    finish(4);
  }

 private:
  struct InFlight {
    std::shared_ptr<Pending> pending;
    std::unique_ptr<Call> call;
  };
  void finish(size_t leave) {
    for (; in_flight_.size() > leave; in_flight_.pop_front()) {
      const InFlight& oldest = in_flight_.front();
      oldest.pending->wait(milliseconds(0));
      const Outcome outcome = outcome_of([&] {
        if (auto exception = oldest.pending->exception()) std::rethrow_exception(exception);
      });
      check(!outcome.threw, concat(oldest.call->name, ": ", outcome.message));
      if (!outcome.threw) oldest.call->verify(communicator_.rank());
    }
  }

  ShmCommunicator& communicator_;
  std::deque<InFlight> in_flight_;
  uint64_t submitted_ = 0;
};

Request request_of(Operation operation, DType dtype, int64_t count, ReduceOp op = ReduceOp::kSum) {
  Request request;
  request.operation = operation;
  request.dtype = dtype;
  request.count = count;
  request.op = op;
  return request;
}

void grid_on_rank(ShmCommunicator& communicator) {
  Submitter submitter(communicator);
  for (const DType dtype : kDTypes)
    for (const int64_t count : kCounts) {
      for (const ReduceOp op : kOps) {
        Request request = request_of(Operation::kAllReduce, dtype, count, op);
        for (const Algorithm algorithm : kAlgorithms) {
          request.algorithm = algorithm;
          submitter.submit(request);
        }
        for (const Form form : {Form::kSingle, Form::kList, Form::kUneven})
          submitter.submit(request_of(Operation::kReduceScatter, dtype, count, op), form);
        Request request_to = request_of(Operation::kReduce, dtype, count, op);
        request_to.root = static_cast<int>(count) % communicator.world_size();
        submitter.submit(request_to);
      }
      for (int root = 0; root < communicator.world_size(); ++root) {
        Request request = request_of(Operation::kBroadcast, dtype, count);
        request.root = root;
        submitter.submit(request);
      }
      for (const Form form : {Form::kSingle, Form::kList, Form::kUneven})
        submitter.submit(request_of(Operation::kAllGather, dtype, count), form);
      submitter.submit(Request{});
    }
}

// What only moves data, of which the types differ by their width alone.
void moves_on_rank(ShmCommunicator& communicator) {
  Submitter submitter(communicator);
  for (const DType dtype : {DType::kInt8, DType::kFloat16, DType::kComplex64})
    for (const int64_t count : kCounts)
      for (const Form form : {Form::kList, Form::kUneven}) {
        for (const Operation operation : {Operation::kGather, Operation::kScatter})
          for (int root = 0; root < communicator.world_size(); ++root) {
            Request request = request_of(operation, dtype, count);
            request.root = root;
            submitter.submit(request, form);
          }
        submitter.submit(request_of(Operation::kAllToAll, dtype, count), form);
        submitter.submit(request_of(Operation::kAllGather, dtype, count), form);
        submitter.submit(request_of(Operation::kMonitoredBarrier, dtype, 0));
      }
}

void grid() {
  for (const int world_size : {1, 2, 3, 4, 8})
    for (const Choice streaming : {Choice::kAlways, Choice::kNever})
      on_ranks(world_size, small_slots(streaming), kPatient, grid_on_rank);
}

void moves() {
  for (const int world_size : {1, 2, 3, 5})
    for (const Choice streaming : {Choice::kAlways, Choice::kNever})
      on_ranks(world_size, small_slots(streaming), kPatient, moves_on_rank);
}

// ---- damaged headers ----------------------------------------------------------------------------

// Whatever a rank's header says, the others read no memory but theirs and the segment's: an error,
// or an operation that ends on all ranks. Fields that nobody can check (a factor, the address of
// private memory) may change the result.
void damaged_headers() {
  const std::vector<Operation> operations = {
      Operation::kAllReduce, Operation::kBroadcast,     Operation::kAllGather,
      Operation::kGather,    Operation::kScatter,       Operation::kAllToAll,
      Operation::kReduce,    Operation::kReduceScatter, Operation::kBarrier};
  for (int seed = 0; seed < 400; ++seed) {
    const Operation operation = operations[seed % operations.size()];
    const int64_t count = seed % 3 == 0 ? 5 : 9000;
    std::atomic<int> threw{0};
    test_fault() = {TestFault::Kind::kCorrupt, seed % 2, 2, TestFault::kAtEntry, seed};
    on_ranks(2, small_slots(Choice::kNever), kPatient, [&](ShmCommunicator& communicator) {
      Submitter submitter(communicator);
      try {
        submitter.submit(request_of(operation, DType::kFloat32, count));
      } catch (const Error&) {
        ++threw;
      }
    });
    check(threw == 0 || threw == 2, concat("damaged header ", seed, ": ", threw, " of 2 noticed"));
  }
  test_fault() = {};
}

// Every instruction set that this machine has, on fewer cases.
void instruction_sets() {
  const std::string before = instruction_set();
  for (const char* name : {"generic", "avx2", "avx512"}) {
    if (!set_instruction_set(name)) continue;
    for (const Choice streaming : {Choice::kAlways, Choice::kNever})
      on_ranks(3, small_slots(streaming), kPatient, [](ShmCommunicator& communicator) {
        Submitter submitter(communicator);
        for (const DType dtype : kDTypes)
          for (const ReduceOp op : kOps)
            for (const Algorithm algorithm : kAlgorithms) {
              Request request = request_of(Operation::kAllReduce, dtype, 5003, op);
              request.algorithm = algorithm;
              submitter.submit(request);
            }
      });
  }
  set_instruction_set(before.c_str());
}

// ---- compressed all_reduce ----------------------------------------------------------------------

struct CompressedCase {
  Codec codec;
  DType dtype;
  int64_t count;
  Algorithm algorithm;
  bool stochastic;
  std::string name() const {
    return concat("compressed all_reduce ", name_of(codec.format), ":", codec.block, " of ", count,
                  " ", name_of(dtype), ", ", name_of(algorithm), stochastic ? ", by chance" : "");
  }
};

std::vector<CompressedCase> compressed_cases() {
  const std::vector<Codec> codecs = {{WireFormat::kFloat32, 0},     {WireFormat::kFloat16, 0},
                                     {WireFormat::kFloat16, 64},    {WireFormat::kBFloat16, 0},
                                     {WireFormat::kFloat8E4M3, 64}, {WireFormat::kFloat8E5M2, 128},
                                     {WireFormat::kInt8, 256}};
  std::vector<CompressedCase> cases;
  for (const Codec& codec : codecs)
    for (const DType dtype : {DType::kFloat32, DType::kFloat16})
      for (const int64_t count : {0, 1, 63, 64, 65, 1000, 5003, 20011})
        for (const Algorithm algorithm : kAlgorithms)
          cases.push_back({codec, dtype, count, algorithm, count % 4 == 1});
  return cases;
}

// The bytes of a list of three tensors, of which the last two begin anywhere.
struct CompressedCall {
  std::vector<Bytes> tensors;
  std::vector<float> residual;

  CompressedCall(const CompressedCase& the, int rank) : residual(the.count, 0.0f) {
    const size_t element = static_cast<size_t>(bytes_of(the.dtype));
    const Bytes all = contribution(the.dtype, ReduceOp::kSum, rank, 0, the.count);
    const int64_t third = the.count / 3;
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
             {0, third}, {third, third + the.count % 3}, {third + the.count % 3, the.count}})
      tensors.emplace_back(all.begin() + begin * element, all.begin() + end * element);
  }
  Request request(const CompressedCase& the) {
    auto compression = std::make_shared<Compression>();
    compression->codec = the.codec;
    compression->residual = residual.data();
    compression->stochastic = the.stochastic;
    compression->seed = 7;
    const int64_t element = bytes_of(the.dtype);
    for (Bytes& tensor : tensors)
      compression->tensors.push_back(
          {tensor.data(), static_cast<int64_t>(tensor.size()) / element, the.dtype});
    Request request = request_of(Operation::kAllReduce, the.dtype, the.count);
    request.algorithm = the.algorithm;
    request.compression = std::move(compression);
    return request;
  }
  Bytes result() const {
    Bytes all;
    for (const Bytes& tensor : tensors) append(all, tensor);
    return all;
  }
};

float float_at(const Bytes& data, DType dtype, int64_t at) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, data.data() + 4 * at, sizeof value);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, data.data() + 2 * at, sizeof half);
  return half_to_float(half);
}

// All ranks have the same bits; what arrived and what is kept is what came in, and small integers
// arrive as they are where the format has them.
void check_compressed(const CompressedCase& the, const std::vector<CompressedCall>& calls) {
  const int world_size = static_cast<int>(calls.size());
  const Bytes result = calls[0].result();
  for (const CompressedCall& call : calls)
    check(call.result() == result, concat("ranks differ after ", the.name()));
  const Bytes exact = reduction(the.dtype, ReduceOp::kSum, world_size, 0, the.count);
  if (the.codec.value_bytes() > 1)
    check(result == exact, concat("wrong result of ", the.name(), " world ", world_size));
  bool conserved = true;
  for (int64_t at = 0; at < the.count; ++at) {
    float total = float_at(result, the.dtype, at);
    for (const CompressedCall& call : calls) total += call.residual[static_cast<size_t>(at)];
    // What a result of float16 rounds off is kept by nobody.
    const float rounding = the.dtype == DType::kFloat16 ? 0.02f : 1e-5f;
    conserved &= std::abs(total - float_at(exact, the.dtype, at)) <= rounding;
  }
  check(conserved, concat("something got lost in ", the.name(), " world ", world_size));
}

void compressed() {
  const std::vector<CompressedCase> cases = compressed_cases();
  for (const int world_size : {1, 2, 3, 4})
    for (const Choice streaming : {Choice::kAlways, Choice::kNever}) {
      std::vector<std::vector<CompressedCall>> calls(cases.size());
      for (size_t i = 0; i < cases.size(); ++i)
        for (int rank = 0; rank < world_size; ++rank) calls[i].emplace_back(cases[i], rank);
      on_ranks(world_size, small_slots(streaming), kPatient, [&](ShmCommunicator& communicator) {
        for (size_t i = 0; i < cases.size(); ++i)
          communicator.run(calls[i][static_cast<size_t>(communicator.rank())].request(cases[i]));
      });
      for (size_t i = 0; i < cases.size(); ++i) check_compressed(cases[i], calls[i]);
    }
}

// Memory that only barriers order.
void barrier_orders_plain_memory() {
  constexpr int kRanks = 4, kRounds = 200;
  std::vector<int> written(kRanks, 0);  // plain: the barriers are all that orders it
  on_ranks(kRanks, small_slots(Choice::kNever), kPatient, [&](ShmCommunicator& communicator) {
    for (int round = 1; round <= kRounds; ++round) {
      written[static_cast<size_t>(communicator.rank())] = round;
      communicator.run(Request{});
      for (const int value : written) check(value == round, "a barrier lets nobody through early");
      communicator.run(Request{});
    }
  });
}

void automatic_streaming_and_latency() {
  for (const int world_size : {1, 2, 3}) {
    on_ranks(world_size, small_slots(Choice::kAuto), kPatient, [](ShmCommunicator& communicator) {
      const double first = communicator.flag_latency_ns();
      Submitter submitter(communicator);
      for (int turn = 0; turn < 1100; ++turn)  // past two of the periodic measurements
        submitter.submit(request_of(Operation::kAllGather, DType::kInt64, 2100));
      check(first >= 0 && communicator.flag_latency_ns() >= 0, "flag latency is a time");
      check(communicator.tally().operations > 0, "operations are counted");
    });
  }
}

// ---- several communicators at once --------------------------------------------------------------

void several_communicators() {
  constexpr int kRanks = 3, kGroups = 4, kTurns = 30;
  std::vector<std::shared_ptr<Segment>> segments;
  for (int group = 0; group < kGroups; ++group)
    segments.push_back(
        new_segment(kRanks, small_slots(group % 2 ? Choice::kAlways : Choice::kNever)));
  on_threads(kRanks, [&](int rank) {
    std::vector<std::unique_ptr<ShmCommunicator>> communicators;
    for (const auto& segment : segments)
      communicators.push_back(std::make_unique<ShmCommunicator>(segment, rank, kPatient));
    // Asynchronously, each rank in another order of groups: their workers must not wait for each
    // other.
    for (int turn = 0; turn < kTurns; ++turn) {
      std::vector<std::unique_ptr<Call>> calls;
      std::vector<std::shared_ptr<Pending>> pending;
      for (int step = 0; step < kGroups; ++step) {
        const int group = (rank + step) % kGroups;
        calls.push_back(std::make_unique<Call>());
        calls.back()->request = request_of(Operation::kAllReduce, DType::kFloat32, 3000 + group);
        prepare(*calls.back(), rank, kRanks, Form::kSingle, false);
        pending.push_back(communicators[static_cast<size_t>(group)]->submit(calls.back()->request,
                                                                            true, nullptr));
      }
      for (size_t index = 0; index < calls.size(); ++index) {
        pending[index]->wait(milliseconds(0));
        check(!pending[index]->exception(), "an operation of one group of several failed");
        calls[index]->verify(rank);
      }
    }
    // Synchronously, one thread for each group.
    on_threads(kGroups, [&](int group) {
      Submitter submitter(*communicators[static_cast<size_t>(group)]);
      for (int turn = 0; turn < kTurns; ++turn)
        submitter.submit(request_of(Operation::kReduceScatter, DType::kFloat16, 1500 + group));
    });
  });
}

void callbacks_and_keep_alive() {
  on_ranks(2, small_slots(Choice::kNever), kPatient, [](ShmCommunicator& communicator) {
    auto owner = std::make_shared<int>(0);
    std::atomic<int> called{0};
    std::vector<std::shared_ptr<Pending>> pending;
    for (int turn = 0; turn < 20; ++turn) {
      pending.push_back(communicator.submit(Request{}, true, owner));
      pending.back()->on_done(
          [&](std::exception_ptr exception) { called += exception ? 1000 : 1; });
    }
    communicator.run(Request{});  // behind all of them
    check(called == 20, "callbacks run before what is queued behind their operations");
    check(owner.use_count() == 1, "what operations kept alive is dropped when they are done");
    for (const auto& each : pending) {
      check(each->is_done() && each->wait(milliseconds(1)), "operations are done in order");
      each->on_done([&](std::exception_ptr) { ++called; });
    }
    check(called == 40, "a callback of a finished operation runs at once");
  });
}

// ---- errors -------------------------------------------------------------------------------------

// One rank makes another call than the rest, in every way that a call can differ.
void mismatches() {
  using Change = std::pair<const char*, std::function<void(Request&)>>;
  const std::vector<Change> changes = {
      {"count", [](Request& request) { request.count = 2999; }},
      {"dtype", [](Request& request) { request.dtype = DType::kInt32; }},
      {"op", [](Request& request) { request.op = ReduceOp::kMax; }},
      {"algorithm", [](Request& request) { request.algorithm = Algorithm::kRing; }},
      {"root", [](Request& request) { request.root = 1; }},
      {"operation", [](Request& request) { request.operation = Operation::kBroadcast; }},
      {"barrier", [](Request& request) { request = Request{}; }},
  };
  for (int turn = 0; turn < 4; ++turn)
    for (const Change& change : changes)
      for (const bool async : {false, true}) {
        // A rank that has not seen the barrier's end yet would be told of the mismatch there.
        std::atomic<int> past_barrier{0};
        on_ranks(4, small_slots(Choice::kNever), kPatient, [&](ShmCommunicator& communicator) {
          std::vector<float> input(3000, 1), output(3000);
          communicator.run(Request{});
          ++past_barrier;
          while (past_barrier != 4) std::this_thread::yield();
          Request request = request_of(Operation::kAllReduce, DType::kFloat32, 3000);
          request.input = input.data();
          request.output = output.data();
          if (communicator.rank() == turn) change.second(request);
          const std::string where = concat("mismatch of ", change.first);
          check_throws(ErrorKind::kMismatch, "disagree", where, [&] {
            const auto pending = communicator.submit(request, async, nullptr);
            if (!pending) return;
            pending->wait(milliseconds(0));
            if (auto exception = pending->exception()) std::rethrow_exception(exception);
          });
          check_throws(ErrorKind::kAborted, "ended before", where + ", the call after",
                       [&] { communicator.run(Request{}); });
        });
      }
}

// One rank has or expects another count than its peer; everybody notices, whoever the two are.
void part_mismatches() {
  for (const Operation operation : {Operation::kGather, Operation::kScatter, Operation::kAllToAll,
                                    Operation::kAllGather, Operation::kReduceScatter})
    for (const int64_t count : {100, 20000})
      for (int odd = 0; odd < 3; ++odd)
        on_ranks(3, small_slots(Choice::kNever), kPatient, [&](ShmCommunicator& communicator) {
          const int rank = communicator.rank();
          Call call;
          call.request = request_of(operation, DType::kFloat32, count);
          call.request.root = 1;
          prepare(call, rank, 3, Form::kUneven, false);
          std::vector<float> longer(100000);  // what the odd rank sends or receives instead
          if (rank == odd) {
            Request& request = call.request;
            const int peer = (rank + 1) % 3;
            if (!request.inputs.empty())
              request.inputs[static_cast<size_t>(peer)] = {longer.data(), 55555};
            else if (!request.outputs.empty())
              request.outputs[static_cast<size_t>(peer)] = {longer.data(), 55555};
            else
              request.input = request.output = longer.data(), request.count = 55555;
            if (operation == Operation::kGather && rank != 1) request.output = nullptr;
            if (operation == Operation::kScatter && rank != 1) request.input = nullptr;
          }
          const std::string where = concat("parts of ", name_of(operation), ", rank ", odd);
          check_throws(ErrorKind::kMismatch, "disagree", where,
                       [&] { communicator.run(call.request); });
          check_throws(ErrorKind::kAborted, "ended before", where + ", the call after",
                       [&] { communicator.run(Request{}); });
        });
}

void monitored_barriers() {
  for (const bool all : {false, true}) {
    Gate late;
    std::atomic<int> gave_up{0};
    const std::shared_ptr<Segment> segment = new_segment(4, small_slots(Choice::kNever));
    on_threads(4, [&](int rank) {
      ShmCommunicator communicator(segment, rank, kPatient);
      Request request;
      request.operation = Operation::kMonitoredBarrier;
      request.wait_all_ranks = all;
      for (int turn = 0; turn < 50; ++turn) communicator.run(request);
      request.timeout = milliseconds(200);
      if (rank == 1 || rank == 3) {
        late.pass();
        check(outcome_of([&] { communicator.run(request); }).threw, "a late rank gets an error");
        return;
      }
      check_throws(ErrorKind::kTimeout, all ? "Ranks 1, 3 failed" : "Rank 1 failed",
                   "a monitored barrier", [&] { communicator.run(request); });
      if (++gave_up == 2) late.open();
    });
  }
}

void timeouts() {
  for (const bool per_request : {false, true}) {
    Gate late;
    std::atomic<int> gave_up{0};
    const milliseconds whole = per_request ? kPatient : milliseconds(200);
    const std::shared_ptr<Segment> segment = new_segment(3, small_slots(Choice::kNever));
    on_threads(3, [&](int rank) {
      ShmCommunicator communicator(segment, rank, kPatient);
      communicator.set_timeout(whole);
      std::vector<float> data(20000, 1);
      Request request = request_of(Operation::kAllReduce, DType::kFloat32, 20000);
      request.input = request.output = data.data();
      if (per_request) request.timeout = milliseconds(200);
      if (rank == 2) late.pass();
      const auto began = Clock::now();
      check_throws(ErrorKind::kTimeout, "not yet: 2", "a rank that does not come",
                   [&] { communicator.run(request); });
      check(Clock::now() - began < milliseconds(20000), "a timeout comes in time");
      check_throws(ErrorKind::kAborted, "ended before", "the call after a timeout",
                   [&] { communicator.run(request); });
      if (++gave_up == 2) late.open();
    });
  }
}

void aborts() {
  for (const bool from_waiting_rank : {false, true}) {
    Gate done;
    const std::shared_ptr<Segment> segment = new_segment(4, small_slots(Choice::kNever));
    std::atomic<int> ended{0};
    on_threads(4, [&](int rank) {
      ShmCommunicator communicator(segment, rank, kPatient);
      std::thread aborter;
      if (rank == (from_waiting_rank ? 1 : 3))
        aborter = std::thread([&] {
          std::this_thread::sleep_for(milliseconds(80));
          communicator.abort("because of a test");
        });
      if (rank == 3) done.pass();
      check_throws(ErrorKind::kAborted, "because of a test", "abort",
                   [&] { communicator.run(Request{}); });
      if (++ended == 3) done.open();
      if (aborter.joinable()) aborter.join();
      check_throws(ErrorKind::kAborted, "", "after an abort", [&] { communicator.run(Request{}); });
    });
  }
  // In the middle of chunked operations, at any point of them.
  for (int turn = 0; turn < 20; ++turn)
    on_ranks(3, small_slots(turn % 2 ? Choice::kAlways : Choice::kNever), kPatient,
             [&](ShmCommunicator& communicator) {
               std::vector<float> input(200000, 1), output(200000);
               Request request = request_of(Operation::kAllReduce, DType::kFloat32, 200000);
               request.algorithm = kAlgorithms[1 + turn % 3];
               request.input = input.data();
               request.output = output.data();
               std::vector<std::shared_ptr<Pending>> pending;
               for (int call = 0; call < 3; ++call)
                 pending.push_back(communicator.submit(request, true, nullptr));
               if (communicator.rank() == turn % 3) {
                 std::this_thread::sleep_for(std::chrono::microseconds(100 * turn));
                 communicator.abort("in the middle");
               }
               for (const auto& each : pending) {
                 each->wait(milliseconds(0));
                 if (auto exception = each->exception())
                   check_throws(ErrorKind::kAborted, "in the middle", "abort of chunks",
                                [&] { std::rethrow_exception(exception); });
               }
               check_throws(ErrorKind::kAborted, "in the middle", "call after an abort of chunks",
                            [&] { communicator.run(Request{}); });
             });
}

void departures() {
  // While others wait for it.
  for (const int leaver : {0, 1, 2}) {
    Gate waiting;
    const std::shared_ptr<Segment> segment = new_segment(3, small_slots(Choice::kNever));
    on_threads(3, [&](int rank) {
      ShmCommunicator communicator(segment, rank, kPatient);
      if (rank == leaver) {
        waiting.pass();
        std::this_thread::sleep_for(milliseconds(60));
        check_throws(ErrorKind::kMismatch, "called another: barrier()", "leaving while others wait",
                     [&] { communicator.shutdown(); });
        return;
      }
      waiting.open();
      check_throws(ErrorKind::kMismatch, concat("waits for rank ", leaver), "a rank that left",
                   [&] { communicator.run(Request{}); });
      check_throws(ErrorKind::kAborted, "ended before", "the call after a departure",
                   [&] { communicator.run(Request{}); });
    });
  }
  // In good order: what is queued is finished, even when some ranks leave early.
  for (int turn = 0; turn < 10; ++turn)
    on_ranks(3, small_slots(Choice::kNever), kPatient, [](ShmCommunicator& communicator) {
      std::vector<std::unique_ptr<Call>> calls;
      std::vector<std::shared_ptr<Pending>> pending;
      for (const Algorithm algorithm : kAlgorithms) {
        calls.push_back(std::make_unique<Call>());
        calls.back()->request = request_of(Operation::kAllReduce, DType::kFloat32, 9000);
        calls.back()->request.algorithm = algorithm;
        prepare(*calls.back(), communicator.rank(), 3, Form::kSingle, true);
        pending.push_back(communicator.submit(calls.back()->request, true, nullptr));
      }
      communicator.shutdown();
      for (size_t index = 0; index < calls.size(); ++index) {
        check(pending[index]->is_done() && !pending[index]->exception(),
              "shutdown finishes what is queued");
        calls[index]->verify(communicator.rank());
      }
      check_throws(ErrorKind::kAborted, "shut down", "asynchronous call after shutdown",
                   [&] { communicator.submit(Request{}, true, nullptr); });
      check_throws(ErrorKind::kAborted, "shut down", "synchronous call after shutdown",
                   [&] { communicator.run(Request{}); });
    });
  // Destruction does not finish it: an operation that waits for a peer ends.
  Gate gone;
  const std::shared_ptr<Segment> segment = new_segment(2, small_slots(Choice::kNever));
  on_threads(2, [&](int rank) {
    auto communicator = std::make_unique<ShmCommunicator>(segment, rank, kPatient);
    if (rank == 1) {
      gone.pass();
      check_throws(ErrorKind::kAborted, "destroyed", "a call after a peer was destroyed at work",
                   [&] { communicator->run(Request{}); });
      return;
    }
    const auto pending = communicator->submit(Request{}, true, nullptr);
    std::this_thread::sleep_for(milliseconds(60));
    communicator.reset();
    check_throws(ErrorKind::kAborted, "destroyed", "an operation of a destroyed communicator",
                 [&] { std::rethrow_exception(pending->exception()); });
    gone.open();
  });
}

void interrupts() {
  std::atomic<bool> pressed{false};
  set_interrupt_check([&] {
    if (pressed) throw std::runtime_error("Ctrl-C");
  });
  Gate gone;
  const std::shared_ptr<Segment> segment = new_segment(2, small_slots(Choice::kNever));
  on_threads(2, [&](int rank) {
    ShmCommunicator communicator(segment, rank, kPatient);
    if (rank == 1) {
      gone.pass();
      check_throws(ErrorKind::kAborted, "was interrupted", "a call after a peer's interrupt",
                   [&] { communicator.run(Request{}); });
      return;
    }
    std::thread user([&] {
      std::this_thread::sleep_for(milliseconds(60));
      pressed = true;
    });
    const Outcome outcome = outcome_of([&] { communicator.run(Request{}); });
    check(outcome.threw && outcome.message.find("Ctrl-C") != std::string::npos,
          "an interrupt ends a wait with its own exception: " + outcome.message);
    user.join();
    gone.open();
  });
  set_interrupt_check(nullptr);
}

void invalid_arguments() {
  on_ranks(2, small_slots(Choice::kNever), kPatient, [](ShmCommunicator& communicator) {
    std::vector<float> data(64, 1);
    const auto refuse = [&](const char* part, const std::function<void(Request&)>& change) {
      Request request = request_of(Operation::kAllReduce, DType::kFloat32, 8);
      request.input = request.output = data.data();
      change(request);
      check_throws(ErrorKind::kInvalidArgument, part, "invalid argument",
                   [&] { communicator.run(request); });
    };
    refuse("negative", [](Request& request) { request.count = -1; });
    refuse("not defined", [](Request& request) {
      request.dtype = DType::kBool;
      request.op = ReduceOp::kAvg;
    });
    refuse("root", [](Request& request) { request.root = 2; });
    refuse("root", [](Request& request) { request.root = -1; });
    refuse("timeout", [](Request& request) { request.timeout = milliseconds(-1); });
    refuse("one per rank", [](Request& request) {
      request.operation = Operation::kReduceScatter;
      request.inputs.resize(3);
    });
    for (const Operation operation : {Operation::kGather, Operation::kScatter})
      refuse("one per rank", [&](Request& request) {
        request.operation = operation;
        request.root = communicator.rank();
      });
    for (const Operation operation : {Operation::kGather, Operation::kScatter})
      refuse("not the root", [&](Request& request) {
        request.operation = operation;
        request.root = 1 - communicator.rank();
        request.inputs.resize(2);
        request.outputs.resize(2);
      });
    refuse("own part", [&](Request& request) {
      request.operation = Operation::kAllToAll;
      request.inputs = {{data.data(), 4}, {data.data() + 4, 4}};
      request.outputs = {{data.data() + 16, 5}, {data.data() + 32, 5}};
    });
    refuse("a part has -", [&](Request& request) {
      request.operation = Operation::kAllToAll;
      for (int peer = 0; peer < 2; ++peer) {
        const int64_t count = peer == communicator.rank() ? 4 : -1;
        request.inputs.push_back({data.data() + 8 * peer, count});
        request.outputs.push_back({data.data() + 16 + 8 * peer, count});
      }
    });
    refuse("only all_reduce", [](Request& request) {
      request.operation = Operation::kReduce;
      request.algorithm = Algorithm::kRing;
    });
    refuse("overlap", [&](Request& request) {
      request.operation = Operation::kAllToAll;
      request.inputs = {{data.data(), 8}, {data.data() + 8, 8}};
      request.outputs = {{data.data() + 8, 8}, {data.data(), 8}};
    });
    refuse("overlap", [&](Request& request) {
      request.operation = Operation::kAllGather;
      request.input = data.data() + 4;
    });
    refuse("overlap", [&](Request& request) {
      request.operation = Operation::kAllGather;
      request.input = data.data() + 32;
      request.outputs = {{data.data(), 8}, {data.data() + 4, 8}};
    });
    communicator.run(Request{});  // nothing of this ended the group
    check(communicator.tally().operations == 1, "refused calls are no operations");
  });
  ShmConfig config;
  for (const int slots : {0, 2, 6, 2048}) {
    config = small_slots(Choice::kNever, slots);
    check_throws(ErrorKind::kInvalidArgument, "power of two", "slots",
                 [&] { new_segment(2, config); });
  }
  config = small_slots(Choice::kNever);
  config.slot_bytes = 5000;
  check_throws(ErrorKind::kInvalidArgument, "multiple", "slot_bytes",
               [&] { new_segment(2, config); });
  for (const int world_size : {0, kMaxRanks + 1})
    check_throws(ErrorKind::kInvalidArgument, "ranks", "world size",
                 [&] { new_segment(world_size, small_slots(Choice::kNever)); });
}

// ---- counters that wrap -------------------------------------------------------------------------

class Deadline : public Watch {
 public:
  uint32_t operation_number() const override { return 0; }
  void meet() override {}
  bool check_wait(int peer, bool) const override {
    PYCOMM_CHECK(Clock::now() < end_, kTimeout, "slots: waited too long for rank ", peer);
    return true;
  }
  [[noreturn]] void lost_peer(int) const override { std::abort(); }

 private:
  Clock::time_point end_ = Clock::now() + milliseconds(20000);
};

struct ConstPart {
  const char* data;
  int64_t count;
};
struct Part {
  char* data;
  int64_t count;
};

// Every algorithm over slots whose chunk counter passes 2^32 (or 2^31) in the middle of an
// operation.
void algorithms_on_rank(ShmSlots& slots, bool stream) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const DType dtype = DType::kFloat32;
  const int64_t count = 20011;
  const Math math(dtype, ReduceOp::kSum, world_size, stream);
  const Bytes input = contribution(dtype, ReduceOp::kSum, rank, 0, count);
  const Bytes sum = reduction(dtype, ReduceOp::kSum, world_size, 0, count);
  const auto all_reduce = [&](const char* name, auto&& algorithm) {
    Bytes output(input.size());
    slots.advance(algorithm(slots, math, input.data(), output.data(), count));
    check(output == sum, concat(name, " over counters that wrap"));
  };
  for (int turn = 0; turn < 2; ++turn) {
    all_reduce("one_shot", [](auto&&... arguments) { return one_shot_all_reduce(arguments...); });
    all_reduce("two_shot", [](auto&&... arguments) { return two_shot_all_reduce(arguments...); });
    all_reduce("ring", [](auto&&... arguments) { return ring_all_reduce(arguments...); });

    Bytes data = rank == 1 ? input : Bytes(input.size());
    slots.advance(one_shot_gather(
        slots, math, data.data(), [&](int peer) { return peer == 1 ? count : 0; },
        [&](int peer) { return peer == 1 && rank != 1 ? data.data() : nullptr; }));
    check(data == contribution(dtype, ReduceOp::kSum, 1, 0, count), "broadcast, counters wrap");

    Bytes all(input.size() * static_cast<size_t>(world_size)), expected;
    const auto output_of = [&](int peer) { return all.data() + peer * input.size(); };
    slots.advance(
        one_shot_gather(slots, math, input.data(), [&](int) { return count; }, output_of));
    for (int peer = 0; peer < world_size; ++peer)
      append(expected, contribution(dtype, ReduceOp::kSum, peer, 0, count));
    check(all == expected, "all_gather, counters wrap");

    Bytes part(input.size());
    const auto input_of = [&](int) { return ConstPart{input.data(), count}; };
    slots.advance(two_shot_reduce_scatter(slots, math, input_of, part.data()));
    check(part == sum, "reduce_scatter, counters wrap");

    std::fill(all.begin(), all.end(), '\0');
    std::copy(input.begin(), input.end(), output_of(rank));
    slots.advance(exchange(
        slots, math, [&](int peer) { return ConstPart{input.data(), peer == rank ? 0 : count}; },
        [&](int peer) { return Part{output_of(peer), peer == rank ? 0 : count}; }, count));
    check(all == expected, "exchange, counters wrap");
  }
}

void counters_wrap() {
  for (const uint32_t start : {0x7ffffff0u, 0xfffffff0u, 0xffffffc0u, 0xffffff80u, 0u})
    for (const int world_size : {2, 4}) {
      const auto segment = new_segment(world_size, small_slots(Choice::kNever, 8));
      for (int rank = 0; rank < world_size; ++rank)
        for (Flag& stage : segment->area(rank).stages) stage.value = start;
      Deadline deadline;
      on_threads(world_size, [&](int rank) {
        ShmSlots slots(*segment, rank, Patience{50, 200}, deadline);
        slots.advance(start);
        algorithms_on_rank(slots, start % 0x100 != 0xf0);
      });
    }
}

// A stage that no operation used for 2^31 chunks must not seem to lie ahead.
void unused_stages_stay_behind() {
  const auto segment = new_segment(2, small_slots(Choice::kNever));
  Deadline deadline;
  for (int rank = 0; rank < 2; ++rank) {
    ShmSlots slots(*segment, rank, Patience{50, 200}, deadline);
    for (int part = 0; part < 3; ++part) slots.advance(1 << 30);
    for (const Flag& stage : segment->area(rank).stages)
      check(!reached(stage.value, 3u * (1u << 30) + 1), "an unused stage seems to be finished");
  }
}

// ---- messages -----------------------------------------------------------------------------------

ShmConfig small_rings() {
  ShmConfig config = small_slots(Choice::kNever);
  config.channel_bytes = 4096;
  return config;
}

Message message_of(Operation operation, int peer, int32_t tag, Bytes& data) {
  Message message;
  message.operation = operation;
  message.dtype = DType::kUInt8;
  message.peer = peer;
  message.tag = tag;
  message.count = static_cast<int64_t>(data.size());
  message.data = data.data();
  return message;
}

void finish(const std::shared_ptr<Pending>& pending) {
  if (!pending) return;
  pending->wait(milliseconds(0));
  if (auto exception = pending->exception()) std::rethrow_exception(exception);
}

Bytes letter(size_t bytes, int seed) {
  Bytes data(bytes);
  for (size_t at = 0; at < bytes; ++at) data[at] = static_cast<char>(at * 7 + seed * 31);
  return data;
}

void messages_ping_pong() {
  on_ranks(2, small_rings(), kPatient, [](ShmCommunicator& communicator) {
    const int rank = communicator.rank();
    for (int turn = 0; turn < 300; ++turn) {
      const size_t bytes = static_cast<size_t>(turn * turn % 9001);
      Bytes data = letter(bytes, turn), got(bytes);
      const auto act = [&](bool sends) {
        const Operation operation = sends ? Operation::kSend : Operation::kRecv;
        finish(communicator.post(message_of(operation, 1 - rank, 0, sends ? data : got), nullptr));
      };
      act(rank == 0);
      act(rank == 1);
      check(got == data, concat("ping-pong ", turn));
    }
  });
}

// A step of a small generator, the same on all ranks.
uint32_t next_random(uint32_t& state) { return state = state * 1664525 + 1013904223; }

// Every rank posts its part of the same random list of messages, receives before or after sends,
// and waits for all in another order. Of one sender and tag they must arrive in order.
void messages_random() {
  struct Letter {
    int from, to;
    int32_t tag;
    size_t bytes;
  };
  for (uint32_t seed = 1; seed <= 6; ++seed)
    on_ranks(3, small_rings(), kPatient, [seed](ShmCommunicator& communicator) {
      uint32_t state = seed;
      const auto random = [&state](uint32_t below) { return (next_random(state) >> 8) % below; };
      std::deque<Bytes> sent, got, expected;
      std::vector<std::shared_ptr<Pending>> pending;
      std::vector<int> sources;
      for (int number = 0; number < 200; ++number) {
        const Letter letter{static_cast<int>(random(3)), static_cast<int>(random(3)),
                            static_cast<int32_t>(random(3)),
                            random(8) ? random(300) : random(20000)};
        const Bytes data = ::letter(letter.bytes, number);
        if (communicator.rank() == letter.from) {
          sent.push_back(data);
          pending.push_back(communicator.post(
              message_of(Operation::kSend, letter.to, letter.tag, sent.back()), nullptr));
          sources.push_back(-1);
        }
        if (communicator.rank() == letter.to) {
          expected.push_back(data);
          got.emplace_back(data.size());
          pending.push_back(communicator.post(
              message_of(Operation::kRecv, letter.from, letter.tag, got.back()), nullptr));
          sources.push_back(letter.from);
        }
      }
      uint32_t order = seed * 77 + static_cast<uint32_t>(communicator.rank());
      for (size_t at = pending.size(); at > 1; --at) {
        const size_t other = (next_random(order) >> 8) % at;
        std::swap(pending[at - 1], pending[other]);
        std::swap(sources[at - 1], sources[other]);
      }
      for (size_t at = 0; at < pending.size(); ++at) {
        finish(pending[at]);
        check(!pending[at] || pending[at]->source() == sources[at], "the source of a message");
      }
      check(got == expected, concat("random messages, seed ", seed));
    });
}

// Threads of each rank exchange messages by tag, beside all-reduces, with callbacks that post, too.
void messages_of_many_threads() {
  on_ranks(2, small_rings(), kPatient, [](ShmCommunicator& communicator) {
    const int rank = communicator.rank();
    const auto owner = std::make_shared<int>(0);
    std::atomic<int> called{0};
    on_threads(4, [&](int thread) {
      for (int turn = 0; turn < 40; ++turn) {
        if (thread == 0) {
          communicator.run(Request{});
          continue;
        }
        const size_t bytes = turn % 3 == 0 ? 30000 : static_cast<size_t>(turn);
        Bytes mine = letter(bytes, thread + turn + rank), got(bytes), other(1), extra(1);
        const auto receive =
            communicator.post(message_of(Operation::kRecv, kAnySource, thread, got), owner);
        const auto send =
            communicator.post(message_of(Operation::kSend, 1 - rank, thread, mine), owner);
        std::atomic<bool> answered{false};
        receive->on_done([&](std::exception_ptr) {
          finish(
              communicator.post(message_of(Operation::kSend, 1 - rank, 10 + thread, other), owner));
          ++called;
          answered = true;
        });
        finish(
            communicator.post(message_of(Operation::kRecv, 1 - rank, 10 + thread, extra), owner));
        while (!receive->is_done()) std::this_thread::yield();
        finish(send);
        while (!answered) std::this_thread::yield();
        check(got == letter(bytes, thread + turn + 1 - rank), "a message of one of many threads");
        check(receive->source() == 1 - rank, "its source");
      }
    });
    check(called == 120, "every callback was called once");
    communicator.run(Request{});
    communicator.shutdown();
    check(owner.use_count() == 1, "what messages kept alive is dropped");
  });
}

// What nobody waits for is moved by the helper, and told to callbacks.
void messages_that_nobody_waits_for() {
  on_ranks(2, small_rings(), kPatient, [](ShmCommunicator& communicator) {
    const int rank = communicator.rank();
    for (int turn = 0; turn < 10; ++turn) {
      Bytes mine = letter(50000, rank + turn), got(50000);
      std::atomic<int> done{0};
      const auto send = communicator.post(message_of(Operation::kSend, 1 - rank, 0, mine), nullptr);
      const auto receive =
          communicator.post(message_of(Operation::kRecv, 1 - rank, 0, got), nullptr);
      for (const auto& each : {send, receive}) each->on_done([&](std::exception_ptr) { ++done; });
      while (done < 2) std::this_thread::sleep_for(milliseconds(1));
      check(got == letter(50000, 1 - rank + turn), "a message that nobody waited for");
    }
  });
}

// At any moment of an exchange, an abort or a destruction ends all messages of all ranks; some
// learn of it only when they post.
void messages_end() {
  for (int turn = 0; turn < 30; ++turn)
    on_ranks(3, small_rings(), kPatient, [turn](ShmCommunicator& communicator) {
      const int rank = communicator.rank(), next = (rank + 1) % 3, last = (rank + 2) % 3;
      const bool aborts = turn % 2 == 1;
      const auto check_end = [&](const Outcome& outcome) {
        check(outcome.kind == ErrorKind::kAborted ||
                  (!aborts && outcome.kind == ErrorKind::kPeerDied),
              concat("the end of a message: ", outcome.message));
      };
      Bytes mine(100000), got(100000), never(1);
      std::vector<std::shared_ptr<Pending>> pending;
      const Outcome posted = outcome_of([&] {
        for (const Message& message : {message_of(Operation::kRecv, next, 5, never),
                                       message_of(Operation::kSend, next, 0, mine),
                                       message_of(Operation::kRecv, last, 0, got)})
          pending.push_back(communicator.post(message, nullptr));
      });
      if (posted.threw) check_end(posted);
      if (rank == turn % 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(50 * turn));
        if (aborts) communicator.abort("in the middle");
        if (!aborts) communicator.end();
      }
      for (const auto& each : pending) {
        const Outcome outcome = outcome_of([&] { finish(each); });
        check(outcome.threw || each != pending[0], "a message without its other half ends");
        if (outcome.threw) check_end(outcome);
      }
      if (!posted.threw)
        check_throws(ErrorKind::kAborted, "", "a message after the end", [&] {
          for (int call = 0; call < 2; ++call)
            communicator.post(message_of(Operation::kSend, rank, 0, never), nullptr);
        });
    });
}

void flags_reach() {
  for (const uint32_t target : {0u, 1u, 5u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
    for (const uint32_t ahead : {0u, 1u, 1000u, 0x7fffffffu})
      check(reached(target + ahead, target), "reached: at or past the target");
    for (const uint32_t behind : {1u, 2u, 1000u, 0x7fffffffu, 0x80000000u})
      check(!reached(target - behind, target), "reached: before the target");
  }
}

// ---- arithmetic of shards, chunks and pipelines -------------------------------------------------

void shards() {
  for (const int64_t count : {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4096, 4097, 100003})
    for (int parts = 1; parts <= kMaxRanks; ++parts)
      for (const int64_t granule : {1, 4, 8, 16, 32, 64}) {
        int64_t at = 0;
        bool good = true;
        for (int part = 0; part < parts; ++part) {
          const Shard shard = shard_of(count, parts, part, granule);
          good = good && shard.begin == at && shard.count >= 0;
          good = good && (shard.count == 0 || shard.begin % granule == 0);
          good = good && shard.count <= round_up((count + parts - 1) / parts, granule);
          at += shard.count;
        }
        check(good && at == count, concat("shard_of(", count, ", ", parts, ", _, ", granule, ")"));
      }
}

void chunks() {
  for (const int64_t count : {0, 1, 7, 1000, 1024, 1025, 100003})
    for (const int64_t chunk_count : {1, 7, 64, 1000, 1024, 200000}) {
      const Chunks chunks{count, chunk_count};
      int64_t at = 0;
      bool good = true;
      for (int64_t chunk = 0; chunk < chunks.number(); ++chunk) {
        good = good && chunks.begin(chunk) == at && chunks.count_of(chunk) > 0;
        good = good && chunks.count_of(chunk) <= chunk_count;
        at += chunks.count_of(chunk);
      }
      check(good && at == count, concat("Chunks{", count, ", ", chunk_count, "}"));
    }
}

// Each stage sees each chunk once and in order, `lag` steps behind the stage before it.
void pipelines() {
  for (int64_t number = 0; number < 20; ++number)
    for (int64_t lag = 0; lag < 8; ++lag) {
      int64_t a = 0, b = 0, c = 0;
      bool good = true;
      const auto first = [&](int64_t chunk) { good = good && chunk == a++; };
      const auto second = [&](int64_t chunk) {
        good = good && chunk == b++ && a == std::min(number, chunk + lag + 1);
      };
      const auto third = [&](int64_t chunk) {
        good = good && chunk == c++ && b == std::min(number, chunk + lag + 1);
      };
      pipeline(number, lag, first, second);
      check(good && a == number && b == number, concat("pipeline of 2, ", number, ", ", lag));
      a = b = 0;
      pipeline(number, lag, first, second, third);
      check(good && a == number && b == number && c == number,
            concat("pipeline of 3, ", number, ", ", lag));
    }
}

// ---- 16-bit floats ------------------------------------------------------------------------------

void halves() {
  bool round_trip = true, nan = true, between = true;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = half_to_float(half);
    if ((bits & 0x7fff) > 0x7c00) {
      nan = nan && value != value && float_to_half(value) == (half | 0x200);
      continue;
    }
    round_trip = round_trip && float_to_half(value) == half;
    if ((bits & 0x7fff) >= 0x7bff) continue;
    // Halfway to the next goes to the even one; a little off it to the nearer one. Exact in float.
    const float next = half_to_float(static_cast<uint16_t>(half + 1));
    const float middle = value / 2 + next / 2, step = (next - value) / 4;
    const uint16_t even = static_cast<uint16_t>(half + (half & 1));
    between = between && float_to_half(middle) == even;
    between = between && float_to_half(middle - step) == half;
    between = between && float_to_half(middle + step) == half + 1;
  }
  check(round_trip, "float_to_half(half_to_float(x)) == x");
  check(nan, "a NaN stays a quiet NaN with its payload");
  check(between, "float_to_half rounds to nearest, ties to even");
  check(float_to_half(65519.996f) == 0x7bff && float_to_half(65520.0f) == 0x7c00, "half overflow");
  check(float_to_half(0x1p-25f) == 0 && float_to_half(0x1.000002p-25f) == 1, "half underflow");
}

struct Test {
  const char* name;
  void (*run)();
};
const Test kTests[] = {
    {"flags_reach", flags_reach},
    {"shards", shards},
    {"chunks", chunks},
    {"pipelines", pipelines},
    {"halves", halves},
    {"counters_wrap", counters_wrap},
    {"unused_stages_stay_behind", unused_stages_stay_behind},
    {"invalid_arguments", invalid_arguments},
    {"mismatches", mismatches},
    {"part_mismatches", part_mismatches},
    {"monitored_barriers", monitored_barriers},
    {"timeouts", timeouts},
    {"aborts", aborts},
    {"departures", departures},
    {"interrupts", interrupts},
    {"callbacks_and_keep_alive", callbacks_and_keep_alive},
    {"messages_ping_pong", messages_ping_pong},
    {"messages_random", messages_random},
    {"messages_of_many_threads", messages_of_many_threads},
    {"messages_that_nobody_waits_for", messages_that_nobody_waits_for},
    {"messages_end", messages_end},
    {"barrier_orders_plain_memory", barrier_orders_plain_memory},
    {"several_communicators", several_communicators},
    {"automatic_streaming_and_latency", automatic_streaming_and_latency},
    {"damaged_headers", damaged_headers},
    {"instruction_sets", instruction_sets},
    {"compressed", compressed},
    {"grid", grid},
    {"moves", moves},
};

}  // namespace

// Runs all tests, or those that the arguments name.
int main(int argc, char** argv) {
  for (const Test& test : kTests) {
    const auto wanted = [&](const char* name) { return std::strcmp(name, test.name) == 0; };
    if (argc > 1 && std::none_of(argv + 1, argv + argc, wanted)) continue;
    alarm(280);  // should a wait not end, the process does
    const int64_t before = passed;
    const auto began = Clock::now();
    test.run();
    const std::chrono::duration<double> took = Clock::now() - began;
    std::printf("%-32s %8lld checks %7.2f s\n", test.name, static_cast<long long>(passed - before),
                took.count());
    std::fflush(stdout);
  }
  if (failed > 0) {
    std::printf("%lld checks FAILED\n", static_cast<long long>(failed));
    return 1;
  }
  std::printf("%lld checks passed\n", static_cast<long long>(passed));
  return 0;
}
