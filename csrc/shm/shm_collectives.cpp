// The collective operations over shared memory: each is announced, met by all ranks, and then done
// with what travelled beside the headers (eager) or in chunks through the slots.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <type_traits>

#include "../algorithms/choose.h"
#include "../algorithms/compressed.h"
#include "../algorithms/direct.h"
#include "../algorithms/encoder.h"
#include "../algorithms/exchange.h"
#include "../algorithms/one_shot.h"
#include "../algorithms/ring.h"
#include "../algorithms/two_shot.h"
#include "shm_communicator.h"

namespace pycomm {
namespace {

const char* bytes_at(const void* pointer) { return static_cast<const char*>(pointer); }
char* bytes_at(void* pointer) { return static_cast<char*>(pointer); }

// How much longer than rank 0 the others wait in a monitored barrier, so that rank 0 reports first.
constexpr std::chrono::seconds kMonitorGrace{2};

// What an algorithm sees of one rank's part.
struct InputPart {
  const char* data;
  int64_t count;
};
struct OutputPart {
  char* data;
  int64_t count;
};

}  // namespace

// Whether what a rank sends can be read from its private memory.
bool ShmCommunicator::reaches(int64_t bytes) const {
  return single_copy_ && is_single_copy_size(bytes);
}

void ShmCommunicator::dispatch(const Request& request) {
  fill_header(request);
  switch (request.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
      return request.compression ? compressed_all_reduce(request) : all_reduce(request);
    case Operation::kReduceScatter:
      return reduce_scatter(request);
    case Operation::kBroadcast:
      return broadcast(request);
    case Operation::kAllGather:
    case Operation::kGather:
      return gather(request);
    case Operation::kScatter:
    case Operation::kAllToAll:
      return all_to_all(request);
    case Operation::kBarrier:
      announce();
      return meet();
    case Operation::kMonitoredBarrier:
      return monitored_barrier();
    case Operation::kMeasureLatency:
      announce();
      meet();
      return measure_latency();
    case Operation::kSend:
    case Operation::kRecv:
      break;
  }
  PYCOMM_CHECK(false, kError, where(), " is not a collective operation");
}

// ---- reductions

// Also reduce, where only the root has an output.
void ShmCommunicator::all_reduce(const Request& request) {
  const RealView real = real_view(request.dtype);
  const int64_t count = request.count * real.components, bytes = request.bytes();
  const char* input = bytes_at(request.input);
  char* output = bytes_at(request.output);
  const bool is_asked_for = request.algorithm != Algorithm::kAuto;
  const Algorithm algorithm = is_asked_for ? request.algorithm : all_reduce_algorithm(bytes);

  if (bytes <= kEagerBytes && algorithm == Algorithm::kOneShot) {
    announce(input, bytes);
    meet();
    if (count == 0 || !output) return;
    const char* sources[kMaxRanks];
    for (int peer = 0; peer < world_size(); ++peer) sources[peer] = announcement_of(peer).payload;
    math_for(request, false).reduce_all(sources, nullptr, output, count);
    return;
  }
  announce();
  if (!meets_later(request)) meet();
  if (request.algorithm == Algorithm::kAuto && all_are_shared()) {
    const auto memory = [this](int peer) { return shared_tensor(peer); };
    const Math math = math_for(request, false);
    return advance_directly(request.operation == Operation::kReduce
                                ? direct_reduce(slots_, math, memory, count, request.root)
                                : direct_all_reduce(slots_, math, memory, count));
  }
  follow_placement(request);
  if (request.operation == Operation::kAllReduce && copies_once(request) && all_are_in_place())
    return advance_directly(
        copied_all_reduce(slots_, math_for(request, false), reader(), output, count, scratch()));
  const Math math = chunked_math(request);
  switch (algorithm) {
    case Algorithm::kOneShot:
      return slots_.advance(one_shot_all_reduce(slots_, math, input, output, count));
    case Algorithm::kRing:
      return slots_.advance(ring_all_reduce(slots_, math, input, output, count));
    default:
      return slots_.advance(two_shot_all_reduce(slots_, math, input, output, count));
  }
}

// Few values travel encoded beside the header.
void ShmCommunicator::compressed_all_reduce(const Request& request) {
  const Compression& compression = *request.compression;
  const int64_t count = request.count, wire_bytes = compression.codec.wire_bytes(count);
  const bool is_eager = wire_bytes <= kEagerBytes;
  if (is_eager &&
      (request.algorithm == Algorithm::kAuto || request.algorithm == Algorithm::kOneShot)) {
    const Encoder encoder(compression, false);
    encoder.encode(0, count, encoder.place(announcement_of(rank()).payload, count, 0));
    announce();
    meet();
    std::vector<Wire> wires;
    for (int peer = 0; peer < world_size(); ++peer)
      wires.push_back(encoder.wire(announcement_of(peer).payload, count, 0));
    return encoder.sum(wires, 0, count);
  }
  announce();
  if (!meets_later(request)) meet();
  follow_placement(request);
  const Encoder encoder(compression, stream_);
  switch (request.algorithm) {
    case Algorithm::kOneShot:
      return slots_.advance(compressed_one_shot(slots_, encoder, count));
    case Algorithm::kRing:
      return slots_.advance(compressed_ring(slots_, encoder, count));
    default:
      return slots_.advance(compressed_two_shot(slots_, encoder, count));
  }
}

void ShmCommunicator::reduce_scatter(const Request& request) {
  const RealView real = real_view(request.dtype);
  const auto input_of = [&](int rank) {
    if (request.inputs.empty())
      return InputPart{bytes_at(request.input) + rank * request.bytes(),
                       request.count * real.components};
    const ConstSpan& part = request.inputs[rank];
    return InputPart{bytes_at(part.data), part.count * real.components};
  };
  const int64_t element = bytes_of(real.dtype);
  int64_t total = 0, mine_at = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == this->rank()) mine_at = total;
    total += input_of(rank).count * element;
  }
  char* output = bytes_at(request.output);

  if (total <= kEagerBytes) {
    char* payload = announcement_of(rank()).payload;
    for (int rank = 0; rank < world_size(); ++rank) {
      copy(payload, input_of(rank).data, input_of(rank).count * element, false);
      payload += input_of(rank).count * element;
    }
    announce();
    meet();
    if (request.count == 0) return;
    const char* sources[kMaxRanks];
    for (int peer = 0; peer < world_size(); ++peer)
      sources[peer] = announcement_of(peer).payload + mine_at;
    math_for(request, false).reduce_all(sources, nullptr, output, request.count * real.components);
    return;
  }
  announce();
  if (!meets_later(request)) meet();
  if (all_are_shared())
    return advance_directly(direct_reduce_scatter(
        slots_, math_for(request, false), [this](int peer) { return shared_tensor(peer); }, output,
        request.count * real.components));
  follow_placement(request);
  if (request.inputs.empty() && copies_once(request))
    return advance_directly(copied_reduce_scatter(
        slots_, math_for(request, false), reader(), bytes_at(request.input),
        rank() * request.bytes(), output, request.count * real.components, scratch()));
  slots_.advance(two_shot_reduce_scatter(slots_, chunked_math(request), input_of, output));
}

