#include "registry.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "../forks.h"
#include "shm_communicator.h"

namespace pycomm::registry {
namespace {

struct State {
  std::mutex mutex;
  std::vector<ShmCommunicator*> communicators;
};

// The child has only the thread that forked, so the mutex must be that thread's meanwhile.
void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

State& state() {
  static auto* const state = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new State;  // outlives static destruction
  }();
  return *state;
}

void before_fork() { state().mutex.lock(); }
void after_fork_in_parent() { state().mutex.unlock(); }
void after_fork_in_child() {
  State& mine = state();
  forks.fetch_add(1);
  for (ShmCommunicator* communicator : mine.communicators) communicator->forget();
  mine.communicators.clear();
  mine.mutex.unlock();
}

}  // namespace

void add(ShmCommunicator* communicator) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().communicators.push_back(communicator);
}

void remove(ShmCommunicator* communicator) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& all = state().communicators;
  all.erase(std::remove(all.begin(), all.end(), communicator), all.end());
}

void visit(const std::function<bool(ShmCommunicator&)>& visit) {
  std::lock_guard<std::mutex> lock(state().mutex);
  for (ShmCommunicator* communicator : state().communicators)
    if (visit(*communicator)) return;
}

}  // namespace pycomm::registry
