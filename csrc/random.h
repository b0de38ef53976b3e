// Numbers that nobody else has by chance: names, secrets, marks in memory.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "hex.h"

namespace pycomm {

inline uint64_t random_word() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// So many hexadecimal digits, a multiple of 16.
inline std::string random_hex(size_t digits) {
  std::string text;
  while (text.size() < digits) {
    const uint64_t word = random_word();
    text += to_hex(&word, sizeof word);
  }
  return text;
}

}  // namespace pycomm