// ---- the same data to everybody who wants it

void ShmCommunicator::broadcast(const Request& request) {
  const int64_t bytes = request.bytes();
  char* data = bytes_at(request.output);
  const bool root = rank() == request.root;
  if (bytes <= kEagerBytes) {
    announce(data, root ? bytes : 0);
    meet();
    if (!root) copy(data, announcement_of(request.root).payload, bytes, false);
    return;
  }
  announce();
  if (!root || !meets_later(request)) meet();
  const int64_t count = request.count * real_view(request.dtype).components;
  if (!is_shared(request.root)) follow_placement(request);
  if (is_shared(request.root) || copies_once(request))
    return advance_directly(direct_gather(
        slots_, reader(), [&](int peer) { return peer == request.root && !root ? data : nullptr; },
        [&](int peer) { return peer == request.root ? bytes : 0; }));
  slots_.advance(one_shot_gather(
      slots_, chunked_math(request), data,
      [&](int peer) { return peer == request.root ? count : 0; },
      [&](int peer) { return peer == request.root && !root ? data : nullptr; }));
}

// gather and all_gather. A rank whose part is short sends it beside its header, whatever the others
// do: everybody knows every part's size by then.
void ShmCommunicator::gather(const Request& request) {
  const int64_t element = bytes_of(request.dtype);
  const char* input = bytes_at(request.input);
  const bool wanted = request.operation == Operation::kAllGather || rank() == request.root;
  const auto output_of = [&](int peer) -> char* {
    if (!wanted) return nullptr;
    return request.outputs.empty() ? bytes_at(request.output) + peer * request.bytes()
                                   : bytes_at(request.outputs[peer].data);
  };
  const bool eager = request.bytes() <= kEagerBytes;
  announce(input, eager ? request.bytes() : 0);
  if (eager || !meets_later(request)) meet();

  const int components = real_view(request.dtype).components;
  const bool even = !announcement_of(rank()).header.has_parts;
  const auto count_at = [&](int peer) {
    return even ? request.count : announcement_of(peer).header.count;
  };
  const auto is_eager = [&](int peer) { return count_at(peer) * element <= kEagerBytes; };
  // My own place comes first: if it is none, the others' headers may not be there yet.
  bool any_is_large = false, all_shared = eager || is_shared(rank());
  for (int peer = 0; peer < world_size(); ++peer) {
    any_is_large |= !is_eager(peer);
    all_shared = all_shared && (is_eager(peer) || is_shared(peer));
  }
  if (any_is_large && !all_shared) follow_placement(request);
  // A sender that is neither eager nor can be reached goes through slots.
  const auto is_reached = [&](int peer) {
    return !is_eager(peer) && (all_shared || reaches(count_at(peer) * element));
  };
  bool any_reached = false, any_in_chunks = false;
  for (int peer = 0; peer < world_size(); ++peer) {
    any_reached |= is_reached(peer);
    any_in_chunks |= !is_eager(peer) && !is_reached(peer);
    if (is_eager(peer) && wanted)
      copy(output_of(peer), announcement_of(peer).payload, count_at(peer) * element, false);
  }
  if (any_in_chunks)
    slots_.advance(one_shot_gather(
        slots_, chunked_math(request), input,
        [&](int peer) {
          return is_eager(peer) || is_reached(peer) ? 0 : count_at(peer) * components;
        },
        output_of));
  if (any_reached)
    advance_directly(direct_gather(slots_, reader(), output_of, [&](int peer) {
      return is_reached(peer) ? count_at(peer) * element : 0;
    }));
}

