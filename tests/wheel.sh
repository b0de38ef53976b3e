#!/usr/bin/env bash
# Installs what `make wheel` left in dist/ into new environments, and trains the demo with each: wheel.sh PYTHON [wheel] [sdist]
#   wheel    pip brings the torch that the wheel asks for; the demo trains on 2 ranks; another torch is refused in words
#   sdist    pip compiles it beside the torch of PYTHON's environment, without another look at the source tree
# Ends with 0: all well.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

train() {  # python: with what is installed there, far from the source tree
  cp -r examples "$work/examples-$1"
  (cd "$work/examples-$1" && "$work/$1/bin/python" train_digits.py --epochs 3 --min-accuracy 0.85 --out "$work/run-$1")
  cd "$work"
  "$work/$1/bin/python" - "$work/$1" <<'END'
import sys, pycomm
from pycomm.extension import core
assert pycomm.__file__.startswith(sys.argv[1]), pycomm.__file__
print("trained with", pycomm.__file__, "- CUDA kernels:", core.cuda)
END
  cd "$OLDPWD"
}

of_wheel() {
  "$python" -m venv "$work/wheel"
  "$work/wheel/bin/python" -m pip install --quiet "$(ls "$PWD"/dist/*.whl)[demo]"
  "$work/wheel/bin/python" -m pip check
  train wheel
  refused_beside_another_torch
}

refused_beside_another_torch() {  # the torch is the same, its version says another
  local site version said
  site=$("$work/wheel/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  version=$site/torch/version.py
  printf "__version__ = '2.99.0+cpu'\n" >>"$version"
  if said=$(cd "$work" && "$work/wheel/bin/python" -c 'import pycomm' 2>&1); then
    echo "a wheel built with another torch was imported"
    return 1
  fi
  grep -q 'torch 2.99.0+cpu is installed' <<<"$said" || { echo "$said"; return 1; }
  echo "refused, as it should: $(tail -1 <<<"$said")"
}

of_sdist() {  # the compilers, torch and pip are those of PYTHON's environment
  local site archive
  archive=$(ls "$PWD"/dist/pycomm-*.tar.gz)
  "$python" -m venv --without-pip "$work/sdist"
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$site" >"$("$work/sdist/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/builder.pth"
  (cd "$work" && PATH="$(dirname "$python"):$PATH" PYCOMM_CUDA=0 \
    "$work/sdist/bin/python" -m pip install --quiet --no-build-isolation --no-deps "$archive")
  train sdist
}

[[ $# != 0 ]] || set -- wheel sdist
for what; do
  "of_$what"
  echo "--- $what: well, $SECONDS s so far"
done
