#include "unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../interrupt.h"

namespace pycomm {
namespace {

// So many callers may wait to be accepted; the kernel turns the others away for the moment.
constexpr int kBacklog = 256;

// An abstract address: sun_path begins with a zero byte.
socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof address->sun_path - 1);
  std::memcpy(address->sun_path + 1, name.data(), length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

Descriptor new_socket() {
  return Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Room for one descriptor in a message's control data. No more: what a message carries beyond it,
// the kernel closes.
struct DescriptorRoom {
  alignas(cmsghdr) char bytes[CMSG_LEN(sizeof(int))] = {};
};

}  // namespace

Descriptor listen_at(const std::string& name) {
  Descriptor listener = new_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener.get(), kBacklog) != 0)
    return Descriptor();
  return listener;
}

Descriptor connect_to(const std::string& name) {
  Descriptor connection = new_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  if (!connection ||
      connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    const int reason = errno;
    connection.reset();
    errno = reason;
  }
  return connection;
}

Descriptor accept_from(int listener) {
  return Descriptor(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

bool peer_user(int socket, uid_t* user) {
  ucred credentials;
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
  *user = credentials.uid;
  return true;
}

bool send_packet(int socket, const void* data, size_t bytes, int descriptor) {
  iovec part{const_cast<void*>(data), bytes};
  DescriptorRoom room;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = room.bytes;
    message.msg_controllen = sizeof room.bytes;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

Packet receive_packet(int socket, void* buffer, size_t bytes) {
  iovec part{buffer, bytes};
  DescriptorRoom room;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room.bytes;
  message.msg_controllen = sizeof room.bytes;
  constexpr int kFlags = MSG_CMSG_CLOEXEC | MSG_TRUNC;
  ssize_t length = recvmsg(socket, &message, kFlags);
  // The other end closed without reading what we sent. The kernel says so before it hands out what
  // the other end had sent, but only once.
  if (length < 0 && errno == ECONNRESET) length = recvmsg(socket, &message, kFlags);
  Packet packet;
  if (length < 0 && (errno == EAGAIN || errno == EINTR)) return packet;
  packet.arrival = length > 0 ? Arrival::kPacket : Arrival::kEnd;
  packet.bytes = length > 0 ? static_cast<size_t>(length) : 0;
  const cmsghdr* header = length > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    packet.descriptor.reset(descriptor);
  }
  return packet;
}

bool wait_readable(int socket, std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    pollfd entry{socket, POLLIN, 0};
    if (poll(&entry, 1, static_cast<int>(kSleep.count())) > 0) return true;
    check_interrupt();
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

}  // namespace pycomm
