#include "liveness.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pycomm {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

int Liveness::own_pid() { return static_cast<int>(getpid()); }

uint64_t Liveness::own_pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<uint64_t>(status.st_ino) : 0;
}

void Liveness::watch(int pid, uint64_t pid_namespace) {
  const bool comparable =
      pid != own_pid() && pid_namespace != 0 && pid_namespace == own_pid_namespace();
  descriptors_.push_back(comparable ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1);
}

bool Liveness::is_dead(int rank) const {
  if (rank >= static_cast<int>(descriptors_.size()) || descriptors_[rank] < 0) return false;
  pollfd entry{descriptors_[rank], POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

Liveness::~Liveness() {
  for (const int descriptor : descriptors_)
    if (descriptor >= 0) close(descriptor);
}

}  // namespace pycomm
