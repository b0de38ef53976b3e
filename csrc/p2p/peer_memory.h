// One rank's peer memory: a region on its device, mapped by the other ranks of the host, and
// all_reduce over it in one kernel.
//
// Made in two steps: the constructor makes the region; handle() goes to all other ranks, by
// whatever way there is (a Store); connect() maps theirs. Every rank then makes the same calls in
// the same order, on one stream each or on streams that are ordered. All ranks must be past their
// last operation before one of them closes.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "peer_cuda.h"
#include "peer_handle.h"

namespace pycomm {

class PeerMemory {
 public:
  // Throws kInvalidArgument for a layout that there cannot be, kError where there is no device.
  // `timeout`: about how long a kernel waits for another rank.
  PeerMemory(int device, int rank, int world_size, const PeerLayout& layout,
             std::chrono::milliseconds timeout);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int device() const { return device_; }
  int rank() const { return group_.rank; }
  int world_size() const { return group_.world_size; }
  const PeerLayout& layout() const { return group_.layout; }
  std::string handle() const { return handle_.text(); }

  // Of all ranks, by rank. Throws kError, naming the rank and the reason, where one cannot be
  // mapped: the ranks should then use NCCL, all of them.
  void connect(const std::vector<std::string>& handles);

  // As in peer_cuda.h. Throw what check() does first.
  void all_reduce(Algorithm algorithm, DType dtype, ReduceOp op, const void* input, void* output,
                  int64_t count, void* stream, const double* scales = nullptr);
  void compressed_all_reduce(Algorithm algorithm, const PeerCompressionCall& call, void* stream);

  // Throws kTimeout or kAborted if a kernel of this rank gave up; waits for none. Then nothing of
  // what was launched since has results, and the memory serves no more.
  void check() const;
  // Ends the waits of this rank's kernels, and those of all ranks that wait for it.
  void abort();

 private:
  void map(int peer, const PeerHandle& theirs);
  void* open(const PeerHandle& theirs);
  void check_residents(const std::vector<PeerHandle>& handles) const;
  void check_connected() const;
  template <class Launch>
  void launch(Launch&& start);

  const int device_;
  const std::chrono::milliseconds timeout_;
  PeerGroup group_{};
  PeerHandle handle_;
  std::vector<void*> opened_;
  void* side_stream_ = nullptr;
  bool connected_ = false;
};

// What a status says, as an exception; for PeerMemory::check().
void throw_peer_status(const PeerStatus& status, std::chrono::milliseconds timeout);

}  // namespace pycomm
