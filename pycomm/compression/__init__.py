"""Compressed gradients: fp16, bf16, fp8 and int8 wires, with error feedback, without overflow.

``pycomm.DistributedDataParallel(model, compression="fp16")`` is the short way; instances of the classes here say more
(``compression=Int8(block=512, warmup_steps=100)``). For torch's own DDP there is :func:`hook`, for code without DDP
:func:`all_reduce` and :func:`sync_gradients`. How values are encoded stands in csrc/kernels/codec.h.
"""

from pycomm.compression.codecs import (
    BF16,
    FP8,
    FP16,
    NAMED,
    Encoding,
    FP8Wide,
    Int8,
    encoding_of,
)
from pycomm.compression.hook import HookState, hook
from pycomm.compression.lists import Averager, all_reduce, sync_gradients
from pycomm.compression.report import Layer, markdown, report

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "NAMED",
    "Averager",
    "Encoding",
    "FP8Wide",
    "HookState",
    "Int8",
    "Layer",
    "all_reduce",
    "encoding_of",
    "hook",
    "markdown",
    "report",
    "sync_gradients",
]
