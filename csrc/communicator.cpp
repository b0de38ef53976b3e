#include "communicator.h"

#include <algorithm>
#include <utility>

#include "call_site.h"
#include "error.h"
#include "interrupt.h"

namespace pycomm {

bool Request::needs_table() const {
  switch (operation) {
    case Operation::kGather:
    case Operation::kScatter:
    case Operation::kAllToAll:
      return true;
    case Operation::kAllGather:
      return std::any_of(outputs.begin(), outputs.end(),
                         [this](const Span& part) { return part.count != count; });
    case Operation::kReduceScatter:
      return std::any_of(inputs.begin(), inputs.end(),
                         [this](const ConstSpan& part) { return part.count != count; });
    default:
      return false;
  }
}

namespace {
std::string to_text(const Codec& codec) {
  return codec.block > 0 ? concat(name_of(codec.format), " in blocks of ", codec.block)
                         : name_of(codec.format);
}
constexpr size_t kMostDTypeLetters = 100;

std::string dtypes_of(const Request& request) {
  if (!request.compression || !request.compression->is_mixed()) return name_of(request.dtype);
  const std::string all = request.compression->dtypes();
  return all.size() > kMostDTypeLetters ? all.substr(0, kMostDTypeLetters) + " ..." : all;
}
// Where it says more than the count.
std::string shape_of(const Shape& shape) {
  return shape.dims == Shape::kUnknown || shape.dims == 1 ? "" : ", shape=" + to_text(shape);
}
}  // namespace

std::string describe(const Request& request) {
  std::string text = name_of(request.operation);
  if (request.operation == Operation::kBarrier ||
      request.operation == Operation::kMonitoredBarrier ||
      request.operation == Operation::kMeasureLatency)
    return text + "()";
  text += concat("(count=", request.count, shape_of(request.shape), ", dtype=", dtypes_of(request));
  if (request.reduces()) text += concat(", op=", name_of(request.op));
  if (request.has_root()) text += concat(", root=", request.root);
  if (request.algorithm != Algorithm::kAuto)
    text += concat(", algorithm=", name_of(request.algorithm));
  if (request.compression) text += ", wire=" + to_text(request.compression->codec);
  return text + ")";
}

std::string describe(const Message& message) {
  const bool sends = message.operation == Operation::kSend;
  return concat(
      name_of(message.operation), "(count=", message.count, shape_of(message.shape),
      ", dtype=", name_of(message.dtype), sends ? ", to rank " : ", from ",
      message.peer == kAnySource ? "any rank" : concat(sends ? "" : "rank ", message.peer),
      ", tag=", message.tag, ")");
}

Communicator::Communicator(int rank, int world_size, std::chrono::milliseconds timeout)
    : rank_(rank), world_size_(world_size), origin_(rank), timeout_(timeout) {
  PYCOMM_CHECK(rank >= 0 && rank < world_size, kInvalidArgument, "rank ", rank,
               " is not in a world of ", world_size);
  set_timeout(timeout);
  for (int peer = 0; peer < world_size; ++peer) global_ranks_.push_back(peer);
}

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  PYCOMM_CHECK(timeout.count() > 0, kInvalidArgument, "rank ", rank_,
               ": the timeout must be positive, not ", timeout.count(), " ms");
  timeout_.store(timeout);
}

void Communicator::set_group(const std::string& name, const std::vector<int>& global_ranks) {
  PYCOMM_CHECK(static_cast<int>(global_ranks.size()) == world_size_, kInvalidArgument, "rank ",
               rank_, ": ", global_ranks.size(), " global ranks for a group of ", world_size_);
  name_ = name;
  global_ranks_ = global_ranks;
}

std::string Communicator::group_text() const {
  if (name_.empty()) return "";
  std::string ranks;
  bool same = true;
  for (int rank = 0; rank < world_size_; ++rank) {
    ranks += concat(rank == 0 ? "" : ", ", global_ranks_[rank]);
    same = same && global_ranks_[rank] == rank;
  }
  return concat(" of group ", name_, same ? "" : " (global ranks " + ranks + ")");
}

void Communicator::check(const Request& request) const {
  const auto what = [&] { return concat("rank ", rank_, ": ", describe(request)); };
  PYCOMM_CHECK(request.count >= 0, kInvalidArgument, what(), ": the count is negative");
  PYCOMM_CHECK(!request.reduces() || can_reduce(request.dtype, request.op), kInvalidArgument,
               what(), ": op '", name_of(request.op), "' is not defined for ",
               name_of(request.dtype));
  PYCOMM_CHECK(request.root >= 0 && request.root < world_size_, kInvalidArgument, what(),
               ": the root must be below the world size ", world_size_);
  PYCOMM_CHECK(request.timeout.count() >= 0, kInvalidArgument, what(),
               ": the timeout is negative: ", request.timeout.count(), " ms");
  PYCOMM_CHECK(request.operation != Operation::kReduce || request.algorithm != Algorithm::kRing,
               kInvalidArgument, what(), ": only all_reduce has this algorithm");
  if (request.compression) return check_compression(request);
  if (!request.inputs.empty() || !request.outputs.empty() || request.needs_table()) {
    check_parts(request);
    check_overlap(request);
  } else if (request.operation == Operation::kAllGather ||
             request.operation == Operation::kReduceScatter) {
    check_overlap(request);
  }
}

