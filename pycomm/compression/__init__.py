"""Compressed gradients: fp16, bf16, fp8 and int8 wires, the largest values, low rank; with error feedback.

``pycomm.DistributedDataParallel(model, compression="fp16")`` is the short way; instances of the classes here say more
(``compression=Int8(block=512, warmup_steps=100)``). For torch's own DDP there is :func:`hook`, for code without DDP
:func:`all_reduce` and :func:`sync_gradients`; :func:`advise` says whether it pays. On a group of backend pycomm values
are encoded straight into shared memory, on others (Gloo between hosts) for two collectives of bytes (carrier.py). How
values are encoded stands in csrc/kernels/codec.h; TopK and PowerSGD are Python.
"""

from pycomm.compression.advice import Advice, advise
from pycomm.compression.codecs import (
    BF16,
    FP8,
    FP16,
    NAMED,
    Compressor,
    Encoding,
    FP8Wide,
    Int8,
    compressor_of,
    encoding_of,
)
from pycomm.compression.hook import HookState, hook
from pycomm.compression.lists import Averager, all_reduce, sync_gradients
from pycomm.compression.low_rank import PowerSGD
from pycomm.compression.report import Layer, markdown, report
from pycomm.compression.top_k import TopK

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "NAMED",
    "Advice",
    "Averager",
    "Compressor",
    "Encoding",
    "FP8Wide",
    "HookState",
    "Int8",
    "Layer",
    "PowerSGD",
    "TopK",
    "advise",
    "all_reduce",
    "compressor_of",
    "encoding_of",
    "hook",
    "markdown",
    "report",
    "sync_gradients",
]
