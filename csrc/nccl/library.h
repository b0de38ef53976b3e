// Shared libraries that are found and opened while the process runs.
#pragma once

#include <string>
#include <vector>

namespace pycomm::nccl {

// The files of this process's memory map whose name begins like this: "libnccl.so".
std::vector<std::string> loaded_libraries(const std::string& prefix);

// The file to open: `path` if it is not empty, the first that is loaded, or the first candidate
// that can be read; else empty.
std::string find_library(const std::string& path, const std::vector<std::string>& loaded,
                         const std::vector<std::string>& candidates);

// Opens it for the process's life. Throws Error: "the NCCL library does not load: ...".
void* open_library(const std::string& path, const char* name);

}  // namespace pycomm::nccl
