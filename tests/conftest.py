"""Settings for all tests: start the fork server while pytest is still collecting. Fixtures of more than one file."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest
import torch

from pycomm.extension import core

harness.warm_up()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What only longer suites do."""
    parser.addoption(
        "--all-architectures", action="store_true",
        help="test_cuda_build.py: compile the kernels for every GPU architecture (make test-nvcc)",
    )  # fmt: skip


@pytest.fixture
def instruction_set_restored() -> Iterator[None]:
    """One thread for torch; the instruction set of before the test is in use again after it."""
    before, threads = core.instruction_set(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    yield
    torch.set_num_threads(threads)
    assert core.set_instruction_set(before)


@pytest.fixture(params=harness.INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, instruction_set_restored: None) -> str:
    """Each instruction set, in use; skipped where the processor lacks it."""
    name: str = request.param
    if not core.set_instruction_set(name):
        pytest.skip(f"this CPU cannot run {name}")
    assert core.instruction_set() == name
    return name
