"""The CUDA kernels' Python calls as far as they get without a device: every argument that is refused, and the driver.

Tensors in a device's memory are stood in for by objects that publish addresses through DLPack; nothing reads them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from pycomm.errors import Error, InvalidArgument
from pycomm.extension import core

CUDA: Final = 2  # DLPack's number
CODES: Final = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OnDevice:
    """A tensor of one dimension at an address in a CUDA device's memory."""

    def __init__(
        self, count: int, dtype: str = "float32", at: int = 0x7F0000000000, device: int = 0
    ) -> None:
        kind = dtype.rstrip("0123456789")
        self.shape = (ctypes.c_int64 * 1)(count)
        self.tensor = _Tensor(
            data=at, device_type=CUDA, device_id=device, dimensions=1, code=CODES[kind],
            bits=int(dtype.removeprefix(kind)), lanes=1, shape=self.shape,
        )  # fmt: skip
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        """The protocol's pair."""
        return CUDA, self.tensor.device_id

    def __dlpack__(self, stream: int = -7) -> Any:
        """The protocol's capsule."""
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


def wire(codec: Any, count: int, **where: Any) -> tuple[OnDevice, OnDevice]:
    return OnDevice(count * codec.value_bytes, "uint8", **where), OnDevice(codec.scales(count))


def test_cpu_calls_refuse_a_cuda_tensor() -> None:
    """In words, with the device."""
    with pytest.raises(
        InvalidArgument, match="of 8 elements is on CUDA device 1, but this call works on CPU"
    ):
        core.reduce(torch.zeros(8), [OnDevice(8, device=1)], "sum")
    tensor = OnDevice(8)
    with pytest.raises(InvalidArgument, match="on CUDA device 0"):
        core.transcode(core.Codec("fp16"), 8, inputs=[tensor])
    assert tensor.streams == [-7]  # which it was asked without


def test_counts_are_read_from_a_copy() -> None:
    """Six words: four integers, two doubles."""
    words = bytearray(struct.pack("4q2d", 5, 4, 3, 2, 1.5, 0.5))
    counts = core.codec_counts(torch.frombuffer(words, dtype=torch.int64))
    assert (counts.values, counts.overflows, counts.underflows, counts.non_finite) == (5, 4, 3, 2)
    assert (counts.squares, counts.error_squares) == (1.5, 0.5)
    with pytest.raises(InvalidArgument, match="48 bytes, not 40"):
        core.codec_counts(torch.zeros(5, dtype=torch.int64))


cuda_build = pytest.mark.skipif(core.cuda is None, reason="built without CUDA")

FP16: Final = core.Codec("fp16", 64)
Make = Callable[[], dict[str, Any]]
REFUSED: Final[dict[str, tuple[Make, str]]] = {
    "CPU input": (
        lambda: {"inputs": [torch.zeros(128)], "encoded": wire(FP16, 128)},
        "128 elements is in CPU memory, but this call works on CUDA memory",
    ),
    "CPU wire": (
        lambda: {"wires": [(torch.zeros(256, dtype=torch.uint8), OnDevice(2))], "outputs": [OnDevice(128)]},
        "256 elements is in CPU memory",
    ),
    "not a tensor": (lambda: {"inputs": [3], "encoded": wire(FP16, 128)}, "expected a tensor, got"),
    "two devices": (
        lambda: {"inputs": [OnDevice(128)], "encoded": wire(FP16, 128, device=1)},
        "tensors on CUDA devices 0 and 1 together",
    ),
    "input of a wrong dtype": (
        lambda: {"inputs": [OnDevice(128, "int32")], "encoded": wire(FP16, 128)},
        "only float32, float16 and bfloat16 are compressed, not int32",
    ),
    "two dtypes": (
        lambda: {"inputs": [OnDevice(64), OnDevice(64, "float16")], "encoded": wire(FP16, 128)},
        "tensors of float16 and float32 together",
    ),
    "short inputs": (
        lambda: {"inputs": [OnDevice(100), OnDevice(27)], "encoded": wire(FP16, 128)},
        "hold 127 elements, not 128",
    ),
    "short values": (
        lambda: {"inputs": [OnDevice(128)], "encoded": (OnDevice(255, "uint8"), OnDevice(2))},
        "expects 256 encoded bytes as uint8, not 255",
    ),
    "values of a wrong dtype": (
        lambda: {"inputs": [OnDevice(128)], "encoded": (OnDevice(128, "float16"), OnDevice(2))},
        "encoded bytes as uint8, not 128 of float16",
    ),
    "short scales": (
        lambda: {"inputs": [OnDevice(128)], "encoded": (OnDevice(256, "uint8"), OnDevice(1))},
        "expects 2 scales as float32, not 1",
    ),
    "short residual": (
        lambda: {"inputs": [OnDevice(128)], "residual": OnDevice(127), "encoded": wire(FP16, 128)},
        "residual of own tensors is 128 float32, not 127",
    ),
    "misaligned result": (
        lambda: {"inputs": [OnDevice(128)], "encoded": wire(FP16, 128, at=0x7F0000000008)},
        "values of the result must be aligned to 16 bytes, not at 0x7f0000000008",
    ),
    "misaligned wire": (
        lambda: {"wires": [wire(FP16, 128), wire(FP16, 128, at=0x7F0000000001)], "outputs": [OnDevice(128)]},
        "values of a wire must be aligned to 16 bytes",
    ),
    "misaligned element": (
        lambda: {"inputs": [OnDevice(128, at=0x7F0000000002)], "encoded": wire(FP16, 128)},
        "not at a multiple of their size",
    ),
    "nothing to sum": (lambda: {"encoded": wire(FP16, 128)}, "nothing to sum"),
    "own": (
        lambda: {"inputs": [OnDevice(128)], "own": 1, "encoded": wire(FP16, 128)},
        "own 1 among 0 wires",
    ),
    "counts of a wrong dtype": (
        lambda: {"inputs": [OnDevice(128)], "encoded": wire(FP16, 128), "counts": OnDevice(12, "int32")},
        "counts are 6 int64, not 12 int32",
    ),
    "too many wires": (
        lambda: {"wires": [wire(FP16, 128)] * 64, "outputs": [OnDevice(128)]},
        "up to 63 others, not 64",
    ),
}  # fmt: skip


