#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "../error.h"
#include "../random.h"

namespace pycomm {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMaxChannelBytes = 1 << 28;
constexpr int32_t kMaxRecords = 1 << 20;

char* map(int descriptor, int64_t bytes) {
  void* base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  PYCOMM_CHECK_SYSTEM(base != MAP_FAILED, "cannot map a shared segment of ", bytes,
                      " bytes (mostly address space of the shared heaps; a smaller "
                      "PYCOMM_HEAP_BYTES needs less)");
  return static_cast<char*>(base);
}

int duplicate(int descriptor) { return fcntl(descriptor, F_DUPFD_CLOEXEC, 0); }

int64_t heads_bytes(int world_size) {
  return round_up(world_size * world_size * static_cast<int64_t>(sizeof(ChannelHead)), kPageBytes);
}

int64_t records_bytes(int world_size, const ShmConfig& config) {
  return round_up(world_size * RecordRing::bytes(config.records), kPageBytes);
}

}  // namespace

int64_t Segment::area_offset(int rank) const {
  return round_up(sizeof(SegmentHead), kPageBytes) + rank * round_up(sizeof(RankArea), kPageBytes);
}

int64_t Segment::slots_offset(int rank) const {
  const ShmConfig& config = reinterpret_cast<const SegmentHead*>(base_)->config;
  return area_offset(world_size()) + rank * config.slots * config.slot_bytes;
}

int64_t Segment::records_offset() const { return channels_offset() + heads_bytes(world_size()); }

int64_t Segment::rings_offset() const {
  return records_offset() +
         records_bytes(world_size(), reinterpret_cast<const SegmentHead*>(base_)->config);
}

int64_t Segment::total_bytes(int world_size, const ShmConfig& config) {
  return round_up(sizeof(SegmentHead), kPageBytes) +
         world_size * (round_up(sizeof(RankArea), kPageBytes) + config.slots * config.slot_bytes +
                       config.heap_bytes) +
         heads_bytes(world_size) + records_bytes(world_size, config) +
         world_size * world_size * config.channel_bytes;
}

std::shared_ptr<Segment> Segment::create(int world_size, const ShmConfig& config, int* descriptor) {
  PYCOMM_CHECK(world_size >= 1 && world_size <= kMaxRanks, kInvalidArgument,
               "a shared-memory communicator holds 1 to ", kMaxRanks, " ranks, not ", world_size);
  PYCOMM_CHECK(
      config.slots >= 4 && config.slots <= 1024 && (config.slots & (config.slots - 1)) == 0,
      kInvalidArgument, "slots must be a power of two between 4 and 1024, not ", config.slots);
  PYCOMM_CHECK(config.slot_bytes >= kPageBytes && config.slot_bytes % kPageBytes == 0,
               kInvalidArgument, "slot_bytes must be a multiple of ", kPageBytes, ", not ",
               config.slot_bytes);
  PYCOMM_CHECK(config.heap_bytes >= 0 && config.heap_bytes % kPageBytes == 0, kInvalidArgument,
               "heap_bytes must be a multiple of ", kPageBytes, ", not ", config.heap_bytes);
  PYCOMM_CHECK(config.channel_bytes >= kPageBytes && config.channel_bytes <= kMaxChannelBytes &&
                   (config.channel_bytes & (config.channel_bytes - 1)) == 0,
               kInvalidArgument, "channel_bytes must be a power of two between ", kPageBytes,
               " and ", kMaxChannelBytes, ", not ", config.channel_bytes);
  PYCOMM_CHECK(config.records >= 0 && config.records <= kMaxRecords &&
                   (config.records & (config.records - 1)) == 0,
               kInvalidArgument, "records must be 0 or a power of two up to ", kMaxRecords,
               ", not ", config.records);
  const int64_t bytes = total_bytes(world_size, config);
  const int fd = memfd_create("pycomm", MFD_CLOEXEC);
  PYCOMM_CHECK_SYSTEM(fd >= 0, "memfd_create failed");
  std::shared_ptr<Segment> segment;
  try {
    PYCOMM_CHECK_SYSTEM(ftruncate(fd, bytes) == 0, "cannot size a shared segment to ", bytes,
                        " bytes");
    segment.reset(new Segment(map(fd, bytes), bytes, duplicate(fd)));
  } catch (...) {
    close(fd);
    throw;
  }
  SegmentHead& head = segment->head();
  head.world_size = world_size;
  head.config = config;
  head.nonce = random_word();
  *descriptor = fd;
  return segment;
}

std::shared_ptr<Segment> Segment::open(int descriptor, uint64_t nonce) {
  struct stat status;
  PYCOMM_CHECK_SYSTEM(fstat(descriptor, &status) == 0, "cannot inspect the shared segment");
  PYCOMM_CHECK(status.st_size >= static_cast<int64_t>(sizeof(SegmentHead)), kError,
               "the shared segment received has only ", status.st_size, " bytes");
  std::shared_ptr<Segment> segment(
      new Segment(map(descriptor, status.st_size), status.st_size, duplicate(descriptor)));
  const SegmentHead& head = segment->head();
  PYCOMM_CHECK(head.nonce == nonce && total_bytes(head.world_size, head.config) == status.st_size,
               kError, "the shared segment received is not the one that rank 0 offered");
  return segment;
}

Segment::~Segment() {
  close_descriptor();
  munmap(base_, static_cast<size_t>(bytes_));
}

void Segment::close_descriptor() {
  const int descriptor = descriptor_.exchange(-1);
  if (descriptor >= 0) close(descriptor);
}

}  // namespace pycomm
