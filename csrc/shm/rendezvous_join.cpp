// The other ranks' side of the rendezvous: see rendezvous.h.
#include <cerrno>
#include <cstring>
#include <thread>

#include "../error.h"
#include "../interrupt.h"
#include "greeting.h"
#include "rendezvous.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kRetryTime{5};  // before a rank tries again to reach rank 0

// The segment once all ranks have it; or null if rank 0 broke off, with *is_over set if the secret
// is not its.
std::shared_ptr<Segment> attend(int connection, const Address& address, int rank,
                                Clock::time_point deadline, bool* is_over) {
  std::shared_ptr<Segment> segment;
  for (;;) {
    PYCOMM_CHECK(wait_readable(connection, deadline), kTimeout, "rank ", rank,
                 ": the rendezvous exceeded its timeout; rank 0 is there, but not all ranks are");
    Notice notice(Word{});
    const Packet packet = listen_to(connection, &notice);
    if (packet.arrival == Arrival::kNothing) continue;
    if (packet.arrival == Arrival::kEnd) return nullptr;
    if (notice.word == Word::kUnknown) {
      *is_over = true;
      return nullptr;
    }
    if (notice.word == Word::kRefused)
      throw Error(notice.kind, concat("rank ", rank, " was refused: ", notice.text));
    if (notice.word == Word::kGo && segment) return segment;
    PYCOMM_CHECK(notice.word == Word::kSegment && packet.descriptor, kError, "rank ", rank,
                 ": no shared segment arrived from rank 0; has this process too many files open?");
    segment = Segment::open(packet.descriptor.get(), address.nonce);
    say(connection, Notice(Word::kReady));
  }
}

// The same, and rank 0 hears it if this rank cannot go on.
std::shared_ptr<Segment> visit(int connection, const Address& address, const Greeting& greeting,
                               Clock::time_point deadline, bool* is_over) {
  uid_t user = 0;
  if (!peer_user(connection, &user) || user != geteuid()) {  // somebody took the name over
    *is_over = true;
    return nullptr;
  }
  send_packet(connection, &greeting, sizeof greeting);  // if it fails, there is an answer to read
  try {
    return attend(connection, address, greeting.rank, deadline, is_over);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout)  // after which it may come again
      say(connection, Notice(Word::kGaveUp, error.kind(), error.what()));
    throw;
  } catch (...) {
    say(connection, Notice(Word::kGaveUp, ErrorKind::kAborted, "it was interrupted"));
    throw;
  }
}

}  // namespace

std::shared_ptr<Segment> try_join_shm(const std::string& text, int rank, int world_size,
                                      milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const Address address = Address::parse(text, rank);
  Greeting greeting{{}, kProtocol, layout_of_segment(), rank, world_size};
  std::memcpy(greeting.secret, address.secret.data(), kSecretBytes);
  for (;;) {
    const Descriptor connection = connect_to(address.name);
    const int reason = errno;
    if (connection) {
      bool is_over = false;
      auto segment = visit(connection.get(), address, greeting, deadline, &is_over);
      if (segment || is_over) return segment;
    } else {
      if (reason == ECONNREFUSED) return nullptr;
      PYCOMM_CHECK_SYSTEM(reason == EAGAIN || reason == EINTR, "rank ", rank,
                          " cannot connect to rank 0's socket");
    }
    PYCOMM_CHECK(Clock::now() < deadline, kTimeout, "rank ", rank,
                 ": rank 0's socket is there, but it took in this rank never within ",
                 timeout.count(), " ms");
    check_interrupt();
    std::this_thread::sleep_for(kRetryTime);
  }
}

std::shared_ptr<Segment> join_shm(const std::string& address, int rank, milliseconds timeout,
                                  int world_size) {
  auto segment = try_join_shm(address, rank, world_size, timeout);
  if (!segment) check_reachable(address, rank);
  PYCOMM_CHECK(segment, kError, "rank ", rank, ": rank 0's offer of a shared segment is over");
  return segment;
}

void check_reachable(const std::string& text, int rank) {
  const Address address = Address::parse(text, rank);
  const std::string here = place();
  PYCOMM_CHECK(address.place == here || address.place == "-" || here == "-", kError, "rank ", rank,
               " on host ", host_name(), " cannot reach the shared memory of rank 0 on host ",
               address.host,
               " (all ranks of backend 'pycomm' must run on one host and in one network namespace; "
               "between hosts use backend 'gloo' or 'nccl')");
}

}  // namespace pycomm
