// What a rank tells the others about its region of peer memory, as text.
#pragma once

#include <cstdint>
#include <string>

#include "peer_layout.h"

namespace pycomm {

struct PeerHandle {
  static constexpr int kIpcBytes = 64;  // of a cudaIpcMemHandle_t

  std::string host;      // the kernel's boot id: the same for all containers of a machine
  int64_t process = 0;   // by chance: containers of a machine may have equal process ids
  uint64_t address = 0;  // of the region in that process
  std::string device;    // its PCI address
  PeerLayout layout;
  unsigned char ipc[kIpcBytes] = {};

  std::string text() const;
  // Throws kInvalidArgument for what text() did not write.
  static PeerHandle parse(const std::string& text);
  // This host and process.
  static PeerHandle here();
};

// Why the rank that has `mine` can never map `theirs`, in words; "" if nothing speaks against it.
std::string why_not_mapped(const PeerHandle& mine, const PeerHandle& theirs);

}  // namespace pycomm
