// What /proc says of processes and of this machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pycomm {

struct ProcessStat {
  char state = 0;           // 'T': stopped, 't': traced, 'Z': ended, not yet waited for
  uint64_t start_time = 0;  // in the kernel's ticks; tells it from a later one with its pid
};
// None where there is no such process, or it is not shown.
std::optional<ProcessStat> stat_of(int pid);

// The same for processes that see each other's ids; 0 where it is unknown.
uint64_t own_pid_namespace();

// Another one after every start of the machine; empty where it is unknown.
std::string boot_id();

}  // namespace pycomm
