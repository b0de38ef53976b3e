#include "recorder.h"

#include <algorithm>
#include <cstring>

#include "communicator.h"
#include "error.h"

namespace pycomm {

std::string to_text(const Shape& shape) {
  std::string text = "[";
  for (int dim = 0; dim < shape.dims; ++dim) text += concat(dim == 0 ? "" : ", ", shape.sizes[dim]);
  return text + "]";
}

// ---- writing

uint64_t Recorder::pack(uint32_t sequence, Operation operation, DType dtype, ReduceOp op,
                        int dims) {
  // 15: unknown, or a vector of `count` elements, whose sizes need not be written.
  const uint64_t packed_dims = dims == 1 ? 15 : static_cast<uint64_t>(dims) & 15;
  return sequence | static_cast<uint64_t>(operation) << kOperationShift |
         static_cast<uint64_t>(dtype) << kDTypeShift | static_cast<uint64_t>(op) << kOpShift |
         packed_dims << kDimsShift;
}

uint64_t Recorder::write(uint64_t call, uint64_t now, bool starts, int64_t count, uint64_t peers,
                         const Shape& shape, const std::string& line) {
  const uint64_t number = __atomic_add_fetch(&next_, 1, __ATOMIC_RELAXED);
  Record& record = at(number);
  store(record.number, 0);
  __atomic_thread_fence(__ATOMIC_RELEASE);  // before the fields: see read()
  store(record.created, now);
  store(record.started, starts ? now : 0);
  store(record.met, 0);
  store(record.finished, 0);
  __atomic_store_n(&record.count, count, __ATOMIC_RELAXED);
  store(record.peers, peers);
  for (int dim = 0; dim < shape.dims && shape.dims != 1; ++dim)
    __atomic_store_n(&ring_.details[number & (ring_.capacity - 1)].sizes[dim], shape.sizes[dim],
                     __ATOMIC_RELAXED);
  store(record.call, call);
  if (__builtin_expect(!line.empty(), 0)) write_line(number, line);
  __atomic_store_n(&record.number, number, __ATOMIC_RELEASE);
  return number;
}

// What does not fit is left out in front: the end says most.
void Recorder::write_line(uint64_t number, const std::string& line) {
  RecordDetail& detail = ring_.details[number & (ring_.capacity - 1)];
  const size_t most = sizeof detail.line - 1;
  const std::string text =
      line.size() <= most ? line : "..." + line.substr(line.size() - (most - 3));
  for (size_t i = 0; i <= text.size(); ++i)
    __atomic_store_n(&detail.line[i], text.c_str()[i], __ATOMIC_RELAXED);
  Record& record = at(number);
  store(record.call, load(record.call) | kHasLine);
}

uint64_t Recorder::add(const Request& request, uint32_t sequence, uint64_t now, bool starts,
                       const std::string& line) {
  return write(pack(sequence, request.operation, request.dtype, request.op, request.shape.dims),
               now, starts, request.count, static_cast<uint32_t>(request.root), request.shape,
               line);
}

uint64_t Recorder::schedule(const Request& request, const std::string& line) {
  return add(request, 0, ticks(), false, line);
}

uint64_t Recorder::start(const Request& request, uint32_t sequence, uint64_t now,
                         const std::string& line) {
  return add(request, sequence, now, true, line);
}

uint64_t Recorder::start(const Message& message, uint32_t sequence, uint64_t now,
                         const std::string& line) {
  const uint64_t peers = static_cast<uint32_t>(message.peer) | static_cast<uint64_t>(message.tag)
                                                                   << 32;
  return write(pack(sequence, message.operation, message.dtype, ReduceOp::kSum, message.shape.dims),
               now, true, message.count, peers, message.shape, line);
}

void Recorder::set_line(uint64_t number, const std::string& line) {
  if (number != 0 && load(at(number).number) == number && !line.empty()) write_line(number, line);
}

// ---- reading

RecordView Recorder::read(const RecordRing& ring, uint64_t place) {
  const Record& record = ring.records[place];
  const RecordDetail& detail = ring.details[place];
  RecordView view;
  const uint64_t number = __atomic_load_n(&record.number, __ATOMIC_ACQUIRE);
  const uint64_t call = load(record.call), peers = load(record.peers);
  view.created = load(record.created);
  view.started = load(record.started);
  view.met = load(record.met);
  view.finished = load(record.finished);
  view.count = __atomic_load_n(&record.count, __ATOMIC_RELAXED);
  view.sequence = static_cast<uint32_t>(call & kSequenceMask);
  view.operation = static_cast<Operation>(call >> kOperationShift & 0xff);
  view.dtype = static_cast<DType>(call >> kDTypeShift & 0xff);
  view.op = static_cast<ReduceOp>(call >> kOpShift & 0xff);
  const int dims = static_cast<int>(call >> kDimsShift & 15);
  if (dims <= Shape::kMaxDims) view.dims = dims;
  for (int dim = 0; dim < view.dims; ++dim)
    view.sizes[dim] = __atomic_load_n(&detail.sizes[dim], __ATOMIC_RELAXED);
  view.peer = static_cast<int32_t>(peers & 0xffffffff);
  view.tag = static_cast<int32_t>(peers >> 32);
  view.failed = (call & kFailed) != 0;
  for (size_t i = 0; (call & kHasLine) != 0 && i < sizeof detail.line; ++i) {
    const char letter = __atomic_load_n(&detail.line[i], __ATOMIC_RELAXED);
    if (letter == 0) break;
    view.line += letter;
  }
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  view.number = load(record.number) == number ? number : 0;
  return view;
}

std::vector<RecordView> Recorder::read_all(const RecordRing& ring) {
  std::vector<RecordView> views;
  for (uint64_t i = 0; i < ring.capacity; ++i) {
    RecordView view = read(ring, i);
    if (view.number != 0) views.push_back(std::move(view));
  }
  std::sort(views.begin(), views.end(),
            [](const RecordView& a, const RecordView& b) { return a.number < b.number; });
  return views;
}

std::string RecordView::describe() const {
  std::string text;
  if (is_message()) {
    Message message;
    message.operation = operation;
    message.dtype = dtype;
    message.count = count;
    message.peer = peer;
    message.tag = tag;
    message.shape = shape();
    text = pycomm::describe(message);
  } else {
    Request request;
    request.operation = operation;
    request.dtype = dtype;
    request.op = op;
    request.count = count;
    request.root = peer;
    request.shape = shape();
    text = pycomm::describe(request);
  }
  return line.empty() ? text : text + " at " + line;
}

}  // namespace pycomm