@cuda_build
@pytest.mark.parametrize("case", REFUSED)
def test_transcode_refuses(case: str) -> None:
    """Before a driver is asked for."""
    arguments, words = REFUSED[case]
    with pytest.raises(InvalidArgument, match=words):
        core.cuda_transcode(FP16, 128, stream=0, **arguments())


@cuda_build
@pytest.mark.parametrize(
    ("output", "sources", "op", "scales", "words"),
    [
        (OnDevice(8), [torch.zeros(8)], "sum", None, "in CPU memory, but this call works on CUDA"),
        (OnDevice(8), [OnDevice(8, device=3)], "sum", None, "CUDA devices 0 and 3 together"),
        (OnDevice(8), [OnDevice(8, "float16")], "sum", None, "differ in dtype or count"),
        (OnDevice(8), [OnDevice(9)], "sum", None, "differ in dtype or count"),
        (OnDevice(8), [OnDevice(8)], "band", None, "dtype float32 has no op band"),
        (OnDevice(8), [OnDevice(8)], "most", None, "unknown op 'most'"),
        (OnDevice(8), [], "sum", None, "takes 1 to 16 sources, not 0"),
        (OnDevice(8), [OnDevice(8)] * 17, "sum", None, "takes 1 to 16 sources, not 17"),
        (OnDevice(8), [OnDevice(8)], "premul_sum", None, "needs a scale for each source"),
        (OnDevice(8), [OnDevice(8)], "premul_sum", [1.0, 2.0], "one scale for each source"),
        (OnDevice(8), [OnDevice(8, at=0x7F0000000004)], "sum", None, "aligned to 16 bytes"),
    ],
)
def test_reduce_refuses(
    output: OnDevice, sources: list[Any], op: str, scales: list[float] | None, words: str
) -> None:
    """Before a driver is asked for."""
    with pytest.raises(InvalidArgument, match=words):
        core.cuda_reduce(output, sources, op, stream=0, scales=scales)


@cuda_build
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, which would run this")
def test_without_a_driver_a_call_says_so() -> None:
    """One error that names the toolkit and what is missing, each time; the module was imported all the same."""
    words = r"CUDA cannot be used on this machine: .+; pycomm was built with CUDA \d+\.\d and needs a GPU and a driver"
    tensors = [OnDevice(64), OnDevice(64)]
    for _ in range(2):
        with pytest.raises(Error, match=words) as caught:
            core.cuda_transcode(FP16, 128, stream=0, inputs=tensors, encoded=wire(FP16, 128))
        assert type(caught.value) is Error
        with pytest.raises(Error, match=words):
            core.cuda_reduce(OnDevice(8), [OnDevice(8)], "sum", stream=5)
    # The protocol's name of the default stream is 1, others are called by their handle.
    assert tensors[0].streams == [1, 1]
    one = OnDevice(8)
    with pytest.raises(Error, match=words):
        core.cuda_reduce(one, [one], "sum", stream=77)
    assert one.streams == [77, 77]
