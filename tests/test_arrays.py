"""Arrays of other libraries in pycomm's calls: NumPy's, and stand-ins that publish the protocols."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import Refused, attempt, run

import pycomm
from pycomm.arrays import as_tensor
from pycomm.errors import InvalidArgument


class OnlyDlpack:
    """An array that can nothing but the protocol, as those of libraries that torch does not know."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


class OnlyCuda:
    """An array on a GPU by CUDA's array interface, such as Numba's; at an address that nobody reads."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (4,), "typestr": "<f4", "data": (0x7F0000000000, False), "version": 3, "stream": 1,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex64"])
def test_numpy_arrays_are_reduced_in_place(dtype: str) -> None:
    """What is handed in is what comes back, and holds the sum; compressed, too."""

    def worker(rank: int, n: int) -> tuple[bool, np.ndarray, np.ndarray]:
        array = np.arange(10).astype(dtype) + rank
        same = pycomm.all_reduce(array) is array
        floats = np.full(1000, float(rank + 1), dtype="float32")
        pycomm.all_reduce(floats, compression="fp16")
        return same, array, floats

    for same, array, floats in run(2, worker):
        assert same
        assert np.array_equal(array, (2 * np.arange(10) + 1).astype(dtype))
        assert np.array_equal(floats, np.full(1000, 3.0))


def test_the_protocol_is_enough() -> None:
    """Nothing is copied on the way."""

    def worker(rank: int, n: int) -> torch.Tensor:
        values = torch.full((5,), float(rank))
        pycomm.all_reduce(OnlyDlpack(values), "max")
        return values

    for values in run(2, worker):
        assert values.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [1.0, 2.0], "expected a tensor, .* not a builtins.list"),
        (lambda: 3, "not a builtins.int"),
        (lambda: np.broadcast_to(np.float32(1), (4,)), "numpy.ndarray cannot be used as a tensor"),
        (lambda: np.array(["a", "b"]), "numpy.ndarray cannot be used as a tensor"),
    ],
)
def test_what_is_no_array(make: Any, words: str) -> None:
    """Refused in words, with the kind of thing that it is."""
    with pytest.raises(InvalidArgument, match=words):
        as_tensor(make())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_interface_without_a_gpu() -> None:
    """An array of a GPU that torch cannot use."""
    with pytest.raises(InvalidArgument, match="OnlyCuda cannot be used as a tensor"):
        as_tensor(OnlyCuda())


def test_groups_without_a_way_for_gpus() -> None:
    """A tensor on a GPU over a group of Gloo: refused in words, with what to do."""

    def worker(rank: int, n: int) -> Any:
        from pycomm.compression.carrier import carrier_of

        return attempt(lambda: carrier_of(None, torch.device("cuda", 0)))

    for rank, refused in enumerate(run(2, worker, backend="gloo")):
        assert isinstance(refused, Refused)
        for words in (f"rank {rank}", "cuda:0", "gloo", "init_process_group('pycomm')"):
            assert words in refused.message
