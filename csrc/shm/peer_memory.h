// Reading another rank's private memory, where the kernel lets us: one copy where slots need two.
//
// process_vm_readv needs the same user and no ptrace restriction (Yama's ptrace_scope 0, or
// CAP_SYS_PTRACE). Ranks try it on each other when they meet, and use it only if all of them can.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace pycomm {

// `from` is an address of that process. False: errno says why.
inline bool read_peer_memory(pid_t process, uint64_t from, void* to, int64_t bytes) {
  constexpr int64_t kMostAtOnce = 1 << 30;  // the kernel stops short of 2 GiB
  char* target = static_cast<char*>(to);
  while (bytes > 0) {
    const size_t size = static_cast<size_t>(std::min(bytes, kMostAtOnce));
    const iovec local{target, size}, remote{reinterpret_cast<void*>(from), size};
    const ssize_t moved = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (moved <= 0) {
      if (moved == 0) errno = EFAULT;
      return false;
    }
    target += moved;
    from += static_cast<uint64_t>(moved);
    bytes -= moved;
  }
  return true;
}

}  // namespace pycomm
