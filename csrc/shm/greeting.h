// What rank 0 and the ranks that join it say to each other over the rendezvous' socket.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "../error.h"
#include "segment.h"
#include "unix_socket.h"

namespace pycomm {

// To be raised when the words below, or the meaning of anything in the segment, change.
inline constexpr uint32_t kProtocol = 2;

// Differs between builds whose segments are laid out differently, should kProtocol be forgotten.
constexpr uint32_t layout_of_segment() {
  uint32_t hash = 2166136261u;
  for (const size_t value : {sizeof(SegmentHead), sizeof(ShmConfig), sizeof(RankArea),
                             sizeof(ChannelHead), static_cast<size_t>(kMaxRanks)})
    hash = (hash ^ static_cast<uint32_t>(value)) * 16777619u;
  return hash;
}

inline constexpr size_t kSecretBytes = 32;  // hexadecimal digits: 128 random bits

std::string host_name();
// Where abstract sockets reach: this run of this kernel, and this network namespace. "-" if the
// system does not tell.
std::string place();

// What the Store holds, in this order and apart by spaces. Other versions may append fields.
struct Address {
  std::string name;  // of the socket
  std::string secret;
  uint64_t nonce = 0;  // of the segment
  std::string place;
  std::string host;

  std::string text() const;
  static Address parse(const std::string& text, int rank);
};

// A joining rank's first packet. Other versions may append fields, but must keep these, so that any
// two can refuse each other in words.
struct Greeting {
  char secret[kSecretBytes];
  uint32_t protocol;
  uint32_t layout;
  int32_t rank;
  int32_t world_size;  // 0: not to be compared
};

// All later packets, in both directions: a word and, for some, why.
enum class Word : uint8_t {
  kSegment = 1,  // from rank 0, with the descriptor
  kReady,        // the rank has mapped it
  kGo,           // all ranks have
  kRefused,      // rank 0 does not take this rank, or has given up: kind and text
  kUnknown,      // the secret is not that of this offer
  kGaveUp,       // from a rank that cannot go on: kind and text
};
struct Notice {
  Word word;
  ErrorKind kind = ErrorKind::kError;
  char text[2046] = "";

  explicit Notice(Word w) : word(w) {}
  Notice(Word w, ErrorKind k, const std::string& why) : word(w), kind(k) {
    std::memcpy(text, why.data(), std::min(why.size(), sizeof text - 1));
  }
};

inline bool say(int socket, const Notice& notice, int descriptor = -1) {
  const size_t bytes = offsetof(Notice, text) + std::strlen(notice.text);
  return send_packet(socket, &notice, bytes, descriptor);
}

// Into *notice goes what was said, whatever was sent.
inline Packet listen_to(int socket, Notice* notice) {
  *notice = Notice(Word{});
  Packet packet = receive_packet(socket, notice, sizeof *notice);
  notice->text[sizeof notice->text - 1] = '\0';
  if (notice->kind > ErrorKind::kAborted) notice->kind = ErrorKind::kError;
  return packet;
}

}  // namespace pycomm
