// Memory from ncclMemAlloc, which NCCL can use in place and map to other ranks: for
// Communicator::allocate, and for torch's memory pools.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_api.h"
#include "nccl_api.h"
#include "registration.h"

namespace pycomm::nccl {

class NcclMemory {
 public:
  using Apis = std::pair<std::shared_ptr<const NcclApi>, std::shared_ptr<const CudaApi>>;
  struct Segment {
    void* data;
    int64_t bytes;
    int device;
    uint64_t number;  // in the order of their making
  };

  // The process's; it outlives static destruction, since torch frees at the very end.
  static NcclMemory& instance();

  // `what`: for errors, who wants it.
  void* allocate(const Apis& apis, int64_t bytes, int device, const std::string& what);
  // With what it is registered as. Does nothing to memory that is not from here.
  void free(void* data);
  // To be undone before the memory that has `data` in it goes, if that is from here.
  void note(const void* data, const std::shared_ptr<Registration>& registration);
  std::vector<Segment> segments() const;  // in the order of their making

  // For torch's pools, which name a size and a device only.
  void serve_pools(Apis apis);
  void* allocate_for_pool(int64_t bytes, int device);  // null: as torch wants it, if there is none
  std::string last_failure() const;                    // why it was null; empty: it never was

 private:
  struct Held {
    Segment segment;
    Apis apis;
    std::vector<std::weak_ptr<Registration>> registrations;
  };

  mutable std::mutex mutex_;
  std::map<const void*, Held> held_;
  uint64_t made_ = 0;
  Apis for_pools_;
  std::string last_failure_;
};

}  // namespace pycomm::nccl