// ---- other data for everybody

// all_to_all and scatter. A rank that sends little sends it beside its header, part after part.
void ShmCommunicator::all_to_all(const Request& request) {
  const int me = rank(), components = real_view(request.dtype).components;
  const int64_t element = bytes_of(request.dtype);
  const auto sent = [&](int from, int to) { return announcement_of(from).parts[to].sends; };
  // Bytes that `from` sends to the others before its part for `to`; to = world_size: to all.
  const auto offset = [&](int from, int to) {
    int64_t bytes = 0;
    for (int peer = 0; peer < to; ++peer) bytes += peer == from ? 0 : sent(from, peer) * element;
    return bytes;
  };
  const auto input_of = [&](int to) {
    return request.inputs.empty() ? nullptr : bytes_at(request.inputs[to].data);
  };
  const auto output_of = [&](int from) {
    if (!request.outputs.empty()) return bytes_at(request.outputs[from].data);
    return from == request.root ? bytes_at(request.output) : nullptr;
  };

  if (offset(me, world_size()) <= kEagerBytes)
    for (int to = 0; to < world_size(); ++to)
      if (to != me)
        copy(announcement_of(me).payload + offset(me, to), input_of(to), sent(me, to) * element,
             false);
  announce();
  meet();

  if (output_of(me) != input_of(me))
    copy(output_of(me), input_of(me), sent(me, me) * element, false);
  bool eager[kMaxRanks], reached[kMaxRanks];
  bool any_is_large = false, any_reached = false;
  int64_t most = 0;  // elements in chunks between any two ranks
  for (int from = 0; from < world_size(); ++from) {
    eager[from] = offset(from, world_size()) <= kEagerBytes;
    any_is_large |= !eager[from];
  }
  if (any_is_large) follow_placement(request);
  for (int from = 0; from < world_size(); ++from) {
    reached[from] = reaches(offset(from, world_size()));
    any_reached |= reached[from];
    if (eager[from] && from != me)
      copy(output_of(from), announcement_of(from).payload + offset(from, me),
           sent(from, me) * element, false);
    if (reached[from] && from != me)
      read_memory(from, announcement_of(from).parts[me].address, output_of(from),
                  sent(from, me) * element);
    for (int to = 0; !eager[from] && !reached[from] && to < world_size(); ++to)
      if (to != from) most = std::max(most, sent(from, to) * components);
  }
  if (any_reached) advance_directly(leave_together(slots_));
  if (most == 0) return;
  const auto in_chunks = [&](int from, int to) {
    return from == to || eager[from] || reached[from] ? 0 : sent(from, to) * components;
  };
  slots_.advance(exchange(
      slots_, chunked_math(request),
      [&](int to) { return InputPart{input_of(to), in_chunks(me, to)}; },
      [&](int from) { return OutputPart{output_of(from), in_chunks(from, me)}; }, most));
}

