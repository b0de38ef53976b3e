// all_reduce of encoded values through NCCL, as algorithms/compressed.h does it through slots: the
// kernel where that encodes, sums and decodes, and NCCL where it posts and awaits. The same bits
// and residuals, whatever the chunks are.
//
// one_shot: each rank encodes all it has, all get it, all sum. Small tensors.
// two_shot: each rank sends every other one its shard, sums the own one, and all get all sums. In
// chunks, whose kernels run on the operation's stream while NCCL moves others on a second one.
// ring: a chunk's partial sum starts at rank 0 and goes from rank to rank, each of which decodes,
// adds and encodes in one kernel; the last one sends the result round.
#include <algorithm>
#include <memory>
#include <vector>

#include "../algorithms/choose.h"
#include "../algorithms/encoder.h"
#include "../slots.h"
#include "nccl_communicator.h"

namespace pycomm::nccl {
namespace {

constexpr int kBuffers = 3;  // chunks that are encoded, summed, decoded at a time

// A ring is slow until chunks are everywhere: so many of them for each rank, but not below a size
// that a message is worth.
constexpr int64_t kRingChunksPerRank = 4, kRingLeastBytes = 256 << 10;

// The chunks of a tensor whose encodings are not longer than `bytes`, unless a granule's is.
Chunks cut(const Encoder& encoder, int64_t count, int64_t bytes) {
  const int64_t granule = encoder.codec().granule();
  return {count, std::min(std::max(encoder.capacity(bytes), granule), round_up(count, granule))};
}

}  // namespace

// What the parts of one operation share.
struct NcclCommunicator::Compressed {
  const Request& request;
  const Encoder& encoder;
  Lane& lane;
  Stream stream;
  const std::string& what;
  const Watch& watch;

