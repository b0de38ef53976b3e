#!/usr/bin/env bash
# Builds the communication core with its C++ tests, under a sanitizer or none, and runs them; needs only g++.
# Ranks are threads over shared memory, and processes over the fake NCCL.
#   tests/cpp/run.sh thread|address|plain [name of a test ...]
# PYCOMM_SOURCE: another tree's csrc/ and tests/ (to try a patch); PYCOMM_BUILD: where to build.
set -euo pipefail

root=${PYCOMM_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
kind=${1:-}
case $kind in
  thread) flags=(-fsanitize=thread -include "$root/tests/cpp/visible_streaming.h") ;;
  address) flags=(-fsanitize=address,undefined -fno-sanitize-recover=all
                  -include "$root/tests/cpp/visible_streaming.h") ;;
  plain) flags=() ;;
  *) echo "usage: $0 thread|address|plain [test ...]" >&2; exit 2 ;;
esac
shift
build=${PYCOMM_BUILD:-$root/build/sanitize}/$kind
mkdir -p "$build"
cd "$root"

export CXX=${CXX:-g++} build root
# Only what is older than one of the files that it was made of; its list is beside it.
compile() {
  local object=$build/${1//\//_}.o
  local list=${object%.o}.d
  if [[ -e $object && -e $list ]] &&
    [[ -z $(find "$root/tests/cpp/run.sh" $(sed 's/^[^:]*://; s/\\$//' "$list") -newer "$object" 2>&1) ]]; then
    return
  fi
  "$CXX" "${@:2}" -MMD -c "$1" -o "$object"
}
export -f compile
# -fwrapv: sums of integers wrap, as torch's do.
options=(-std=c++17 -O1 -g -fno-omit-frame-pointer -fwrapv -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized
         -Wno-uninitialized -pthread "${flags[@]}")
core=(csrc/communicator.cpp csrc/process.cpp csrc/recorder.cpp csrc/worker.cpp csrc/shm/*.cpp csrc/kernels/*.cpp)
# The tests' own file takes longest, so it goes first.
ranks_as_threads=(tests/cpp/ranks_as_threads.cpp)
nccl_ranks=(tests/cpp/nccl_ranks.cpp csrc/nccl/*.cpp)
last=$build/nccl_ranks
if [[ ! -e $last || -n $(find csrc tests/cpp tests/fake_nccl -newer "$last" -name '*.*' -type f) ]]; then
  printf '%s\n' "${ranks_as_threads[@]}" "${nccl_ranks[@]}" "${core[@]}" |
    xargs -P 2 -I{} bash -c 'compile "$@"' _ {} "${options[@]}"
  "$CXX" "${options[@]}" -fPIC -shared -Wl,-Bsymbolic tests/fake_nccl/fake_nccl.cpp -o "$build/libfake_nccl.so"
  link() {
    local objects=()
    for source in "${@:2}" "${core[@]}"; do objects+=("$build/${source//\//_}.o"); done
    "$CXX" "${objects[@]}" -pthread "${flags[@]}" -ldl -o "$build/$1"
  }
  link ranks_as_threads "${ranks_as_threads[@]}"
  link nccl_ranks "${nccl_ranks[@]}"
fi

# ThreadSanitizer's shadow needs its addresses: kernels with vm.mmap_rnd_bits above 28 may have taken them.
launch=()
if [[ $kind == thread ]] && setarch "$(uname -m)" -R true 2>/dev/null; then
  launch=(setarch "$(uname -m)" -R)
fi
export TSAN_OPTIONS=${TSAN_OPTIONS:-exitcode=66:suppressions=$root/tests/cpp/thread.supp}
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
"${launch[@]}" "$build/ranks_as_threads" "$@"
if [[ $# == 0 ]]; then
  nccl=("${launch[@]}" "$build/nccl_ranks" "$build/libfake_nccl.so")
  "${nccl[@]}"
  # The checks can fail: what is planted is found, and by name.
  must_find() {
    if "${nccl[@]}" "$1" >"$build/$1.log" 2>&1 || ! grep -q "$2" "$build/$1.log"; then
      cat "$build/$1.log"
      echo "$1: ended without a report of '$2'" >&2
      exit 1
    fi
    echo "$1: $2, found"
  }
  case $kind in
    thread) must_find planted_disorder "data race" ;;
    address) must_find planted_early_end "heap-use-after-free" ;;
  esac
fi
