#include "rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <utility>

#include "../interrupt.h"
#include "../random.h"
#include "greeting.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGreetingTime{2000};
constexpr int kMaxSilentCallers = 64;  // more, and the one silent for longest is dropped
constexpr int kMaxAdmissions = 64;     // in a row, before those who are here are heard again

// Time that does not depend on how long the secrets agree.
bool same_secret(const char* a, const char* b) {
  unsigned difference = 0;
  for (size_t i = 0; i < kSecretBytes; ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

std::string version_of(uint32_t protocol, uint32_t layout) {
  std::ostringstream text;
  text << "(protocol " << protocol << ", segment layout " << std::hex << layout << ")";
  return text.str();
}

}  // namespace

ShmOffer::ShmOffer(int world_size, const ShmConfig& config) : secret_(random_hex(kSecretBytes)) {
  int descriptor = -1;
  segment_ = Segment::create(world_size, config, &descriptor);
  segment_descriptor_.reset(descriptor);
  const std::string name = "pycomm-" + random_hex(kSecretBytes);
  listener_ = listen_at(name);
  PYCOMM_CHECK_SYSTEM(listener_, "rank 0 cannot open the socket that hands out its shared segment");
  address_ = Address{name, secret_, segment_->head().nonce, place(), host_name()}.text();
}

ShmOffer::~ShmOffer() { end(ErrorKind::kAborted, "rank 0 gave up the rendezvous"); }

std::shared_ptr<Segment> ShmOffer::accept(milliseconds timeout) {
  serve(timeout);
  let_go();
  return segment_;
}

void ShmOffer::serve(milliseconds timeout, const Look& look) {
  PYCOMM_CHECK(listener_, kError,
               "rank 0: this offer of a shared segment is over; make another one");
  try {
    wait_for_all(timeout, look);
  } catch (const Error& error) {
    end(error.kind(), error.what());
    throw;
  } catch (...) {
    end(ErrorKind::kAborted, "rank 0 was interrupted at the rendezvous");
    throw;
  }
}

void ShmOffer::wait_for_all(milliseconds timeout, const Look& look) {
  const auto deadline = Clock::now() + timeout;
  auto next_look = Clock::now() + kSleep;
  for (;; wait_for_news()) {
    for (Caller& caller : callers_) hear(caller);
    admit_callers();
    callers_.erase(std::remove_if(callers_.begin(), callers_.end(),
                                  [](const Caller& caller) { return caller.is_gone; }),
                   callers_.end());
    if (all_are_ready()) return;
    const auto now = Clock::now();
    if (now < next_look) continue;
    next_look = now + kSleep;
    check_interrupt();
    const std::string why = look ? look(ready_ranks()) : std::string();
    PYCOMM_CHECK(why.empty(), kAborted, why);
    PYCOMM_CHECK(now < deadline, kTimeout, who_is_missing(timeout));
  }
}

void ShmOffer::wait_for_news() {
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (const Caller& caller : callers_) entries.push_back({caller.socket.get(), POLLIN, 0});
  poll(entries.data(), entries.size(), static_cast<int>(kSleep.count()));
}

void ShmOffer::admit_callers() {
  for (int admitted = 0; admitted < kMaxAdmissions; ++admitted) {
    Caller caller(accept_from(listener_.get()));
    if (!caller.socket) {
      if (errno == EMFILE && drop_oldest_silent_caller()) return;
      PYCOMM_CHECK_SYSTEM(errno == EAGAIN || errno == EINTR || errno == ECONNABORTED,
                          "rank 0 cannot take another rank's connection at the rendezvous");
      return;
    }
    hear(caller);
    if (caller.is_gone) continue;
    if (std::count_if(callers_.begin(), callers_.end(), is_silent) >= kMaxSilentCallers)
      drop_oldest_silent_caller();
    callers_.push_back(std::move(caller));
  }
}

bool ShmOffer::is_silent(const Caller& caller) { return !caller.is_member && !caller.is_gone; }

// False: there is none. Callers are in order of arrival.
bool ShmOffer::drop_oldest_silent_caller() {
  const auto oldest = std::find_if(callers_.begin(), callers_.end(), is_silent);
  if (oldest == callers_.end()) return false;
  oldest->forget();
  return true;
}

void ShmOffer::hear(Caller& caller) {
  if (caller.is_gone) return;
  if (caller.is_member)
    hear_member(caller);
  else
    hear_greeting(caller);
}

void ShmOffer::hear_greeting(Caller& caller) {
  uid_t user = 0;
  if (!peer_user(caller.socket.get(), &user) || user != geteuid())
    return refuse(caller, ErrorKind::kError,
                  concat("rank 0 runs as user ", geteuid(), " and does not let user ", user,
                         " join; all ranks must run as one user"));
  Greeting greeting;
  const Packet packet = receive_packet(caller.socket.get(), &greeting, sizeof greeting);
  if (packet.arrival == Arrival::kNothing) {
    if (Clock::now() - caller.since > kGreetingTime) caller.forget();
  } else if (packet.bytes < sizeof greeting || !same_secret(greeting.secret, secret_.data())) {
    say(caller.socket.get(), Notice(Word::kUnknown));
    caller.forget();
  } else {
    welcome(caller, greeting);
  }
}

// Of a caller who knows the secret.
void ShmOffer::welcome(Caller& caller, const Greeting& greeting) {
  try {
    check_member(greeting);
  } catch (const Error& error) {
    refuse(caller, error.kind(), error.what());
    throw;
  }
  const int world_size = segment_->head().world_size;
  if (greeting.rank <= 0 || greeting.rank >= world_size)
    return refuse(caller, ErrorKind::kInvalidArgument,
                  concat("rank ", greeting.rank, " is not one of the ranks 1 to ", world_size - 1,
                         " that rank 0 waits for"));
  if (Caller* first = find(greeting.rank)) hear(*first);  // it may have died since
  if (find(greeting.rank))
    return refuse(caller, ErrorKind::kError,
                  concat("another process is rank ", greeting.rank,
                         " already; is it started twice, or is its RANK wrong?"));
  caller.is_member = true;
  caller.rank = greeting.rank;
  if (!say(caller.socket.get(), Notice(Word::kSegment), segment_descriptor_.get())) caller.forget();
}

// What sets apart ranks of one job that can never work together: an error for all of them.
void ShmOffer::check_member(const Greeting& greeting) const {
  const uint32_t layout = layout_of_segment();
  PYCOMM_CHECK(greeting.protocol == kProtocol && greeting.layout == layout, kError, "rank ",
               greeting.rank, " runs another version of pycomm ",
               version_of(greeting.protocol, greeting.layout), " than rank 0 ",
               version_of(kProtocol, layout), "; install the same for all ranks");
  const int world_size = segment_->head().world_size;
  PYCOMM_CHECK(greeting.world_size == 0 || greeting.world_size == world_size, kMismatch, "rank ",
               greeting.rank, " was started with a world size of ", greeting.world_size,
               ", but rank 0 with ", world_size, "; all ranks need the same");
}

void ShmOffer::hear_member(Caller& caller) {
  for (;;) {
    Notice notice(Word{});
    const Packet packet = listen_to(caller.socket.get(), &notice);
    if (packet.arrival == Arrival::kNothing) return;
    if (packet.arrival == Arrival::kPacket && notice.word == Word::kGaveUp)
      throw Error(notice.kind,
                  concat("rank 0: rank ", caller.rank, " gave up the rendezvous: ", notice.text));
    const bool is_ready = packet.arrival == Arrival::kPacket && notice.word == Word::kReady;
    if (!is_ready || caller.is_ready) {  // killed, usually: it may be started again
      left_.insert(caller.rank);
      return caller.forget();
    }
    caller.is_ready = true;
  }
}

ShmOffer::Caller* ShmOffer::find(int rank) {
  for (Caller& caller : callers_)
    if (caller.is_member && !caller.is_gone && caller.rank == rank) return &caller;
  return nullptr;
}

std::vector<int> ShmOffer::ready_ranks() const {
  std::vector<int> ranks;
  for (const Caller& caller : callers_)
    if (caller.is_ready && !caller.is_gone) ranks.push_back(caller.rank);
  return ranks;
}

bool ShmOffer::all_are_ready() const {
  return static_cast<int>(ready_ranks().size()) == segment_->head().world_size - 1;
}

void ShmOffer::refuse(Caller& caller, ErrorKind kind, const std::string& why) {
  say(caller.socket.get(), Notice(Word::kRefused, kind, why));
  caller.forget();
  last_refusal_ = why;
}

void ShmOffer::let_go() {
  std::ostringstream dead;
  for (const Caller& caller : callers_)
    if (caller.is_member && !say(caller.socket.get(), Notice(Word::kGo)))
      dead << " " << caller.rank;
  PYCOMM_CHECK(dead.str().empty(), kPeerDied,
               "rank 0: these ranks died at the end of the rendezvous:", dead.str());
  close_doors();
}

void ShmOffer::end(ErrorKind kind, const std::string& why) {
  for (const Caller& caller : callers_)
    if (caller.is_member) say(caller.socket.get(), Notice(Word::kRefused, kind, why));
  close_doors();
}

void ShmOffer::close_doors() {
  callers_.clear();
  listener_.reset();
  segment_descriptor_.reset();
}

std::string ShmOffer::who_is_missing(milliseconds timeout) {
  std::ostringstream text, missing, slow, gone;
  const int world_size = segment_->head().world_size;
  for (int rank = 1; rank < world_size; ++rank) {
    const Caller* caller = find(rank);
    if (caller && caller->is_ready) continue;
    (caller ? slow : left_.count(rank) ? gone : missing) << " " << rank;
  }
  text << "rank 0: rendezvous of " << world_size << " ranks exceeded its timeout of "
       << timeout.count() << " ms";
  if (!missing.str().empty()) text << "; these never came:" << missing.str();
  if (!gone.str().empty()) text << "; these came and left again:" << gone.str();
  if (!slow.str().empty()) text << "; these came, but did not map the segment:" << slow.str();
  text << ". Are they running, on this host (" << host_name() << ")?";
  if (!last_refusal_.empty()) text << " Refused was: " << last_refusal_ << ".";
  return text.str();
}

}  // namespace pycomm
