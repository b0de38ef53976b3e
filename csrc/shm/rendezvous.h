// How the ranks of one host come to share a segment: rank 0 creates it and hands its descriptor out
// over an abstract Unix socket. The socket's name and a secret travel through the job's Store, so
// only members of the job can join, jobs on one machine never meet, and nothing is left in any file
// system. A rank that can map the segment and read its nonce is proved to be on the same host.
//
// Nobody has joined until all have: a rank greets, gets the descriptor, maps it and stays; when all
// have, rank 0 lets them go. So whoever fails, or is interrupted, ends the wait of all by a word
// over the socket, and whoever is killed may be started again.
//
// Processes of other users are turned away whatever they know, root's included: a job is one
// user's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../error.h"
#include "segment.h"
#include "unix_socket.h"

namespace pycomm {

struct Greeting;

// Called about every kSleep while rank 0 waits, with the ranks that are here. What it returns, if
// anything, is why the wait must end.
using Look = std::function<std::string(const std::vector<int>&)>;

// Rank 0's side. The address is plain text for the Store.
class ShmOffer {
 public:
  ShmOffer(int world_size, const ShmConfig& config);
  ~ShmOffer();
  ShmOffer(const ShmOffer&) = delete;
  ShmOffer& operator=(const ShmOffer&) = delete;

  const std::string& address() const { return address_; }
  // Waits until every other rank has mapped the segment; they stay until accept(). If that fails,
  // the offer is over, and those who came know why. TimeoutError names the ranks that did not come.
  void serve(std::chrono::milliseconds timeout, const Look& look = {});
  // Serves the ranks, unless that has been done, and lets them go: all have the segment now.
  std::shared_ptr<Segment> accept(std::chrono::milliseconds timeout);

 private:
  // A process at our socket.
  struct Caller {
    Descriptor socket;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    int rank = -1;           // -1: it has not greeted
    bool is_member = false;  // it knows the secret, and is one of the ranks
    bool is_ready = false;   // it has mapped the segment
    bool is_gone = false;

    explicit Caller(Descriptor connection) : socket(std::move(connection)) {}
    void forget() {
      socket.reset();
      is_gone = true;
    }
  };

  void wait_for_all(std::chrono::milliseconds timeout, const Look& look);
  void wait_for_news();
  void admit_callers();
  static bool is_silent(const Caller& caller);
  bool drop_oldest_silent_caller();
  void hear(Caller& caller);
  void hear_greeting(Caller& caller);
  void welcome(Caller& caller, const Greeting& greeting);
  void check_member(const Greeting& greeting) const;
  void hear_member(Caller& caller);
  Caller* find(int rank);
  std::vector<int> ready_ranks() const;
  bool all_are_ready() const;
  void refuse(Caller& caller, ErrorKind kind, const std::string& why);
  void let_go();
  void end(ErrorKind kind, const std::string& why);
  void close_doors();
  std::string who_is_missing(std::chrono::milliseconds timeout);

  std::shared_ptr<Segment> segment_;
  Descriptor segment_descriptor_;
  Descriptor listener_;  // empty once the offer is over
  std::string secret_;
  std::string address_;
  std::vector<Caller> callers_;
  std::set<int> left_;        // ranks whose processes came and ended
  std::string last_refusal_;  // of a caller who may have meant well
};

// The other ranks' side. Errors say what rank 0 said, or that the offer is over. World size 0 is
// not compared with rank 0's.
std::shared_ptr<Segment> join_shm(const std::string& address, int rank,
                                  std::chrono::milliseconds timeout, int world_size = 0);
// The same, but null if the offer is over: nobody listens there any more, or somebody to whom the
// secret means nothing. There may be a new offer.
std::shared_ptr<Segment> try_join_shm(const std::string& address, int rank, int world_size,
                                      std::chrono::milliseconds timeout);
// Throws if the address is one on another host or in another network namespace, from where it can
// never be reached.
void check_reachable(const std::string& address, int rank);

}  // namespace pycomm
