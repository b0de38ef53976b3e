#include "heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "../error.h"

namespace pycomm {
namespace {
// Freed pieces of this size go back to the system; smaller ones are cheaper to keep than to fault
// in again.
constexpr int64_t kReturnBytes = 1 << 20;
}  // namespace

Heap::Heap(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)),
      base_(segment_->heap_of(rank)),
      bytes_(segment_->head().config.heap_bytes) {
  if (bytes_ > 0) free_[0] = bytes_;
}

// First fit: pieces are few and live long.
std::shared_ptr<void> Heap::allocate(int64_t bytes) {
  PYCOMM_CHECK(bytes >= 0, kInvalidArgument, "cannot allocate ", bytes, " bytes of shared memory");
  const int64_t wanted = round_up(std::max<int64_t>(bytes, 1), kAlignment);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = std::find_if(free_.begin(), free_.end(),
                                  [wanted](const auto& free) { return free.second >= wanted; });
  PYCOMM_CHECK(piece != free_.end(), kError, "no room for ", bytes,
               " bytes in this rank's shared heap of ", bytes_,
               "; free shared tensors, or set PYCOMM_HEAP_BYTES before the group is made");
  const auto [offset, available] = *piece;
  free_.erase(piece);
  if (available > wanted) free_[offset + wanted] = available - wanted;
  return {base_ + offset, [self = shared_from_this(), offset = offset, wanted](void*) {
            self->release(offset, wanted);
          }};
}

void Heap::release(int64_t offset, int64_t bytes) {
  if (bytes >= kReturnBytes)
    madvise(base_ + offset, static_cast<size_t>(bytes), MADV_REMOVE);  // failing costs memory only
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace pycomm
