"""Lets tests that want GPUs only to place their tensors run on CPU tensors.

Many of torch's distributed tests ask for two GPUs although what they check has nothing to do with the device. Here the
gates that count devices stand open, and whatever names a CUDA device, as text, number or torch.device, means the CPU.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

#: The suite's groups of ranks 1 and 2 need one more rank.
SMALL_WORLD = 3


def to_cpu(value: Any) -> Any:
    """The CPU in place of anything that designates a CUDA device; other values unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, int) or (isinstance(value, str) and value.startswith("cuda")):
        return torch.device("cpu")
    return value


class OnCpu(TorchFunctionMode):
    """Keeps every tensor that torch functions make or move on the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func` with the CPU for its device."""
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "to":
            args = (args[0], *map(to_cpu, args[1:]))
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": to_cpu(kwargs["device"])}
        return func(*args, **kwargs)


def open_gates() -> None:
    """Replaces the decorators that count devices; call it before the suite is imported."""
    # Its resnet50 on 1000 x 1000 images takes minutes on two cores.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    from torch.testing._internal import common_distributed as gates

    for name in (
        "skip_if_lt_x_gpu",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
    ):
        setattr(gates, name, lambda *_args, **_kwargs: lambda test: test)
    gates.skip_if_no_gpu = lambda test: test
    gates.skip_if_small_worldsize = _skip_in_small_world
    gates.init_multigpu_helper = lambda world_size, backend: {r: [r] for r in range(world_size)}


def _skip_in_small_world(test: Callable[..., Any]) -> Callable[..., Any]:
    """torch's gate of this name asks for 8 ranks; the tests behind it need 3."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    @functools.wraps(test)
    def gated(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < SMALL_WORLD:
            sys.exit(TEST_SKIPS["small_worldsize"].exit_code)
        return test(*args, **kwargs)

    return gated


def place_on_cpu() -> None:
    """Sends what this process, and those forked from it, put on a CUDA device to the CPU instead."""
    OnCpu().__enter__()  # for good
    move, load = nn.Module.to, torch.load

    def module_to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return move(self, *map(to_cpu, args), **{k: to_cpu(v) for k, v in kwargs.items()})

    def load_on_cpu(*args: Any, **kwargs: Any) -> Any:
        where = {"map_location": "cpu"} if kwargs.get("map_location") else {}
        return load(*args, **{**kwargs, **where})

    replacements: Any = [
        (nn.Module, "to", module_to),
        (torch, "load", load_on_cpu),
        (torch.cuda, "set_device", lambda *_args: None),
        (torch.cuda, "synchronize", lambda *_args, **_kwargs: None),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda _device: nullcontext()),
    ]
    for owner, name, function in replacements:
        setattr(owner, name, function)


def ignore_devices(ddp: type) -> None:
    """Makes the DDP class deaf to device_ids and output_device: CPU modules must not have them."""
    original: Any = ddp.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del device_ids, output_device
        original(self, module, None, None, *args, **kwargs)

    ddp.__init__ = init  # type: ignore[misc]
