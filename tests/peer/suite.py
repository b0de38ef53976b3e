"""torch's DistributedTest suite, which ships in the wheel, with another backend and DDP class in Gloo's place.

The suite picks its tests by comparing the name of the backend when it is imported. So it is imported for "gloo", and
then told the name to use: every test that Gloo runs stays, and calls the other backend.
"""

from __future__ import annotations

import importlib
import os
import unittest
from typing import Any, Final

import on_cpu
import torch
from torch import nn

#: How torch begins its reasons for skipping the all_to_all tests on CPU tensors.
FOR_MPI: Final = ("Only MPI supports all_to_all", "Only MPI supports CPU all_to_all")


class StandIn(str):
    """A backend's name that passes for Gloo's where the suite compares names while a test runs."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or str.__eq__("gloo", other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(backend: str, world: int, test_timeout: float) -> type[unittest.TestCase]:
    """The suite's test case class for so many ranks; once per process, which must have no other threads.

    `test_timeout` in seconds: after three quarters of it the suite itself gives up a test and shows stacks.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), CUDA_VISIBLE_DEVICES="")
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(round(0.75 * test_timeout))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYCOMM_DDP_MISSING", "step")  # five tests want the first backward silent
    on_cpu.open_gates()
    on_cpu.place_on_cpu()
    ddp: type = nn.parallel.DistributedDataParallel
    if backend != "gloo":
        ddp = importlib.import_module(backend).DistributedDataParallel
    on_cpu.ignore_devices(ddp)
    parallel: Any = nn.parallel
    parallel.DistributedDataParallel = ddp
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    _use(tests, backend)
    return _forking_case(tests)


def _use(tests: Any, backend: str) -> None:
    """Makes the imported suite call `backend`, and opens the tests that torch keeps for MPI."""
    if backend != "gloo":
        tests.BACKEND = StandIn(backend)
        tests.PROFILING_SUPPORTED_BACKENDS.append(backend)
        tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    for test in vars(tests.DistributedTest._DistTestBase).values():
        if getattr(test, "__unittest_skip_why__", "").startswith(FOR_MPI):
            del test.__unittest_skip__


def _forking_case(tests: Any) -> type[unittest.TestCase]:
    """The test case; ranks are forks of the process that runs the test, so torch is imported once."""

    class TorchSuite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite
