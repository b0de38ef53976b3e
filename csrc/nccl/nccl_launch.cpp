// One call of ours as calls of NCCL. All is within an NCCL group, so what consists of several
// starts together.
#include <algorithm>
#include <cstring>
#include <thread>

#include "nccl_communicator.h"
#include "wire.h"

namespace pycomm::nccl {

void NcclCommunicator::issue(const Message& message, const Lane& lane, Stream stream) {
  const Wire wire = to_move(message.dtype);
  const auto count = static_cast<size_t>(message.count * wire.per_element);
  const Comm comm = lane.comm->get();
  const std::string what = where(describe(message));
  if (message.operation == Operation::kSend)
    api_->check(api_->send(message.data, count, wire.type, message.peer, comm, stream), what, comm);
  else
    api_->check(api_->recv(message.data, count, wire.type, message.peer, comm, stream), what, comm);
}

void NcclCommunicator::issue(const Request& request, const Lane& lane, Stream stream,
                             std::vector<RedOp>& made) {
  const Comm comm = lane.comm->get();
  const Wire wire = to_move(request.dtype);
  const auto count = static_cast<size_t>(request.count * wire.per_element);
  const auto check = [&](Result result) { api_->check(result, where(describe(request)), comm); };
  switch (request.operation) {
    case Operation::kBarrier:
      return check(
          api_->all_reduce(lane.scratch, lane.scratch, 1, DataType::kInt32, kSum, comm, stream));
    case Operation::kBroadcast: {
      void* data = request.output ? request.output : const_cast<void*>(request.input);
      return check(api_->broadcast(data, data, count, wire.type, request.root, comm, stream));
    }
    case Operation::kAllGather:
      if (request.outputs.empty())
        return check(
            api_->all_gather(request.input, request.output, count, wire.type, comm, stream));
      return issue_parts(request, lane, stream);
    case Operation::kAllToAll:
    case Operation::kGather:
    case Operation::kScatter:
      return issue_parts(request, lane, stream);
    default:
      return issue_reduction(request, lane, stream, made);
  }
}

// What each rank has to tell each other one. Of lists always: whether their parts lie one after
// another, or are equal, one rank cannot know of the others, and all must call NCCL alike.
void NcclCommunicator::issue_parts(const Request& request, const Lane& lane, Stream stream) {
  const Comm comm = lane.comm->get();
  const Wire wire = to_move(request.dtype);
  const std::string what = where(describe(request));
  const auto send = [&](const void* data, int64_t count, int peer) {
    if (count > 0)
      api_->check(api_->send(data, static_cast<size_t>(count * wire.per_element), wire.type, peer,
                             comm, stream),
                  what, comm);
  };
  const auto recv = [&](void* data, int64_t count, int peer) {
    if (count > 0)
      api_->check(api_->recv(data, static_cast<size_t>(count * wire.per_element), wire.type, peer,
                             comm, stream),
                  what, comm);
  };
  const Operation operation = request.operation;
  const bool is_root = rank() == request.root;
  // A part of one's own that lies where it should is not moved.
  const void* own_input = request.inputs.empty() ? request.input : request.inputs[rank()].data;
  const void* own_output = request.outputs.empty() ? request.output : request.outputs[rank()].data;
  const bool in_place = own_input == own_output;
  const auto skips = [&](int peer) { return peer == rank() && in_place; };
  for (int peer = 0; peer < world_size(); ++peer) {
    if (skips(peer)) continue;
    const auto place = static_cast<size_t>(peer);
    if (operation == Operation::kGather) {
      if (peer == request.root) send(request.input, request.count, peer);
      if (is_root) recv(request.outputs[place].data, request.outputs[place].count, peer);
    } else if (operation == Operation::kScatter) {
      if (is_root) send(request.inputs[place].data, request.inputs[place].count, peer);
      if (peer == request.root) recv(request.output, request.count, peer);
    } else {
      if (request.inputs.empty())
        send(request.input, request.count, peer);  // all_gather of uneven parts
      else
        send(request.inputs[place].data, request.inputs[place].count, peer);
      recv(request.outputs[place].data, request.outputs[place].count, peer);
    }
  }
}

void NcclCommunicator::issue_reduction(const Request& request, const Lane& lane, Stream stream,
                                       std::vector<RedOp>& made) {
  const Comm comm = lane.comm->get();
  const std::string what = where(describe(request));
  const Reduction reduction = to_reduce(request.dtype, request.op, *api_, what);
  const DataType type = reduction.wire.type;
  const auto elements = [&](int64_t count) {
    return static_cast<size_t>(count * reduction.wire.per_element);
  };
  RedOp op = reduction.op;
  if (reduction.scaled) {
    Scalar factor = to_scalar(request.factor, type);
    api_->check(
        api_->red_op_create_pre_mul_sum(&op, factor.bytes, type, Residence::kHostImmediate, comm),
        what, comm);
    made.push_back(op);
  }
  const auto check = [&](Result result) { api_->check(result, what, comm); };
  const int64_t count = request.count;
  if (request.operation == Operation::kAllReduce)
    return check(
        api_->all_reduce(request.input, request.output, elements(count), type, op, comm, stream));
  if (request.operation == Operation::kReduce)
    return check(api_->reduce(request.input, request.output, elements(count), type, op,
                              request.root, comm, stream));
  if (request.inputs.empty())
    return check(api_->reduce_scatter(request.input, request.output, elements(count), type, op,
                                      comm, stream));
  for (int root = 0; root < world_size(); ++root) {
    const ConstSpan& part = request.inputs[static_cast<size_t>(root)];
    if (part.count > 0)
      check(api_->reduce(part.data, root == rank() ? request.output : nullptr, elements(part.count),
                         type, op, root, comm, stream));
  }
}

// ---- PYCOMM_CHECK=full: every rank sees every rank's call before any of them runs

namespace {

struct Header {
  uint32_t sequence;
  uint32_t calls;  // of the group that it is in
  Operation operation;
  DType dtype;
  ReduceOp op;
  uint8_t has_table;  // counts may differ from rank to rank
  int32_t root;
  int64_t count;
  char reserved[40];

  bool operator==(const Header& other) const {
    return sequence == other.sequence && calls == other.calls && operation == other.operation &&
           dtype == other.dtype && op == other.op && has_table == other.has_table &&
           root == other.root && (has_table != 0 || count == other.count);
  }
};
static_assert(sizeof(Header) == kLineBytes);

Header header_of(const Request& request, uint32_t sequence, size_t calls) {
  Header header{};
  header.sequence = sequence;
  header.calls = static_cast<uint32_t>(calls);
  header.operation = request.operation;
  header.dtype = request.dtype;
  header.op = request.op;
  header.has_table = request.needs_table() ? 1 : 0;
  header.root = request.root;
  header.count = request.count;
  return header;
}

std::string call_of(const Header& header) {
  Request request;
  request.operation = header.operation;
  request.dtype = header.dtype;
  request.op = header.op;
  request.root = header.root;
  request.count = header.count;
  return concat(describe(request),
                header.calls > 1 ? concat(" in a group of ", header.calls, " calls") : "");
}

}  // namespace

void NcclCommunicator::check_headers(const Batch& batch, Lane& lane, uint32_t first) {
  const int64_t bytes = sizeof(Header);
  auto* all = reinterpret_cast<Header*>(lane.host_scratch);
  uint32_t sequence = first;
  for (const Call& call : batch.calls) {
    if (!call.request) continue;
    const std::string what =
        concat(where(describe(*call.request)), ": comparing it among the ranks");
    const auto late = [&] { throw_missing(-1, what); };
    const Watch watch = watch_until(NcclWork::Clock::now() + timeout(), late);
    char* own = lane.scratch + rank() * bytes;
    all[rank()] = header_of(*call.request, sequence, batch.calls.size());
    const auto copy = [&](void* to, const void* from, int64_t size) {
      cuda_->check(
          cuda_->memcpy_async(to, from, static_cast<size_t>(size), kMemcpyDefault, lane.stream),
          "cudaMemcpyAsync");
    };
    order_before(lane, lane.stream, batch.stream, false);
    copy(own, &all[rank()], bytes);
    const Comm comm = lane.comm->get();
    lane.comm->settle(api_->all_gather(own, lane.scratch, static_cast<size_t>(bytes),
                                       DataType::kUInt8, comm, lane.stream),
                      what, watch);
    copy(all, lane.scratch, bytes * world_size());
    const std::shared_ptr<void> done = lane.events->take();
    cuda_->check(cuda_->event_record(done.get(), lane.stream), "cudaEventRecord");
    for (int result; (result = cuda_->event_query(done.get())) != kCudaSuccess;) {
      if (result != kCudaErrorNotReady) cuda_->check(result, "comparing calls");
      watch();
      std::this_thread::yield();
    }
    lane.last_end = done;
    lane.last_stream = lane.stream;
    std::string calls;
    for (int peer = 0; peer < world_size(); ++peer)
      calls += concat(peer == 0 ? "rank " : ", but rank ", peer, " called ", call_of(all[peer]));
    for (int peer = 0; peer < world_size(); ++peer)
      PYCOMM_CHECK(all[peer] == all[rank()], kMismatch, "rank ", rank(),
                   ": ranks disagree on operation ", sequence, group_text(), ": ", calls,
                   ". Every rank must make the same calls in the same order, with equal counts and "
                   "dtypes.");
    ++sequence;
  }
}

}  // namespace pycomm::nccl
