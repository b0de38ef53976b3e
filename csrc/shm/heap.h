// Shared tensors: memory that all ranks of a communicator can read and write without copying.
//
// The segment holds a heap for each rank: address space that costs memory only where it is used. A
// rank hands out pieces of its own heap; peers reach them by rank and offset, with nothing to
// register, since they have mapped all heaps from the beginning.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "segment.h"

namespace pycomm {

class Heap : public std::enable_shared_from_this<Heap> {
 public:
  Heap(std::shared_ptr<Segment> segment, int rank);

  // Zeroed or used memory of this rank's heap, aligned to kAlignment; it stays valid as long as the
  // pointer lives, also when the communicator has ended. Throws Error when the heap is full.
  std::shared_ptr<void> allocate(int64_t bytes);

  // Where in this rank's heap `bytes` bytes lie; -1 if they do not.
  int64_t offset_of(const void* data, int64_t bytes) const {
    const int64_t offset = static_cast<const char*>(data) - base_;
    return offset >= 0 && bytes <= bytes_ && offset <= bytes_ - bytes ? offset : -1;
  }
  char* address(int rank, int64_t offset) const { return segment_->heap_of(rank) + offset; }

  static constexpr int64_t kAlignment = 4096;  // so that freed pieces are whole pages

 private:
  void release(int64_t offset, int64_t bytes);

  const std::shared_ptr<Segment> segment_;
  char* const base_;
  const int64_t bytes_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes; neighbours are merged
};

}  // namespace pycomm
