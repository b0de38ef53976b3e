// Ranks that all_reduce over peer memory on the CPU: as threads, or as processes that map each
// other's regions at addresses of their own; and the algorithms of csrc/algorithms on the CPU's own
// kernels, which say what the results must be.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/p2p/peer_layout.h"
#include "../../csrc/slots.h"
#include "checks.h"

namespace peer_world {

using namespace pycomm;

template <class Rank>
void on_threads(int world_size, Rank&& rank) {
  std::vector<std::thread> threads;
  for (int number = 0; number < world_size; ++number)
    threads.emplace_back([&rank, number] { rank(number); });
  for (std::thread& thread : threads) thread.join();
}

// Every rank in a process of its own; whether all ended well.
template <class Rank>
bool on_processes(int world_size, Rank&& rank) {
  std::vector<pid_t> children;
  for (int number = 0; number < world_size; ++number) {
    const pid_t child = fork();
    if (child == 0) {
      rank(number);
      _exit(0);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = -1;
    good = waitpid(child, &status, 0) == child && status == 0 && good;
  }
  return good;
}

// Memory that several processes map, each wherever it likes.
class Shared {
 public:
  explicit Shared(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    file_ = memfd_create("pycomm-test", 0);
    if (file_ < 0 || ftruncate(file_, bytes) != 0) throw std::runtime_error("memfd");
  }
  ~Shared() { close(file_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  char* map() const {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    return static_cast<char*>(memory);
  }

 private:
  size_t bytes_;
  int file_;
};

// The regions and status of all ranks, in this process.
class World {
 public:
  World(int world_size, const PeerLayout& layout, uint64_t most_polls)
      : layout_(layout), most_polls_(most_polls), statuses_(static_cast<size_t>(world_size)) {
    for (int rank = 0; rank < world_size; ++rank) {
      regions_.emplace_back(layout.region_bytes());
      std::memset(regions_.back().data(), 0, static_cast<size_t>(layout.region_bytes()));
    }
  }
  int size() const { return static_cast<int>(regions_.size()); }
  const PeerLayout& layout() const { return layout_; }
  PeerStatus& status(int rank) { return statuses_[static_cast<size_t>(rank)]; }
  char* region(int rank) { return regions_[static_cast<size_t>(rank)].data(); }
  PeerGroup group(int rank) {
    PeerGroup group{};
    for (int peer = 0; peer < size(); ++peer) group.regions[peer] = region(peer);
    group.status = &status(rank);
    group.most_polls = rank == patient_ ? uint64_t{1} << 40 : most_polls_;
    group.layout = layout_;
    group.rank = rank;
    group.world_size = size();
    return group;
  }
  // One rank whose waits have no bound: the others report first.
  void set_patient(int rank) { patient_ = rank; }
  // As if all operations so far had had so many chunks.
  void begin_at(uint64_t chunks) {
    for (int rank = 0; rank < size(); ++rank)
      for (int block = 0; block < layout_.blocks; ++block) {
        std::memcpy(region(rank) + layout_.sequence_offset(block), &chunks, sizeof chunks);
        for (int stage = 0; stage < kStages; ++stage)
          for (int peer = 0; peer < size(); ++peer)
            std::memcpy(region(rank) + layout_.flag_offset(block, static_cast<Stage>(stage), peer),
                        &chunks, sizeof chunks);
      }
  }

 private:
  PeerLayout layout_;
  uint64_t most_polls_;
  int patient_ = -1;
  std::vector<checks::Array<char>> regions_;
  std::vector<PeerStatus> statuses_;
};

// The verbs of slots.h over plain memory, for the reference.
struct HostMemory {
  HostMemory(int world_size, int64_t slot_bytes, int64_t slots)
      : world_size(world_size), slot_bytes(slot_bytes), slots(slots) {
    for (int rank = 0; rank < world_size; ++rank) memory.emplace_back(slot_bytes * slots);
  }
  int world_size;
  int64_t slot_bytes, slots;
  std::vector<checks::Array<char>> memory;
  std::atomic<int64_t> flags[kMostPeers][kStages] = {};
};
class HostSlots {
 public:
  static constexpr int kMostRanks = kMostPeers;

  HostSlots(HostMemory& memory, int rank) : memory_(memory), rank_(rank) {}
  int rank() const { return rank_; }
  int world_size() const { return memory_.world_size; }
  int64_t slots() const { return memory_.slots; }
  int64_t slot_bytes() const { return memory_.slot_bytes; }
  char* mine(int64_t chunk) { return slot(rank_, chunk); }
  const char* of(int peer, int64_t chunk) { return slot(peer, chunk); }
  void acquire(int64_t chunk) {
    for (int peer = 0; peer < world_size(); ++peer)
      if (peer != rank_) wait(peer, Stage::kDrained, chunk - slots() + 1);
  }
  void post(Stage stage, int64_t chunk) {
    memory_.flags[rank_][static_cast<int>(stage)].store(chunk + 1, std::memory_order_release);
  }
  void await(int peer, Stage stage, int64_t chunk) { wait(peer, stage, chunk + 1); }

 private:
  char* slot(int rank, int64_t chunk) {
    return memory_.memory[static_cast<size_t>(rank)].data() + chunk % slots() * slot_bytes();
  }
  void wait(int peer, Stage stage, int64_t chunks) const {
    const auto& flag = memory_.flags[peer][static_cast<int>(stage)];
    while (flag.load(std::memory_order_acquire) < chunks) std::this_thread::yield();
  }
  HostMemory& memory_;
  int rank_;
};

}  // namespace peer_world
