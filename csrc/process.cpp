#include "process.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "error.h"

namespace pycomm {

// What stands behind the command's name, which may itself hold blanks and brackets:
// proc_pid_stat(5).
std::optional<ProcessStat> stat_of(int pid) {
  const int file = open(concat("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  char text[1024] = "";
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  const char* end = length > 0 ? std::strrchr(text, ')') : nullptr;
  if (!end) return {};
  std::istringstream fields(end + 1);
  ProcessStat result;
  fields >> result.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  if (!(fields >> result.start_time)) return {};
  return result;
}

uint64_t own_pid_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<uint64_t>(status.st_ino) : 0;
}

std::string boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

}  // namespace pycomm