// ---- the head of an operation

// Rank 0 waits for everybody before it announces itself; the others wait for rank 0 only, and
// somewhat longer. So rank 0 alone decides who is late, and everybody learns it from rank 0. The
// wording is Gloo's, since programs look for it.
void ShmCommunicator::monitored_barrier() {
  int peer = 1;
  try {
    if (rank() != 0) {
      limit_ += kMonitorGrace;
      announce();
      return meet_peer(0);
    }
    for (; peer < world_size(); ++peer) meet_peer(peer);
    announce();
  } catch (const Error& error) {
    if (rank() == 0 && error.kind() != ErrorKind::kTimeout) throw;
    throw Error(error.kind(),
                rank() == 0 ? late_ranks(peer)
                            : concat("Rank ", rank(),
                                     " successfully reached monitoredBarrier, but "
                                     "received errors while waiting for send/recv from rank 0: ",
                                     error.what()),
                error.blame());
  }
}

std::string ShmCommunicator::late_ranks(int first) {
  std::string late = concat(first);
  int number = 1;
  for (int peer = first + 1; request_->wait_all_ranks && peer < world_size(); ++peer) {
    if (reached(load_acquire(announcement_of(peer).header.sequence), sequence_)) continue;
    late += concat(", ", peer);
    ++number;
  }
  return concat(number > 1 ? "Ranks " : "Rank ", late, " failed to pass monitoredBarrier in ",
                limit_.count(), " ms; ", arrivals(),
                ". Look at what those ranks do, or raise the timeout.");
}

// Announcement s lies where s - 2 lay. That is safe to overwrite: I finished s - 1 only after
// seeing every peer enter s - 1, and a peer enters s - 1 after it has read all it wanted of s - 2.
void ShmCommunicator::fill_header(const Request& request) {
  OperationHeader& header = announcement_of(rank()).header;
  header.operation = request.operation;
  header.dtype = request.dtype;
  header.op = request.op;
  header.algorithm = request.algorithm;
  header.count = request.count;
  header.root = request.root;
  header.has_parts = request.needs_table();
  header.codec =
      request.compression ? request.compression->codec : Codec{WireFormat::kFloat32, kUncompressed};
  header.mixture = request.compression ? request.compression->mixture() : 0;
  header.factor = request.factor;
  header.place = place_of(request);
  header.address = address_of(request);
  if (header.has_parts) write_parts(request);
  if (__builtin_expect(test_fault().kind == TestFault::Kind::kCorrupt, 0)) corrupt(header);
}

// For tests: fields of random values, each with a chance of one in four.
void ShmCommunicator::corrupt(OperationHeader& header) const {
  const TestFault& fault = test_fault();
  if (!fault.is_due(rank(), sequence_, TestFault::kAtEntry)) return;
  std::minstd_rand random(static_cast<uint32_t>(fault.value));
  const auto spoil = [&](auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if (random() % 4 == 0) field = static_cast<Field>(random());
  };
  spoil(header.operation);
  spoil(header.dtype);
  spoil(header.op);
  spoil(header.algorithm);
  spoil(header.count);
  spoil(header.root);
  spoil(header.codec.format);
  spoil(header.codec.block);
  spoil(header.mixture);
  spoil(header.has_parts);
  spoil(header.factor);
  spoil(header.address);
  spoil(header.place);
  for (Part& part : announcement_of(rank()).parts) {
    spoil(part.sends);
    spoil(part.receives);
  }
}

