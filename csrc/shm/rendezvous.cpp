#include "rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <sstream>
#include <vector>

#include "../error.h"
#include "../interrupt.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSecretBytes = 32;  // hexadecimal digits: 128 random bits
constexpr std::chrono::milliseconds kGreetingTime{2000};

// What a joining rank says first.
struct Greeting {
  char secret[kSecretBytes];
  int32_t rank;
};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string random_hex() {
  std::random_device device;
  std::string text;
  for (int word = 0; word < kSecretBytes / 8; ++word) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(device()));
    text += digits;
  }
  return text;
}

// An abstract address: sun_path begins with a zero byte, and no file exists.
socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

// Waits until the socket is ready for `events`, in slices, so that interrupts are heard.
bool wait_ready(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    if (poll(&entry, 1, static_cast<int>(kSleep.count())) > 0) return true;
    check_interrupt();
    if (Clock::now() >= deadline) return false;
  }
}

// A message of one byte that carries a descriptor.
struct DescriptorMessage {
  char byte = 'd';
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};

  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
};

bool send_descriptor(int connection, int descriptor) {
  DescriptorMessage packet;
  cmsghdr* header = CMSG_FIRSTHDR(&packet.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  return sendmsg(connection, &packet.message, MSG_NOSIGNAL) == 1;
}

int receive_descriptor(int connection) {
  DescriptorMessage packet;
  if (recvmsg(connection, &packet.message, MSG_CMSG_CLOEXEC) != 1) return -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&packet.message);
  if (!header || header->cmsg_type != SCM_RIGHTS) return -1;
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return descriptor;
}

// Time that does not depend on how long the secrets agree.
bool same_secret(const char* a, const char* b) {
  unsigned difference = 0;
  for (int i = 0; i < kSecretBytes; ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

ShmOffer::ShmOffer(int world_size, const ShmConfig& config) : secret_(random_hex()) {
  segment_ = Segment::create(world_size, config, &segment_descriptor_);
  const std::string name = "pycomm-" + random_hex();
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  PYCOMM_CHECK_SYSTEM(listener_ >= 0 &&
                          bind(listener_, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                          listen(listener_, kMaxRanks) == 0,
                      "rank 0 cannot open the socket that hands out its shared segment");
  address_ = concat(name, " ", secret_, " ", segment_->head().nonce, " ", host_name());
}

ShmOffer::~ShmOffer() {
  if (listener_ >= 0) close(listener_);
  if (segment_descriptor_ >= 0) close(segment_descriptor_);
}

// Returns the rank served, or -1 for a stranger, who is dropped.
int ShmOffer::serve_one(int connection, int world_size) {
  const timeval limit{kGreetingTime.count() / 1000, 0};
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  Greeting greeting;
  if (recv(connection, &greeting, sizeof greeting, MSG_WAITALL) != sizeof greeting) return -1;
  if (!same_secret(greeting.secret, secret_.data())) return -1;
  if (greeting.rank <= 0 || greeting.rank >= world_size) return -1;
  return send_descriptor(connection, segment_descriptor_) ? greeting.rank : -1;
}

std::shared_ptr<Segment> ShmOffer::accept(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const int world_size = segment_->head().world_size;
  std::vector<bool> arrived(static_cast<size_t>(world_size), false);
  arrived[0] = true;
  for (int missing = world_size - 1; missing > 0;) {
    if (!wait_ready(listener_, POLLIN, deadline)) {
      std::ostringstream ranks;
      for (int rank = 0; rank < world_size; ++rank)
        if (!arrived[rank]) ranks << " " << rank;
      throw Error(ErrorKind::kTimeout,
                  concat("rank 0: rendezvous of ", world_size, " ranks exceeded its timeout of ",
                         timeout.count(), " ms; these never came:", ranks.str(),
                         ". Are they running, on this host (", host_name(), ")?"));
    }
    const Descriptor connection(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() < 0) continue;
    const int rank = serve_one(connection.get(), world_size);
    if (rank > 0 && !arrived[rank]) {
      arrived[rank] = true;
      --missing;
    }
  }
  return segment_;
}

std::shared_ptr<Segment> join_shm(const std::string& address, int rank,
                                  std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::istringstream fields(address);
  std::string name, secret, host;
  uint64_t nonce = 0;
  fields >> name >> secret >> nonce >> host;
  PYCOMM_CHECK(!fields.fail() && secret.size() == kSecretBytes && name.size() < 100, kError,
               "rank ", rank, ": malformed shared-memory address from rank 0: '", address, "'");

  const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un target;
  const socklen_t length = abstract_address(name, &target);
  PYCOMM_CHECK_SYSTEM(
      connection.get() >= 0 &&
          connect(connection.get(), reinterpret_cast<sockaddr*>(&target), length) == 0,
      "rank ", rank, " on host ", host_name(), " cannot reach the shared memory of rank 0 on host ",
      host,
      " (all ranks of backend 'pycomm' must run on one host and in one network namespace; "
      "between hosts use backend 'gloo' or 'nccl')");
  Greeting greeting;
  std::memcpy(greeting.secret, secret.data(), kSecretBytes);
  greeting.rank = rank;
  PYCOMM_CHECK_SYSTEM(
      send(connection.get(), &greeting, sizeof greeting, MSG_NOSIGNAL) == sizeof greeting, "rank ",
      rank, ": rank 0 closed the rendezvous");
  PYCOMM_CHECK(wait_ready(connection.get(), POLLIN, deadline), kTimeout, "rank ", rank,
               ": rank 0 did not hand out its shared segment within ", timeout.count(), " ms");
  const Descriptor segment(receive_descriptor(connection.get()));
  PYCOMM_CHECK(segment.get() >= 0, kError, "rank ", rank,
               ": rank 0 refused this rank at the rendezvous");
  return Segment::open(segment.get(), nonce);
}

}  // namespace pycomm
