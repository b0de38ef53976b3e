// The line of the user's Python program that the calling thread stands in: see call_site.h.
#pragma once

#include <string>

namespace pycomm {

// "train.py:88 in step": the innermost frame that is neither in a file under one of the folders nor
// in the standard library's contextlib. Empty for a thread that runs no Python code.
std::string python_call_site();
// Folders whose files are not the user's, such as torch's.
void skip_files_under(const std::string& folder);

}  // namespace pycomm