void ShmCommunicator::announce(const void* payload, int64_t payload_bytes) {
  Announcement& mine = announcement_of(rank());
  if (payload_bytes > 0) std::memcpy(mine.payload, payload, static_cast<size_t>(payload_bytes));
  set_and_wake(mine.header.sequence, sequence_, segment_->area(rank()).entered.sleepers);
}

// The tensor that peers read, and of an all_reduce or a reduce's root also write, if it is large
// enough for that to pay.
int64_t ShmCommunicator::place_of(const Request& request) const {
  const int64_t bytes = request.bytes();
  if (bytes <= kEagerBytes || !request.inputs.empty() || request.compression) return 0;
  switch (request.operation) {
    case Operation::kReduce:
    case Operation::kAllReduce:
      if (request.output && request.output != request.input) return 0;
      return heap_->offset_of(request.input, bytes) + 1;
    case Operation::kReduceScatter:
      return heap_->offset_of(request.input, bytes * world_size()) + 1;
    case Operation::kBroadcast:
      return heap_->offset_of(request.output, bytes) + 1;
    case Operation::kGather:
    case Operation::kAllGather:
      return heap_->offset_of(request.input, bytes) + 1;
    default:
      return 0;
  }
}

// Of the private tensor that peers may read: of an all_reduce, which copies in place only, 0 if the
// result goes elsewhere.
uint64_t ShmCommunicator::address_of(const Request& request) const {
  const bool all_reduce = request.operation == Operation::kAllReduce;
  if (all_reduce && request.input != request.output) return 0;
  const bool broadcast = request.operation == Operation::kBroadcast;
  return reinterpret_cast<uint64_t>(broadcast ? request.output : request.input);
}

// My own comes first: if it is not, the others' headers are not looked at, which may not be there.
bool ShmCommunicator::all_are_shared() {
  if (!is_shared(rank())) return false;
  for (int peer = 0; peer < world_size(); ++peer)
    if (!is_shared(peer)) return false;
  return true;
}

bool ShmCommunicator::all_are_in_place() {
  for (int peer = 0; peer < world_size(); ++peer)
    if (announcement_of(peer).header.address == 0) return false;
  return true;
}

// Whether an operation in chunks can begin before the peers' headers are known: their parts,
// factors and places are not needed, and no latency is measured.
bool ShmCommunicator::meets_later(const Request& request) {
  const OperationHeader& mine = announcement_of(rank()).header;
  if (mine.has_parts || mine.place != 0 || request.op == ReduceOp::kPremulSum || probe_is_due() ||
      copies_once(request))
    return false;
  slots_.meet_later();
  return true;
}

void ShmCommunicator::write_parts(const Request& request) {
  Part* parts = announcement_of(rank()).parts;
  const bool is_root = rank() == request.root;
  for (int peer = 0; peer < world_size(); ++peer) {
    const auto input = [&] { return request.inputs[peer].count; };
    const auto output = [&] { return request.outputs[peer].count; };
    const int64_t with_root = peer == request.root ? request.count : 0;
    if (!request.inputs.empty())
      parts[peer].address = reinterpret_cast<uint64_t>(request.inputs[peer].data);
    switch (request.operation) {
      case Operation::kGather:
        parts[peer].sends = with_root;
        parts[peer].receives = is_root ? output() : 0;
        break;
      case Operation::kScatter:
        parts[peer].sends = is_root ? input() : 0;
        parts[peer].receives = with_root;
        break;
      case Operation::kAllGather:
        parts[peer].sends = request.count;
        parts[peer].receives = output();
        break;
      case Operation::kReduceScatter:
        parts[peer].sends = input();
        parts[peer].receives = request.count;
        break;
      default:
        parts[peer].sends = input();
        parts[peer].receives = output();
        break;
    }
  }
}

