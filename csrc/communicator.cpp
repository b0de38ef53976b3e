#include "communicator.h"

#include <utility>

#include "error.h"
#include "interrupt.h"

namespace pycomm {

std::string describe(const Request& request) {
  std::string text = name_of(request.operation);
  if (request.operation == Operation::kBarrier || request.operation == Operation::kMeasureLatency)
    return text + "()";
  text += concat("(count=", request.count, ", dtype=", name_of(request.dtype));
  if (request.operation == Operation::kAllReduce || request.operation == Operation::kReduceScatter)
    text += concat(", op=", name_of(request.op));
  if (request.operation == Operation::kBroadcast) text += concat(", root=", request.root);
  if (request.algorithm != Algorithm::kAuto)
    text += concat(", algorithm=", name_of(request.algorithm));
  return text + ")";
}

std::string describe(const Message& message) {
  const bool sends = message.operation == Operation::kSend;
  return concat(
      name_of(message.operation), "(count=", message.count, ", dtype=", name_of(message.dtype),
      sends ? ", to rank " : ", from ",
      message.peer == kAnySource ? "any rank" : concat(sends ? "" : "rank ", message.peer),
      ", tag=", message.tag, ")");
}

Communicator::Communicator(int rank, int world_size, std::chrono::milliseconds timeout)
    : rank_(rank), world_size_(world_size), timeout_(timeout) {
  PYCOMM_CHECK(rank >= 0 && rank < world_size, kInvalidArgument, "rank ", rank,
               " is not in a world of ", world_size);
  set_timeout(timeout);
}

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  PYCOMM_CHECK(timeout.count() > 0, kInvalidArgument, "rank ", rank_,
               ": the timeout must be positive, not ", timeout.count(), " ms");
  timeout_.store(timeout);
}

void Communicator::check(const Request& request) const {
  const bool reduces =
      request.operation == Operation::kAllReduce || request.operation == Operation::kReduceScatter;
  PYCOMM_CHECK(request.count >= 0, kInvalidArgument, "rank ", rank_, ": ", describe(request),
               ": the count is negative");
  PYCOMM_CHECK(!reduces || can_reduce(request.dtype, request.op), kInvalidArgument, "rank ", rank_,
               ": ", describe(request), ": op '", name_of(request.op), "' is not defined for ",
               name_of(request.dtype));
  PYCOMM_CHECK(request.root >= 0 && request.root < world_size_, kInvalidArgument, "rank ", rank_,
               ": ", describe(request), ": the root must be below the world size ", world_size_);
  PYCOMM_CHECK(request.timeout.count() >= 0, kInvalidArgument, "rank ", rank_, ": ",
               describe(request), ": the timeout is negative: ", request.timeout.count(), " ms");
  const auto whole = [this](size_t pointers) {
    return pointers == 0 || pointers == static_cast<size_t>(world_size_);
  };
  PYCOMM_CHECK(whole(request.inputs.size()) && whole(request.outputs.size()), kInvalidArgument,
               "rank ", rank_, ": ", describe(request), ": needs one tensor per rank, ",
               world_size_, ", not ", request.inputs.size() + request.outputs.size());
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

// Writing one buffer must not destroy another that is still read or was already written. What works
// in place: an all_gather's input as its own part of the output, a reduce_scatter's output as its
// own part of the input.
void Communicator::check_overlap(const Request& request) const {
  if (request.operation != Operation::kAllGather && request.operation != Operation::kReduceScatter)
    return;
  const bool gather = request.operation == Operation::kAllGather;
  const int64_t bytes = request.bytes();
  const auto part = [&](int rank) {
    if (gather && !request.outputs.empty())
      return static_cast<const char*>(request.outputs[rank].data);
    if (!gather && !request.inputs.empty())
      return static_cast<const char*>(request.inputs[rank].data);
    return static_cast<const char*>(gather ? request.output : request.input) + rank * bytes;
  };
  const auto overlap = [bytes](const char* a, const char* b) {
    return bytes > 0 && a < b + bytes && b < a + bytes;
  };
  const char* single = static_cast<const char*>(gather ? request.input : request.output);
  for (int rank = 0; rank < world_size_; ++rank) {
    const bool in_place = rank == rank_ && single == part(rank);
    PYCOMM_CHECK(in_place || !overlap(single, part(rank)), kInvalidArgument, "rank ", rank_, ": ",
                 describe(request), ": input and output overlap in the part of rank ", rank);
    for (int other = 0; gather && !request.outputs.empty() && other < rank; ++other)
      PYCOMM_CHECK(!overlap(part(other), part(rank)), kInvalidArgument, "rank ", rank_, ": ",
                   describe(request), ": the outputs of ranks ", other, " and ", rank, " overlap");
  }
}

void Communicator::execute_in_turn(const Request& request) {
  std::lock_guard<std::mutex> lock(turn_);
  execute(request);
  operations_.fetch_add(1, std::memory_order_relaxed);
  bytes_.fetch_add(static_cast<uint64_t>(request.bytes()), std::memory_order_relaxed);
}

std::shared_ptr<Pending> Communicator::enqueue(std::function<void()> work) {
  return worker_.enqueue(std::move(work));
}

std::shared_ptr<Pending> Communicator::submit(Request request, bool async,
                                              std::shared_ptr<void> keep_alive) {
  check(request);
  check_overlap(request);
  // A completion callback that communicates runs on the worker: queued behind itself it would wait
  // for ever.
  if ((!async && worker_.depth() == 0) || worker_.is_mine()) {
    execute_in_turn(request);
    return nullptr;
  }
  auto pending =
      worker_.enqueue([this, request = std::move(request), keep_alive = std::move(keep_alive)] {
        execute_in_turn(request);
      });
  if (async) return pending;
  while (!pending->wait(kSleep)) check_interrupt();
  if (auto exception = pending->exception()) std::rethrow_exception(exception);
  return nullptr;
}

}  // namespace pycomm
