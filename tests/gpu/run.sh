#!/usr/bin/env bash
# The device checks, on the GPU that is here. Needs nvcc, torch and a driver; no network.
#   kernels    builds the core, compares the kernels with the CPU's and times them (gpu_checks.py)
#   ranks      builds all; torch.distributed over NCCL, compression, DDP, graphs, errors (gpu_ranks.py): one rank,
#              and two on this GPU where NCCL (2.30 and later) lets them
#   digits     trains examples/train_digits.py on the GPU
#   sanitizer  some of the kernels' cases under compute-sanitizer's memcheck and racecheck, where it is found
# STAGES chooses among them. Arguments go to gpu_checks.py, which writes gpu.json into ${OUT:-runs/gpu}.
# Ends with 0: all well, 1: a kernel is wrong, 2: a kernel is slow, 3: no GPU, 4: a build failed, 5: ranks, digits or the
# sanitizer failed. A stage that fails does not keep the next from its turn; the first failure is what counts.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-runs/gpu}
result=0
note() {  # stage status
  echo "--- $1: $([[ $2 == 0 ]] && echo well || echo "FAILED ($2)"), ${SECONDS} s so far"
  [[ $result != 0 || $2 == 0 ]] || result=$2
}
build() {
  PYCOMM_CUDA=1 "$python" setup.py --quiet build_ext --inplace --architectures="$architecture" "$@"
}
on_ranks() {  # number, script, arguments
  PYTHONPATH=$PWD timeout 240 "$python" -m torch.distributed.run --standalone --nproc-per-node "$@"
}
share_a_gpu() {  # several ranks on one GPU: correctness only
  NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 on_ranks "$@"
}

kernels() {
  build --core-only || return 4
  "$python" tests/gpu/gpu_checks.py "${arguments[@]}"
}
ranks() {
  build || return 4
  on_ranks 1 tests/gpu/gpu_ranks.py || return 5
  if "$python" -c 'import sys, torch; sys.exit(torch.cuda.nccl.version() < (2, 30))'; then
    share_a_gpu 2 tests/gpu/gpu_ranks.py || return 5
  else
    echo "two ranks were not run: this NCCL lets one rank use a GPU"
  fi
}
digits() {
  build || return 4
  on_ranks 1 examples/train_digits.py --device cuda --ranks 1 --out "$out/digits" || return 5
}
sanitizer() {
  local tool
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
  [[ -n $tool ]] || { echo "there is no compute-sanitizer here"; return 0; }
  build --core-only || return 4
  for what in memcheck racecheck; do
    timeout 150 "$tool" --tool "$what" --error-exitcode 9 "$python" tests/gpu/gpu_checks.py --tiny || return 5
  done
}

arguments=("$@")
architecture=$("$python" tests/gpu/gpu_checks.py --probe) || exit $?
for stage in ${STAGES:-kernels ranks digits sanitizer}; do
  "$stage"
  note "$stage" $?
done
exit $result