// Every rank sees every peer's header, whatever it needs from it: so a mismatch is noticed on all
// ranks, and no operation returns before all ranks have entered it.
void ShmCommunicator::meet() {
  meeting_ = true;
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank()) meet_peer(peer);
  meeting_ = false;
  check_sound(rank());
  if (__builtin_expect(announcement_of(rank()).header.has_parts != 0, 0)) check_parts();
  if (!records_) return;
  // Reading the clock takes 10 ns: too long for what takes no time.
  met_ = waited_ || !is_short() ? ticks() : started_;
  recorder_.meet(record_, met_);
}

void ShmCommunicator::meet_peer(int peer) {
  if (!has_entered(peer))
    wait_until(announcement_of(peer).header.sequence, sequence_,
               segment_->area(peer).entered.sleepers, patience_, WaitGuard{*this, peer});
  if (__builtin_expect(!agrees_with(peer), 0)) throw_mismatch("");
  check_sound(peer);
}

void ShmCommunicator::check_sound(int peer) const {
  if (__builtin_expect(!is_sound(announcement_of(peer).header), 0))
    throw Error(ErrorKind::kError,
                concat(where(), ": the header of rank ", peer,
                       " is damaged: it places a tensor outside of that rank's shared memory"),
                {Cause::kOther, peer});
}

// Whether the tensor that a header places in its rank's heap lies in there.
bool ShmCommunicator::is_sound(const OperationHeader& header) const {
  if (__builtin_expect(header.place == 0, 1)) return true;
  const int64_t room = segment_->head().config.heap_bytes;
  const int64_t parts = header.operation == Operation::kReduceScatter ? world_size() : 1;
  const int64_t element = parts * bytes_of(header.dtype);
  return header.place > 0 && header.count >= 0 && header.count <= room / element &&
         header.place - 1 <= room - header.count * element;
}

// Of a peer that has entered the operation.
bool ShmCommunicator::agrees_with(int peer) const {
  const OperationHeader& mine = announcement_of(rank()).header;
  const OperationHeader& theirs = announcement_of(peer).header;
  const bool same = mine.operation == theirs.operation && mine.dtype == theirs.dtype &&
                    mine.op == theirs.op && mine.algorithm == theirs.algorithm &&
                    (mine.count == theirs.count || mine.has_parts) && mine.root == theirs.root &&
                    mine.codec == theirs.codec && mine.mixture == theirs.mixture &&
                    mine.has_parts == theirs.has_parts;
  return same || !checks_headers_;
}

// What each rank sends must be what the other expects; all ranks compare all pairs, so all notice.
void ShmCommunicator::check_parts() {
  for (int from = 0; from < world_size(); ++from)
    for (int to = 0; to < world_size(); ++to) {
      const int64_t sent = announcement_of(from).parts[to].sends;
      const int64_t expected = announcement_of(to).parts[from].receives;
      if (__builtin_expect(sent != expected, 0))
        throw_mismatch(concat("Parts differ: rank ", from, " has ", sent, " elements for rank ", to,
                              ", which expects ", expected, ". "));
    }
  const Operation operation = request_->operation;
  if (operation != Operation::kGather && operation != Operation::kAllGather) return;
  for (int from = 0; from < world_size(); ++from) {
    const Announcement& theirs = announcement_of(from);
    if (theirs.header.count != theirs.parts[request_->root].sends)
      throw Error(ErrorKind::kError,
                  concat(where(), ": the header of rank ", from,
                         " is damaged: its counts contradict each other"),
                  {Cause::kOther, from});
  }
}

// After the meeting, when all ranks' factors can be read.
Math ShmCommunicator::math_for(const Request& request, bool stream) {
  if (request.op != ReduceOp::kPremulSum) {
    Math math(request.dtype, request.op, world_size(), stream);
    math.set_stream_output(stream_output(request.operation, request.bytes()));
    return math;
  }
  for (int peer = 0; peer < world_size(); ++peer)
    factors_[peer] = announcement_of(peer).header.factor;
  return Math(request.dtype, request.op, world_size(), stream, factors_, rank());
}

Math ShmCommunicator::chunked_math(const Request& request) { return math_for(request, stream_); }

}  // namespace pycomm