  const Codec& codec() const { return encoder.codec(); }
  Stream transfers() const { return lane.transfers; }
  // Where an encoding of so many values may be followed by another one.
  int64_t slot_bytes(int64_t count) const {
    return round_up(codec().wire_bytes(count), static_cast<int64_t>(kLineBytes));
  }
  static constexpr int64_t kScaleBytes = sizeof(float);
};

std::shared_ptr<void> NcclCommunicator::mark(const Compressed& job, Stream stream) {
  std::shared_ptr<void> event = job.lane.events->take();
  cuda_->check(cuda_->event_record(event.get(), stream), "cudaEventRecord");
  return event;
}

// From now on `later` runs behind what `earlier` has.
void NcclCommunicator::order(const Compressed& job, Stream earlier, Stream later) {
  cuda_->check(cuda_->stream_wait_event(later, mark(job, earlier).get(), 0), "cudaStreamWaitEvent");
}

void NcclCommunicator::send(const Compressed& job, const void* data, int64_t bytes, int peer) {
  const Comm comm = job.lane.comm->get();
  if (bytes > 0)
    api_->check(
        api_->send(data, static_cast<size_t>(bytes), DataType::kUInt8, peer, comm, job.transfers()),
        job.what, comm);
}

void NcclCommunicator::recv(const Compressed& job, void* data, int64_t bytes, int peer) {
  const Comm comm = job.lane.comm->get();
  if (bytes > 0)
    api_->check(
        api_->recv(data, static_cast<size_t>(bytes), DataType::kUInt8, peer, comm, job.transfers()),
        job.what, comm);
}

// The device's memory for encoded values, of at least so many bytes. What is captured has its own,
// since a graph runs in no order with other operations, and as often as it is launched.
char* NcclCommunicator::wire_memory(Lane& lane, int64_t bytes, bool capturing) {
  if (!capturing && lane.wire_bytes >= bytes) return lane.wire;
  void* memory = nullptr;
  int mode = kCaptureModeRelaxed;  // in which memory may be taken meanwhile
  cuda_->check(cuda_->exchange_capture_mode(&mode), "cudaThreadExchangeStreamCaptureMode");
  const int result = cuda_->malloc(&memory, static_cast<size_t>(bytes));
  cuda_->exchange_capture_mode(&mode);
  cuda_->check(result, "cudaMalloc");
  if (capturing) {
    lane.graph_wires.push_back(static_cast<char*>(memory));
    return lane.graph_wires.back();
  }
  if (lane.wire) cuda_->check(cuda_->free(lane.wire), "cudaFree");  // which waits for its users
  lane.wire = static_cast<char*>(memory);
  lane.wire_bytes = bytes;
  return lane.wire;
}

void NcclCommunicator::issue_compressed(const Request& request, Lane& lane, Stream stream,
                                        bool capturing, const std::string& what,
                                        const Watch& watch) {
  const Compression& compression = *request.compression;
  if (request.count == 0) return;
  PYCOMM_CHECK(!capturing || compression.tensors.size() == 1, kInvalidArgument, what,
               ": a list of tensors cannot be captured into a graph; pass one tensor");
  const Encoder encoder(compression, false, [&](const TranscodeCall& call) {
    codec_->run(call, compression.tensors, stream);
  });
  const Compressed job{request, encoder, lane, stream, what, watch};
  switch (choose_nccl_compressed(request.algorithm, world_size(),
                                 compression.codec.wire_bytes(request.count))) {
    case Algorithm::kOneShot:
      return compressed_one_shot(job, capturing);
    case Algorithm::kRing:
      return compressed_ring(job, capturing);
    default:
      return compressed_two_shot(job, capturing);
  }
}

void NcclCommunicator::compressed_one_shot(const Compressed& job, bool capturing) {
  const int64_t count = job.request.count, slot = job.slot_bytes(count);
  char* const slots = wire_memory(job.lane, slot * world_size(), capturing);
  const auto of = [&](int peer) { return slots + peer * slot; };
  job.encoder.encode(0, count, job.encoder.place(of(rank()), count, 0));
  in_nccl_group(job.lane, job.what, job.watch, [&](Comm comm) {
    api_->check(api_->all_gather(of(rank()), slots, static_cast<size_t>(slot), DataType::kUInt8,
                                 comm, job.stream),
                job.what, comm);
  });
  std::vector<Wire> wires;
  for (int peer = 0; peer < world_size(); ++peer)
    wires.push_back(job.encoder.wire(of(peer), count, 0));
  job.encoder.sum(wires, 0, count);
}

// A chunk is encoded as one, whose shards are sent by their values and their scales. The sums take
// the contributions' place, as in a slot of the CPU's.
void NcclCommunicator::compressed_two_shot(const Compressed& job, bool capturing) {
  const Encoder& encoder = job.encoder;
  const Codec& codec = job.codec();
  const int ranks = world_size();
  const Chunks chunks = cut(encoder, job.request.count, settings_.wire_chunk_bytes);
  const auto shard = [&](int64_t chunk, int owner) {
    return shard_of(chunks.count_of(chunk), ranks, owner, codec.granule());
  };
  // Of all shards but the last ones, which may be shorter; the encoding has room for equal ones.
  const auto even = [&](int64_t chunk) { return shard(chunk, 0).count; };
  const int64_t whole_bytes = job.slot_bytes(even(0) * ranks), part_bytes = job.slot_bytes(even(0));
  const int64_t buffer_bytes = whole_bytes + ranks * part_bytes;
  char* const memory = wire_memory(job.lane, kBuffers * buffer_bytes, capturing);
  const auto whole = [&](int64_t chunk, int64_t begin) {
    return encoder.place(memory + chunk % kBuffers * buffer_bytes, even(chunk) * ranks, begin);
  };
  const auto part = [&](int64_t chunk, int peer) {
    char* const parts = memory + chunk % kBuffers * buffer_bytes + whole_bytes;
    return encoder.place(parts + peer * part_bytes, even(chunk), 0);
  };
  // act(begin, count) for what is not this rank's shard: two ranges at most.
  const auto but_mine = [&](int64_t chunk, auto&& act) {
    const Shard mine = shard(chunk, rank());
    const int64_t end = mine.begin + mine.count;
    if (mine.begin > 0) act(int64_t{0}, mine.begin);
    if (chunks.count_of(chunk) > end) act(end, chunks.count_of(chunk) - end);
  };

  const auto contribute = [&](int64_t chunk) {
    but_mine(chunk, [&](int64_t begin, int64_t count) {
      encoder.encode(chunks.begin(chunk) + begin, count, whole(chunk, begin));
    });
    order(job, job.stream, job.transfers());
    in_nccl_group(job.lane, job.what, job.watch, [&](Comm) {
      const int64_t mine = shard(chunk, rank()).count;
      for (int step = 1; step < ranks; ++step) {
        const int peer = (rank() + step) % ranks;
        const Shard theirs = shard(chunk, peer);
        const Place out = whole(chunk, theirs.begin), in = part(chunk, peer);
        send(job, out.values, theirs.count * codec.value_bytes(), peer);
        send(job, out.scales, codec.scales(theirs.count) * job.kScaleBytes, peer);
        recv(job, in.values, mine * codec.value_bytes(), peer);
        recv(job, in.scales, codec.scales(mine) * job.kScaleBytes, peer);
      }
    });
  };
  std::vector<Wire> wires;
  const auto reduce_shard = [&](int64_t chunk) {
    const Shard mine = shard(chunk, rank());
    order(job, job.transfers(), job.stream);
    wires.clear();
    for (int peer = 0; peer < ranks; ++peer) {
      const Place in = part(chunk, peer);
      if (peer != rank()) wires.push_back({in.values, in.scales});
    }
    if (mine.count > 0)
      encoder.reduce(wires, rank(), chunks.begin(chunk) + mine.begin, mine.count,
                     whole(chunk, mine.begin), true);
    order(job, job.stream, job.transfers());
    in_nccl_group(job.lane, job.what, job.watch, [&](Comm comm) {
      const Place all = whole(chunk, 0), own = whole(chunk, even(chunk) * rank());
      const auto gather = [&](const void* from, void* to, int64_t bytes) {
        if (bytes > 0)
          api_->check(api_->all_gather(from, to, static_cast<size_t>(bytes), DataType::kUInt8, comm,
                                       job.transfers()),
                      job.what, comm);
      };
      gather(own.values, all.values, even(chunk) * codec.value_bytes());
      gather(own.scales, all.scales, codec.scales(even(chunk)) * job.kScaleBytes);
    });
  };
  const auto collect = [&](int64_t chunk) {
    order(job, job.transfers(), job.stream);
    but_mine(chunk, [&](int64_t begin, int64_t count) {
      const Place sums = whole(chunk, begin);
      encoder.decode({sums.values, sums.scales}, chunks.begin(chunk) + begin, count);
    });
  };
  pipeline(chunks.number(), 1, contribute, reduce_shard, collect);
}

// All ranks count steps alike. In each, a rank sends and receives in one group of NCCL's what it is
// due, so nobody waits for a message that is sent only later. A partial sum goes on two steps after
// it came, so that it is added to while the step between moves other chunks; a result goes on at
// once.
void NcclCommunicator::compressed_ring(const Compressed& job, bool capturing) {
  const Encoder& encoder = job.encoder;
  const int ranks = world_size(), last = ranks - 1;
  const int right = (rank() + 1) % ranks, left = (rank() + last) % ranks;
  const int64_t most = settings_.wire_chunk_bytes, least = std::min(kRingLeastBytes, most);
  const int64_t fair = job.codec().wire_bytes(job.request.count) / (kRingChunksPerRank * ranks) + 1;
  const Chunks chunks = cut(encoder, job.request.count, std::min(std::max(fair, least), most));
  const auto wire_bytes = [&](int64_t chunk) {
    return job.codec().wire_bytes(chunks.count_of(chunk));
  };

  // A chunk's memory is another one's two steps later, when all that used it has been waited for.
  enum Part { kIn, kOut, kResult, kParts };  // the last rank's result is what goes out
  constexpr int kTurns = 2;
  const int64_t slot = job.slot_bytes(chunks.chunk_count);
  char* const memory = wire_memory(job.lane, kTurns * kParts * slot, capturing);
  const auto of = [&](int64_t chunk, Part part) {
    return memory + (chunk % kTurns * kParts + part) * slot;
  };

  // Which chunk's partial sum, or result, leaves a rank in a step; there may be none.
  const auto partial_from = [&](int64_t step, int from) { return step - 2 * from; };
  const auto result_from = [&](int64_t step, int from) {
    return step - 2 * last - (from == last ? 0 : from + 1);
  };
  const auto is_one = [&](int64_t chunk) { return chunk >= 0 && chunk < chunks.number(); };

  std::vector<Wire> wires;
  const auto compute = [&](int64_t step) {
    const int64_t chunk = partial_from(step, rank());
    if (is_one(chunk)) {
      const int64_t count = chunks.count_of(chunk);
      wires.clear();
      if (rank() > 0) wires.push_back(encoder.wire(of(chunk, kIn), count, 0));
      encoder.reduce(wires, static_cast<int>(wires.size()), chunks.begin(chunk), count,
                     encoder.place(of(chunk, kOut), count, 0), rank() == last);
    }
    const int64_t done = result_from(step - 2, left);
    if (rank() < last && is_one(done))
      encoder.decode(encoder.wire(of(done, kResult), chunks.count_of(done), 0), chunks.begin(done),
                     chunks.count_of(done));
  };
  // Returns whether there was anything to move.
  const auto exchange = [&](int64_t step) {
    const int64_t partial_out = partial_from(step, rank()), partial_in = partial_from(step, left);
    const int64_t result_out = result_from(step, rank()), result_in = result_from(step, left);
    const bool sends_partial = rank() < last && is_one(partial_out);
    const bool takes_partial = rank() > 0 && is_one(partial_in);
    const bool sends_result = rank() != last - 1 && is_one(result_out);
    const bool takes_result = rank() < last && is_one(result_in);
    if (ranks == 1 || !(sends_partial || takes_partial || sends_result || takes_result))
      return false;
    order(job, job.stream, job.transfers());
    in_nccl_group(job.lane, job.what, job.watch, [&](Comm) {
      if (sends_partial) send(job, of(partial_out, kOut), wire_bytes(partial_out), right);
      if (takes_partial) recv(job, of(partial_in, kIn), wire_bytes(partial_in), left);
      const Part result = rank() == last ? kOut : kResult;
      if (sends_result) send(job, of(result_out, result), wire_bytes(result_out), right);
      if (takes_result) recv(job, of(result_in, kResult), wire_bytes(result_in), left);
    });
    return true;
  };

  std::shared_ptr<void> moved[kTurns];  // by step: what a computation may have to wait for
  const int64_t steps = chunks.number() + 3 * last + 1;
  for (int64_t step = 0; step < steps; ++step) {
    if (const auto& before = moved[step % kTurns])
      cuda_->check(cuda_->stream_wait_event(job.stream, before.get(), 0), "cudaStreamWaitEvent");
    compute(step);
    moved[step % kTurns] = exchange(step) ? mark(job, job.transfers()) : moved[(step + 1) % kTurns];
  }
  if (ranks > 1) order(job, job.transfers(), job.stream);
}

}  // namespace pycomm::nccl
