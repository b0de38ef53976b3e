// all_reduce of encoded values through NCCL, as algorithms/compressed.h does it through slots: the
// kernel where that encodes, sums and decodes, and NCCL where it posts and awaits.
//
// one_shot: each rank encodes all it has, all get it, all sum. Small tensors.
// two_shot: each rank sends every other one its shard, sums the own one, and sends all the sum. In
// chunks, whose kernels run on the operation's stream while NCCL moves others on a second one.
#include <algorithm>
#include <vector>

#include "../algorithms/encoder.h"
#include "../slots.h"
#include "nccl_communicator.h"

namespace pycomm::nccl {
namespace {

constexpr int64_t kOneShotBytes = 64 << 10;  // encoded, of all ranks; not measured on a GPU yet
constexpr int kBuffers = 3;                  // chunks that are encoded, summed, decoded at a time

}  // namespace

// What the parts of one operation share.
struct NcclCommunicator::Compressed {
  const Request& request;
  const Encoder& encoder;
  Lane& lane;
  Stream stream;
  const std::string& what;
  const Watch& watch;

  int64_t wire_bytes(int64_t count) const { return encoder.codec().wire_bytes(count); }
};

// From now on `later` runs behind what `earlier` has.
void NcclCommunicator::order(const Compressed& job, Stream earlier, Stream later) {
  const std::shared_ptr<void> event = job.lane.events->take();
  cuda_->check(cuda_->event_record(event.get(), earlier), "cudaEventRecord");
  cuda_->check(cuda_->stream_wait_event(later, event.get(), 0), "cudaStreamWaitEvent");
}

// The device's memory for encoded values, of at least so many bytes.
char* NcclCommunicator::wire_memory(Lane& lane, int64_t bytes, bool capturing) {
  if (lane.wire_bytes >= bytes) return lane.wire;
  PYCOMM_CHECK(!capturing, kInvalidArgument, "rank ", rank(),
               ": a compressed all_reduce takes memory when it is first called; call it once "
               "before a graph is captured");
  void* memory = nullptr;
  cuda_->check(cuda_->malloc(&memory, static_cast<size_t>(bytes)), "cudaMalloc");
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
  const Encoder encoder(compression, false, [&](const TranscodeCall& call) {
    codec_->run(call, compression.tensors, stream);
  });
  const Compressed job{request, encoder, lane, stream, what, watch};
  const bool is_small = job.wire_bytes(request.count) * world_size() <= kOneShotBytes;
  if (request.algorithm == Algorithm::kOneShot ||
      (request.algorithm == Algorithm::kAuto && is_small))
    compressed_one_shot(job, capturing);
  else
    compressed_two_shot(job, capturing);
}

void NcclCommunicator::compressed_one_shot(const Compressed& job, bool capturing) {
  const int64_t count = job.request.count;
  const int64_t slot = round_up(job.wire_bytes(count), static_cast<int64_t>(kLineBytes));
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

void NcclCommunicator::compressed_two_shot(const Compressed& job, bool capturing) {
  const Encoder& encoder = job.encoder;
  const int ranks = world_size();
  const Chunks chunks{
      job.request.count,
      std::min(std::max(encoder.capacity(settings_.wire_chunk_bytes), encoder.codec().granule()),
               round_up(job.request.count, encoder.codec().granule()))};
  const auto shard = [&](int64_t chunk, int owner) {
    return shard_of(chunks.count_of(chunk), ranks, owner, encoder.codec().granule());
  };
  const int64_t most = shard_of(chunks.chunk_count, ranks, 0, encoder.codec().granule()).count;
  const int64_t slot = round_up(job.wire_bytes(most), static_cast<int64_t>(kLineBytes));
  // Of each buffer: what goes to each rank, what came from each, and all sums.
  enum Part { kOut, kIn, kSums, kParts };
  char* const memory = wire_memory(job.lane, kBuffers * kParts * ranks * slot, capturing);
  const auto of = [&](int64_t chunk, Part part, int peer) {
    return memory + ((chunk % kBuffers * kParts + part) * ranks + peer) * slot;
  };
  const Stream transfers = job.lane.transfers;
  const auto each_peer = [&](auto&& act) {
    for (int step = 1; step < ranks; ++step) act((rank() + step) % ranks);
  };

  const auto contribute = [&](int64_t chunk) {
    each_peer([&](int peer) {
      const Shard s = shard(chunk, peer);
      if (s.count > 0)
        encoder.encode(chunks.begin(chunk) + s.begin, s.count,
                       encoder.place(of(chunk, kOut, peer), most, 0));
    });
    order(job, job.stream, transfers);
    in_nccl_group(job.lane, job.what, job.watch, [&](Comm comm) {
      each_peer([&](int peer) {
        const auto bytes = static_cast<size_t>(slot);
        if (shard(chunk, peer).count > 0)
          api_->check(
              api_->send(of(chunk, kOut, peer), bytes, DataType::kUInt8, peer, comm, transfers),
              job.what, comm);
        if (shard(chunk, rank()).count > 0)
          api_->check(
              api_->recv(of(chunk, kIn, peer), bytes, DataType::kUInt8, peer, comm, transfers),
              job.what, comm);
      });
    });
  };
  std::vector<Wire> wires;
  const auto reduce_shard = [&](int64_t chunk) {
    const Shard mine = shard(chunk, rank());
    order(job, transfers, job.stream);
    wires.clear();
    for (int peer = 0; peer < ranks; ++peer)
      if (peer != rank()) wires.push_back(encoder.wire(of(chunk, kIn, peer), most, 0));
    if (mine.count > 0)
      encoder.reduce(wires, rank(), chunks.begin(chunk) + mine.begin, mine.count,
                     encoder.place(of(chunk, kSums, rank()), most, 0), true);
    order(job, job.stream, transfers);
    in_nccl_group(job.lane, job.what, job.watch, [&](Comm comm) {
      api_->check(api_->all_gather(of(chunk, kSums, rank()), of(chunk, kSums, 0),
                                   static_cast<size_t>(slot), DataType::kUInt8, comm, transfers),
                  job.what, comm);
    });
  };
  const auto collect = [&](int64_t chunk) {
    order(job, transfers, job.stream);
    each_peer([&](int peer) {
      const Shard s = shard(chunk, peer);
      if (s.count > 0)
        encoder.decode(encoder.wire(of(chunk, kSums, peer), most, 0), chunks.begin(chunk) + s.begin,
                       s.count);
    });
  };
  pipeline(chunks.number(), 1, contribute, reduce_shard, collect);
}

}  // namespace pycomm::nccl
