// A channel: messages of one rank to another, in order, through a ring of bytes in the segment.
//
// A message is a line with its header, and behind it its bytes, rounded up to lines. A short one
// fits into the header's line. A long one streams: both sides move it in pieces, at the same time.
// The source alone writes `written`, the destination alone `read`; the bytes between the two are
// under way. One thread at a time uses either end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../algorithms/choose.h"
#include "../common.h"
#include "../kernels/elementwise.h"
#include "segment.h"
#include "wait.h"

namespace pycomm {

struct MessageHeader {
  int64_t count;
  int32_t tag;
  DType dtype;

  int64_t bytes() const { return count * bytes_of(dtype); }
};
// What travels in the header's own line.
inline constexpr int64_t kInlineBytes = kLineBytes - sizeof(MessageHeader);
// What is copied between two looks at the other end: shorter ones cost more flags, longer ones let
// it wait. An eighth of the message, so that also of a short one most is copied by both at once.
inline int64_t piece_bytes(int64_t message_bytes) {
  const int64_t least = 8 << 10, most = 128 << 10;
  return round_up(std::clamp(message_bytes / 8, least, most), kLineBytes);
}
// Of a message of which not even the header has been moved.
inline constexpr int64_t kNotBegun = -1;

// What both ends know of the ring.
class Ring {
 public:
  Ring(char* bytes, int64_t capacity) : bytes_(bytes), capacity_(capacity) {}
  int64_t capacity() const { return capacity_; }
  char* line(uint64_t position) const { return bytes_ + offset(position); }

  void put(uint64_t position, const char* from, int64_t bytes) const {
    const int64_t first = until_end(position, bytes);
    copy(line(position), from, first, false);
    if (first < bytes) copy(bytes_, from + first, bytes - first, false);
  }
  void get(uint64_t position, char* to, int64_t bytes, bool stream) const {
    const int64_t first = until_end(position, bytes);
    copy(to, line(position), first, stream);
    if (first < bytes) copy(to + first, bytes_, bytes - first, stream);
  }

 private:
  int64_t offset(uint64_t position) const {
    return static_cast<int64_t>(position) & (capacity_ - 1);
  }
  int64_t until_end(uint64_t position, int64_t bytes) const {
    return std::min(bytes, capacity_ - offset(position));
  }

  char* bytes_;
  int64_t capacity_;
};

class ChannelWriter {
 public:
  ChannelWriter(ChannelHead& head, Ring ring) : head_(head), ring_(ring) {}

  // Writes the next piece of a message of which `moved` bytes are written, as far as there is
  // room, and publishes it. False if there was none. The message is complete when moved == bytes.
  bool write(const MessageHeader& header, const void* data, int64_t bytes, int64_t* moved) {
    const int64_t most = piece_bytes(bytes);
    int64_t room = room_for(std::min(bytes + kLine, most));
    if (room == 0) return false;
    if (*moved == kNotBegun) {
      char* line = ring_.line(written_);
      std::memcpy(line, &header, sizeof header);
      *moved = bytes <= kInlineBytes ? bytes : 0;
      if (*moved > 0) std::memcpy(line + sizeof header, data, static_cast<size_t>(bytes));
      written_ += kLine;
      room -= kLine;
    }
    // Room and pieces are whole lines, so only a message's last piece is rounded up.
    const int64_t piece = std::min({bytes - *moved, room, most});
    if (piece > 0) {
      ring_.put(written_, static_cast<const char*>(data) + *moved, piece);
      written_ += static_cast<uint64_t>(round_up(piece, kLine));
      *moved += piece;
    }
    store_ordered(head_.written, written_);
    return true;
  }

 private:
  static constexpr int64_t kLine = kLineBytes;

  // At least one line if there is any; looks at the reader's counter only if what it knows of it
  // leaves less than `wanted`.
  int64_t room_for(int64_t wanted) {
    const auto room = [this] { return ring_.capacity() - static_cast<int64_t>(written_ - read_); };
    if (room() < wanted) read_ = load_ordered(head_.read);
    return room();
  }

  ChannelHead& head_;
  Ring ring_;
  uint64_t written_ = 0;
  uint64_t read_ = 0;  // last seen
};

class ChannelReader {
 public:
  ChannelReader(ChannelHead& head, Ring ring) : head_(head), ring_(ring) {}

  // Whether bytes have arrived that were not read yet.
  bool has_news() {
    if (written_ == read_) written_ = load_ordered(head_.written);
    return written_ != read_;
  }

  // The header of the next message; only if the last one is complete and there is news.
  MessageHeader header() const {
    MessageHeader header;
    std::memcpy(&header, ring_.line(read_), sizeof header);
    return header;
  }

  // Reads the next piece of a message of which `moved` bytes are read, as far as it has arrived.
  // False if nothing has. Frees the room, but tells the writer only of larger parts: a line that
  // both ranks write to costs as much as a short message. Sets *freed if it did tell.
  bool read(void* data, int64_t bytes, int64_t* moved, bool* freed) {
    if (!has_news()) return false;
    if (*moved == kNotBegun) {
      *moved = bytes <= kInlineBytes ? bytes : 0;
      if (*moved > 0)
        std::memcpy(data, ring_.line(read_) + sizeof(MessageHeader), static_cast<size_t>(bytes));
      read_ += kLineBytes;
    }
    const int64_t arrived = static_cast<int64_t>(written_ - read_);
    const int64_t piece = std::min({bytes - *moved, arrived, piece_bytes(bytes)});
    if (piece > 0) {
      ring_.get(read_, static_cast<char*>(data) + *moved, piece,
                stream_output(Operation::kRecv, bytes));
      read_ += static_cast<uint64_t>(round_up(piece, kLineBytes));
      *moved += piece;
    }
    *freed = static_cast<int64_t>(read_ - freed_) >= ring_.capacity() / 8;
    if (*freed) store_ordered(head_.read, freed_ = read_);
    return true;
  }

 private:
  ChannelHead& head_;
  Ring ring_;
  uint64_t written_ = 0;  // last seen
  uint64_t read_ = 0;
  uint64_t freed_ = 0;  // of `read_`, what the writer has been told
};

}  // namespace pycomm
