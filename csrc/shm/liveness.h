// Notices that a peer's process has ended, by pidfd. Where pids do not carry over (another pid
// namespace, an old kernel) it notices nothing, and the deadline remains.
#pragma once

#include <cstdint>
#include <vector>

namespace pycomm {

class Liveness {
 public:
  ~Liveness();
  // Who I am, to be published: the pid, and the inode of the pid namespace that it belongs to.
  static int own_pid();
  static uint64_t own_pid_namespace();

  // Watches a peer; call in rank order.
  void watch(int pid, uint64_t pid_namespace);
  // True once the peer's process has ended.
  bool is_dead(int rank) const;  // false for ranks that are not watched

 private:
  std::vector<int> descriptors_;  // -1: cannot be watched
};

}  // namespace pycomm
