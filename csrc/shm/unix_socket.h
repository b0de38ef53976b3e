// Sockets between the processes of one host: abstract names, so that no file exists, and packets,
// so that a message arrives whole or not at all. A packet may carry a file descriptor.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>

namespace pycomm {

// Owns a file descriptor, or none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// None of these sockets ever blocks. An empty Descriptor means failure, with its reason in errno.
Descriptor listen_at(const std::string& name);
// Fails with ECONNREFUSED if nobody listens, with EAGAIN while too many others wait to be accepted.
Descriptor connect_to(const std::string& name);
Descriptor accept_from(int listener);

// The user who runs the process at the other end, when it connected or began to listen.
bool peer_user(int socket, uid_t* user);

// False: the other end is gone, or hears nothing.
bool send_packet(int socket, const void* data, size_t bytes, int descriptor = -1);

// What lay in a socket: its length may exceed the buffer, and the rest is lost then.
enum class Arrival { kNothing, kPacket, kEnd };
struct Packet {
  Arrival arrival = Arrival::kNothing;
  size_t bytes = 0;
  Descriptor descriptor;  // what travelled along; one at most
};
Packet receive_packet(int socket, void* buffer, size_t bytes);

// Waits for something to read or an end, in slices, so that interrupts are heard. False: the time
// is over.
bool wait_readable(int socket, std::chrono::steady_clock::time_point deadline);

}  // namespace pycomm
