// oneCCL's calls for CPU memory behind plain C functions, which oneccl_peer.py calls through
// ctypes. One communicator per process; functions return 0, or 1 after writing why to stderr.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>

namespace {

std::shared_ptr<ccl::kvs> store;
std::unique_ptr<ccl::communicator> comm;

template <class Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oneCCL: %s\n", error.what());
    return 1;
  }
}

ccl::datatype dtype_of(int code) { return static_cast<ccl::datatype>(code); }

}  // namespace

extern "C" {

enum { kAddressBytes = sizeof(ccl::kvs::address_type) };

int peer_address_bytes() { return kAddressBytes; }

// Rank 0's key-value store, whose address the other ranks need.
int peer_create(char* address) {
  return guarded([&] {
    ccl::init();
    store = ccl::create_main_kvs();
    const auto own = store->get_address();
    std::memcpy(address, own.data(), kAddressBytes);
  });
}

int peer_open(int size, int rank, const char* address) {
  return guarded([&] {
    if (!store) {
      ccl::init();
      ccl::kvs::address_type main_address;
      std::memcpy(main_address.data(), address, kAddressBytes);
      store = ccl::create_kvs(main_address);
    }
    comm = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
  });
}

// Before the process ends: oneCCL's own static objects are gone when ours would be destroyed.
int peer_close() {
  return guarded([] {
    comm.reset();
    store.reset();
  });
}

int peer_all_reduce(void*, void* target, uint64_t count, int dtype) {
  return guarded([&] {
    ccl::allreduce(target, target, count, dtype_of(dtype), ccl::reduction::sum, *comm).wait();
  });
}

int peer_reduce(void*, void* target, uint64_t count, int dtype) {
  return guarded([&] {
    ccl::reduce(target, target, count, dtype_of(dtype), ccl::reduction::sum, 0, *comm).wait();
  });
}

int peer_broadcast(void*, void* target, uint64_t count, int dtype) {
  return guarded([&] { ccl::broadcast(target, count, dtype_of(dtype), 0, *comm).wait(); });
}

// The counts of these three are of one rank's part.

int peer_all_gather(void* source, void* target, uint64_t count, int dtype) {
  return guarded([&] { ccl::allgather(source, target, count, dtype_of(dtype), *comm).wait(); });
}

int peer_reduce_scatter(void* source, void* target, uint64_t count, int dtype) {
  return guarded([&] {
    ccl::reduce_scatter(source, target, count, dtype_of(dtype), ccl::reduction::sum, *comm).wait();
  });
}

int peer_all_to_all(void* source, void* target, uint64_t count, int dtype) {
  return guarded([&] { ccl::alltoall(source, target, count, dtype_of(dtype), *comm).wait(); });
}

int peer_barrier(void*, void*, uint64_t, int) {
  return guarded([&] { ccl::barrier(*comm).wait(); });
}

}  // extern "C"
