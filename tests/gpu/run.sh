#!/usr/bin/env bash
# The device checks: builds the core for the GPU that is here, compares the kernels with the CPU's and times them.
# Needs nvcc, torch and a driver; no network. Ends with 0: all well, 1: a kernel is wrong, 2: a kernel is slow,
# 3: no GPU, 4: the build failed. Arguments go to gpu_checks.py, which writes gpu.json into ${OUT:-runs/gpu}.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

architecture=$("$python" tests/gpu/gpu_checks.py --probe)
PYCOMM_CUDA=1 "$python" setup.py --quiet build_ext --inplace --core-only --architectures="$architecture" || exit 4
exec "$python" tests/gpu/gpu_checks.py "$@"
