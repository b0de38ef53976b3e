#include "library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "../error.h"

namespace pycomm::nccl {

std::vector<std::string> loaded_libraries(const std::string& prefix) {
  std::vector<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path == std::string::npos) continue;
    const std::string file = line.substr(path);
    if (file.compare(file.rfind('/') + 1, prefix.size(), prefix) == 0 &&
        std::find(found.begin(), found.end(), file) == found.end())
      found.push_back(file);
  }
  return found;
}

std::string find_library(const std::string& path, const std::vector<std::string>& loaded,
                         const std::vector<std::string>& candidates) {
  if (!path.empty()) return path;
  if (!loaded.empty()) return loaded.front();
  for (const std::string& candidate : candidates)
    if (access(candidate.c_str(), R_OK) == 0) return candidate;
  return {};
}

void* open_library(const std::string& path, const char* name) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  PYCOMM_CHECK(library, kError, name, " does not load: ", dlerror());
  return library;
}

}  // namespace pycomm::nccl