void Communicator::check_compression(const Request& request) const {
  const Compression& compression = *request.compression;
  const auto what = [&] { return concat("rank ", rank_, ": ", describe(request)); };
  PYCOMM_CHECK(request.operation == Operation::kAllReduce && request.op == ReduceOp::kSum,
               kInvalidArgument, what(), ": only sums are compressed");
  PYCOMM_CHECK(request.count == compression.count() && request.dtype == compression.dtype(),
               kInvalidArgument, what(), ": its tensors hold ", compression.count(),
               " elements, the first of ", name_of(compression.dtype()));
  for (const FloatSpan& tensor : compression.tensors)
    PYCOMM_CHECK(can_transcode(tensor.dtype), kInvalidArgument, what(),
                 ": only float32, float16 and bfloat16 are compressed, not ",
                 name_of(tensor.dtype));
  PYCOMM_CHECK(!compression.residual || compression.divisor == 1, kInvalidArgument, what(),
               ": a residual is kept in the unit of the sum, so use a factor and no divisor");
  pycomm::check(compression.codec);
}

// The forms with a part per rank.
void Communicator::check_parts(const Request& request) const {
  const auto what = [&] { return concat("rank ", rank_, ": ", describe(request)); };
  const auto whole = [&](size_t parts, bool needed, const char* name) {
    const size_t expected = needed ? static_cast<size_t>(world_size_) : 0;
    PYCOMM_CHECK(parts == expected, kInvalidArgument, what(), ": needs ", expected, " ", name,
                 "s here, ", needed ? "one per rank" : "since this is not the root", ", not ",
                 parts);
  };
  const Operation operation = request.operation;
  const bool is_root = rank_ == request.root;
  if (operation == Operation::kScatter || operation == Operation::kAllToAll ||
      operation == Operation::kReduceScatter)
    whole(request.inputs.size(), operation != Operation::kScatter || is_root, "input");
  if (operation == Operation::kGather || operation == Operation::kAllToAll ||
      operation == Operation::kAllGather)
    whole(request.outputs.size(), operation != Operation::kGather || is_root, "output");

  // My own part, of which I know both ends.
  int64_t sent = request.count, received = request.count;
  if (!request.inputs.empty()) sent = request.inputs[rank_].count;
  if (!request.outputs.empty()) received = request.outputs[rank_].count;
  PYCOMM_CHECK(sent == received, kInvalidArgument, what(), ": this rank's own part has ", sent,
               " elements as input but ", received, " as output");
  for (const ConstSpan& part : request.inputs)
    PYCOMM_CHECK(part.count >= 0, kInvalidArgument, what(), ": a part has ", part.count,
                 " elements");
  for (const Span& part : request.outputs)
    PYCOMM_CHECK(part.count >= 0, kInvalidArgument, what(), ": a part has ", part.count,
                 " elements");
}

void Communicator::check(const Message& message) const {
  const bool any = message.operation == Operation::kRecv && message.peer == kAnySource;
  PYCOMM_CHECK(message.count >= 0, kInvalidArgument, "rank ", rank_, ": ", describe(message),
               ": the count is negative");
  PYCOMM_CHECK(any || (message.peer >= 0 && message.peer < world_size_), kInvalidArgument, "rank ",
               rank_, ": ", describe(message), ": the other rank must be below the world size ",
               world_size_);
  PYCOMM_CHECK(message.timeout.count() >= 0, kInvalidArgument, "rank ", rank_, ": ",
               describe(message), ": the timeout is negative: ", message.timeout.count(), " ms");
}

namespace {
struct Bytes {
  const char* begin;
  const char* end;
};
bool overlap(const Bytes& a, const Bytes& b) { return a.begin < b.end && b.begin < a.end; }
}  // namespace

