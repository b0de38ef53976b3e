#!/usr/bin/env bash
# Builds the communication core with its C++ tests, under a sanitizer or none, and runs them; needs only g++.
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
program=$build/ranks_as_threads
mkdir -p "$build"

cd "$root"
if [[ ! -e $program || -n $(find csrc tests/cpp -newer "$program" -name '*.*' -type f) ]]; then
  sources=(csrc/communicator.cpp csrc/process.cpp csrc/recorder.cpp csrc/worker.cpp csrc/shm/*.cpp csrc/kernels/*.cpp
           tests/cpp/ranks_as_threads.cpp)
  export CXX=${CXX:-g++} build
  compile() {
    local object=$build/${1//\//_}.o
    "$CXX" "${@:2}" -c "$1" -o "$object"
  }
  export -f compile
  # -fwrapv: sums of integers wrap, as torch's do.
  # The tests' own file takes longest, so it goes first.
  printf '%s\n' "${sources[@]}" | tac | xargs -P 2 -I{} bash -c 'compile "$@"' _ {} \
    -std=c++17 -O1 -g -fno-omit-frame-pointer -fwrapv -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized \
    -Wno-uninitialized -pthread "${flags[@]}"
  objects=()
  for source in "${sources[@]}"; do objects+=("$build/${source//\//_}.o"); done
  "$CXX" "${objects[@]}" -pthread "${flags[@]}" -o "$program"
fi

# ThreadSanitizer's shadow needs its addresses: kernels with vm.mmap_rnd_bits above 28 may have taken them.
launch=()
if [[ $kind == thread ]] && setarch "$(uname -m)" -R true 2>/dev/null; then
  launch=(setarch "$(uname -m)" -R)
fi
export TSAN_OPTIONS=${TSAN_OPTIONS:-exitcode=66:suppressions=$root/tests/cpp/thread.supp}
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
exec "${launch[@]}" "$program" "$@"
