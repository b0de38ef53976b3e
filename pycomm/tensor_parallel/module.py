"""The base of parallel layers: a module some of whose parameters are parts of larger ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.group import Group
from pycomm.tensor_parallel.layout import Layout, set_layout
from pycomm.tensor_parallel.sharded import ShardTensor

_states_are_whole: ContextVar[bool] = ContextVar("states are whole", default=False)


@contextmanager
def whole_states() -> Iterator[None]:
    """Within, parallel modules' states are the whole modules', given and taken; collective."""
    token = _states_are_whole.set(True)
    try:
        yield
    finally:
        _states_are_whole.reset(token)


class ParallelModule(nn.Module):
    """Has layouts of its split parameters, by name, which the parameters carry, too.

    ``state_dict()`` has ShardTensors for these; ``load_state_dict()`` takes this rank's parts as well as whole tensors,
    of which it takes its part.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.layouts: dict[str, Layout] = {}

    def adopt(self, source: nn.Module, layouts: dict[str, Layout]) -> None:
        """Takes a whole module's parameters: of those with a layout this rank's part, of others all."""
        self.layouts.update(layouts)
        for name, whole in source.named_parameters(recurse=False):
            layout = layouts.get(name)
            data = whole.detach()
            data = layout.take(data) if layout is not None else data.clone()
            setattr(self, name, nn.Parameter(data, whole.requires_grad))
        self.train(source.training)
        self._mark()

    def refill(self, source: nn.Module) -> None:
        """Copies a whole module's values into the parameters that are there."""
        with torch.no_grad():
            for name, whole in source.named_parameters(recurse=False):
                layout = self.layouts.get(name)
                own = getattr(self, name)
                own.copy_(layout.take(whole.detach()) if layout is not None else whole)

    def _mark(self) -> None:
        for name, layout in self.layouts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                set_layout(parameter, layout)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        layout = self.__dict__.get("layouts", {}).get(name)
        if layout is not None and isinstance(value, nn.Parameter):  # another one, as of FSDP
            set_layout(value, layout)
            if isinstance(value, DTensor):
                _check_mesh(f"{type(self).__name__}.{name}", value, layout)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        module = super()._apply(fn, recurse)
        self._mark()
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, layout in self.layouts.items():
            local = destination.get(prefix + name)
            if local is None:
                continue
            if _states_are_whole.get():
                local = local.full_tensor() if isinstance(local, DTensor) else local
                destination[prefix + name] = layout.gather(local)
            elif isinstance(local, DTensor):
                raise InvalidArgument(
                    f"rank {self.group.rank}: {prefix}{name} is split by tensor parallel and again by FSDP, for which "
                    "there is no state_dict(); take pycomm.tensor_parallel.gather_state_dict(model)"
                )
            elif not keep_vars:
                destination[prefix + name] = ShardTensor(local, layout)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        own = {}
        for name in self.layouts:
            given, own_one = state_dict.get(prefix + name), getattr(self, name)
            if given is not None and own_one is not None:
                own[prefix + name] = self._own_part(name, given, own_one, prefix)
        super()._load_from_state_dict({**state_dict, **own}, prefix, *args, **kwargs)

    def _own_part(
        self, name: str, given: torch.Tensor, parameter: torch.Tensor, prefix: str
    ) -> torch.Tensor:
        """Of what a state has: the part as it is, or this rank's of a whole tensor."""
        layout = self.layouts[name]
        if isinstance(given, ShardTensor):
            return given.plain()
        fits = given.shape == layout.shape
        if fits and given.shape == parameter.shape and not _states_are_whole.get():
            if layout.group.world_size > 1:
                raise InvalidArgument(
                    f"rank {self.group.rank}: {prefix}{name} of shape {tuple(given.shape)} may be the whole tensor or "
                    "this rank's padded part; load a whole state with pycomm.tensor_parallel.load_full_state_dict"
                )
            return given
        if not fits or not (_states_are_whole.get() or given.shape != parameter.shape):
            return given
        part = layout.take(given)
        if isinstance(parameter, DTensor):  # of FSDP, around
            where = parameter.device_mesh, parameter.placements
            return distribute_tensor(part.to(parameter.device), *where, src_data_rank=None)
        return part

    def check_width(self, tensor: torch.Tensor, width: int, advice: str, dim: int = -1) -> None:
        """Raises InvalidArgument if an input has another width than this rank's layer."""
        if tensor.shape[dim] != width:
            raise InvalidArgument(
                f"rank {self.group.rank} of {self.group.world_size}: {type(self).__name__}({self.extra_repr()}) got an "
                f"input of shape {tuple(tensor.shape)}, dimension {dim} of which must be {width}; {advice}"
            )


def _check_mesh(name: str, parameter: DTensor, layout: Layout) -> None:
    """Raises InvalidArgument if FSDP shards over ranks that have other parts of the parameter."""
    split_over = layout.group.process_group
    if split_over is None:
        return
    sharing = set(dist.get_process_group_ranks(split_over))
    both = sharing & set(parameter.device_mesh.mesh.flatten().tolist())
    if len(both) > 1:
        raise InvalidArgument(
            f"rank {layout.group.rank} of {layout.group.world_size}: {name} is split over ranks {sorted(sharing)} by "
            f"tensor parallel, and FSDP over {sorted(both)} would put together parts of different layers; pass "
            'mesh=mesh["dp"]'
        )


def autocast(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors in the dtype that torch.autocast wants for a product, if it is on."""
    first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    ]
