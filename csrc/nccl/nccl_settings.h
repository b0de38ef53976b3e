// What can be set of an NcclCommunicator.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "nccl_types.h"

namespace pycomm::nccl {

// How ranks see that they call the same: not at all; when an operation does not end; before each.
enum class CheckLevel { kOff, kLate, kFull };

struct NcclSettings {
  // Of NCCL's own configuration; what is not set is NCCL's choice.
  bool blocking = false;
  std::optional<int> cga_cluster_size, min_ctas, max_ctas, traffic_class, cta_policy, nvls_ctas;
  std::optional<int> collnet_enable;
  std::optional<std::string> net_name, comm_name;
  bool split_share = false, shrink_share = false;
  // Ours.
  int device = -1;            // the only one that tensors may be on; -1: any
  bool high_priority = true;  // of the stream of asynchronous operations
  CheckLevel check = CheckLevel::kLate;
  int records = 512;                            // of the flight recorder; a power of two or 0
  std::chrono::milliseconds heartbeat{1000};    // between two looks at the Store
  std::chrono::milliseconds abort_limit{5000};  // how long NCCL may take to end a communicator
};

}  // namespace pycomm::nccl