// Writing one buffer must not destroy another that is still read or was already written. What works
// in place: this rank's own part, where it is the same memory as input and as output.
void Communicator::check_overlap(const Request& request) const {
  const int64_t element = bytes_of(request.dtype), bytes = request.bytes();
  const auto bytes_at = [](const void* data, int64_t size) {
    const char* begin = static_cast<const char*>(data);
    return Bytes{begin, begin + size};
  };
  // One contiguous buffer counts as a part per rank where this rank's own may be in place.
  const auto input_of = [&](int rank) {
    if (!request.inputs.empty())
      return bytes_at(request.inputs[rank].data, request.inputs[rank].count * element);
    const bool parts = request.operation == Operation::kReduceScatter;
    return bytes_at(static_cast<const char*>(request.input) + (parts ? rank * bytes : 0), bytes);
  };
  const auto output_of = [&](int rank) {
    if (!request.outputs.empty())
      return bytes_at(request.outputs[rank].data, request.outputs[rank].count * element);
    const bool parts = request.operation == Operation::kAllGather;
    return bytes_at(static_cast<const char*>(request.output) + (parts ? rank * bytes : 0), bytes);
  };
  const bool many_inputs =
      !request.inputs.empty() || request.operation == Operation::kReduceScatter;
  const bool many_outputs = !request.outputs.empty() || request.operation == Operation::kAllGather;
  const bool has_output = many_outputs || request.output;
  const bool has_input = many_inputs || request.input;

  for (int to = 0; has_output && to < (many_outputs ? world_size_ : 1); ++to) {
    const Bytes output = output_of(to);
    for (int from = 0; has_input && from < (many_inputs ? world_size_ : 1); ++from) {
      const Bytes input = input_of(from);
      const bool in_place = input.begin == output.begin && (!many_outputs || to == rank_) &&
                            (!many_inputs || from == rank_);
      PYCOMM_CHECK(in_place || !overlap(input, output), kInvalidArgument, "rank ", rank_, ": ",
                   describe(request), ": input and output overlap in the part of rank ",
                   many_outputs ? to : from);
    }
    for (int other = 0; !request.outputs.empty() && other < to; ++other)
      PYCOMM_CHECK(!overlap(output, output_of(other)), kInvalidArgument, "rank ", rank_, ": ",
                   describe(request), ": the outputs of ranks ", other, " and ", to, " overlap");
  }
}

void Communicator::execute_in_turn(const Request& request) {
  std::lock_guard<std::mutex> lock(turn_);
  execute(request);
}

void Communicator::count(Operation operation, int64_t bytes, uint64_t started, uint64_t met,
                         uint64_t finished) {
  Counters& counters = counters_[static_cast<int>(operation)];
  // One thread at a time: operations have their turn, messages the messenger's lock.
  const auto add = [](std::atomic<uint64_t>& counter, uint64_t value) {
    counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  };
  add(counters.operations, 1);
  add(counters.bytes, static_cast<uint64_t>(bytes));
  add(counters.ticks, finished - started);
  if (met != 0) add(counters.ticks_wait, met - started);
}

Tally Communicator::tally(Operation operation) const {
  const Counters& counters = counters_[static_cast<int>(operation)];
  const auto seconds = [rate = scale().nanoseconds_per_tick](uint64_t ticks) {
    return static_cast<double>(ticks) * rate * 1e-9;
  };
  return {counters.operations.load(), counters.bytes.load(), seconds(counters.ticks.load()),
          seconds(counters.ticks_wait.load())};
}

Tally Communicator::tally() const {
  Tally total;
  for (int operation = 0; operation < kOperations; ++operation) {
    const Tally part = tally(static_cast<Operation>(operation));
    total.operations += part.operations;
    total.bytes += part.bytes;
    total.seconds += part.seconds;
    total.seconds_wait += part.seconds_wait;
  }
  return total;
}

// A completion callback that communicates runs on the worker: queued behind itself it would wait
// for ever.
bool Communicator::runs_at_once(bool async) const {
  return (!async && worker_.depth() == 0) || worker_.is_mine();
}

std::shared_ptr<Pending> Communicator::queue(std::function<void()> work, bool async) {
  auto pending = worker_.enqueue(origin_, std::move(work));
  if (async) return pending;
  while (!pending->wait(kSleep)) check_interrupt();
  if (auto exception = pending->exception()) std::rethrow_exception(exception);
  return nullptr;
}

std::shared_ptr<Pending> Communicator::submit(Request request, bool async,
                                              std::shared_ptr<void> keep_alive) {
  check_process();
  check(request);
  if (runs_at_once(async)) {
    execute_in_turn(request);
    return nullptr;
  }
  request.record = recorder_.schedule(request, find_call_site());
  request.shape = {};
  return queue([this, request = std::move(request),
                keep_alive = std::move(keep_alive)] { execute_in_turn(request); },
               async);
}

std::shared_ptr<Pending> Communicator::run_together(std::function<void()> work, bool async) {
  check_process();
  if (!runs_at_once(async)) return queue(std::move(work), async);
  work();
  return nullptr;
}

}  // namespace pycomm
