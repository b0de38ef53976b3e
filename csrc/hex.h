// Bytes as text for a Store.
#pragma once

#include <cstddef>
#include <string>

namespace pycomm {

inline std::string to_hex(const void* bytes, size_t count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t at = 0; at < count; ++at) {
    const auto byte = static_cast<const unsigned char*>(bytes)[at];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// False, and nothing is written, if the text is not that of so many bytes.
inline bool from_hex(const std::string& text, void* bytes, size_t count) {
  if (text.size() != 2 * count || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return false;
  for (size_t at = 0; at < count; ++at)
    static_cast<unsigned char*>(bytes)[at] =
        static_cast<unsigned char>(std::stoi(text.substr(2 * at, 2), nullptr, 16));
  return true;
}

}  // namespace pycomm
