// How the ranks of one host come to share a segment: rank 0 creates it and hands its descriptor out
// over an abstract Unix socket. The socket's name and a secret travel through the job's Store, so
// only members of the job can join, jobs on one machine never meet, and nothing is left in any file
// system. A rank that can map the segment and read its nonce is proved to be on the same host.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "segment.h"

namespace pycomm {

// Rank 0's side. The address is plain text for the Store.
class ShmOffer {
 public:
  ShmOffer(int world_size, const ShmConfig& config);
  ~ShmOffer();
  ShmOffer(const ShmOffer&) = delete;
  ShmOffer& operator=(const ShmOffer&) = delete;

  const std::string& address() const { return address_; }
  // Serves every other rank; TimeoutError names those that did not come.
  std::shared_ptr<Segment> accept(std::chrono::milliseconds timeout);

 private:
  int serve_one(int connection, int world_size);

  std::shared_ptr<Segment> segment_;
  int segment_descriptor_ = -1;
  int listener_ = -1;
  std::string secret_;
  std::string address_;
};

// The other ranks' side.
std::shared_ptr<Segment> join_shm(const std::string& address, int rank,
                                  std::chrono::milliseconds timeout);

}  // namespace pycomm
