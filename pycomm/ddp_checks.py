"""What DistributedDataParallel checks so that gradients never differ between ranks in silence.

At construction: all ranks wrap the same model. At each forward: the parameters are still those that
were wrapped. At each backward: every gradient that was computed was also reduced.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pycomm.errors import InvalidArgument, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle

    from pycomm.ddp import DistributedDataParallel


# ---- construction ---------------------------------------------------------------------------------------------------


def check_models_agree(
    module: nn.Module, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> None:
    """Collective: raises MismatchError on every rank if the ranks' parameters differ.

    Compared are number, names, shapes, strides, dtypes and requires_grad, in order. Costs a small
    all-gather, and two more if something differs.
    """
    group = _group_of(process_group, device_mesh)
    if group is None or any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        return  # torch's constructor has the words for these
    if dist.get_rank(group) < 0:
        raise InvalidArgument(
            f"rank {dist.get_rank()} wraps a module with a process group that it is not a member of"
        )
    description = _describe_parameters(module)
    encoded = json.dumps(description).encode()
    digest = hashlib.sha256(encoded).digest()
    digests = _all_gather_bytes(digest, group)
    if all(other == digest for other in digests):
        return
    lengths = _all_gather_bytes(len(encoded).to_bytes(8, "little"), group)
    longest = max(int.from_bytes(length, "little") for length in lengths)
    texts = _all_gather_bytes(encoded.ljust(longest), group)
    raise MismatchError(_first_difference([json.loads(text) for text in texts], group))


def _group_of(
    process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup | None:
    """The group that torch's constructor will use, or None if it will refuse the arguments."""
    if process_group is not None:
        return process_group if device_mesh is None else None
    if device_mesh is not None:
        return device_mesh.get_group(mesh_dim=0) if device_mesh.ndim == 1 else None
    return dist.group.WORLD if dist.is_initialized() else None


def _describe_parameters(module: nn.Module) -> list[list[str]]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [
        [
            name,
            f"shape {list(p.shape)}, strides {_strides(p)}, {p.dtype}, requires_grad={p.requires_grad}",
        ]
        for name, p in module.named_parameters()
        if name not in ignored
    ]


def _strides(parameter: torch.Tensor) -> list[int]:
    return list(parameter.stride()) if parameter.layout == torch.strided else []


def _all_gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's ``data``, of equal length on all."""
    device = torch.device("cpu") if dist.get_backend(group) != "nccl" else torch.device("cuda")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    return [tensor.cpu().numpy().tobytes() for tensor in all_ranks]


def _first_difference(models: list[list[list[str]]], group: dist.ProcessGroup) -> str:
    """Names the first parameter in which a rank differs from the group's rank 0."""
    rank = dist.get_rank(group)
    for index in range(max(map(len, models))):
        rows = [model[index] if index < len(model) else None for model in models]
        if all(row == rows[0] for row in rows):
            continue
        texts = [
            f"rank {r}: {f'{row[0]} ({row[1]})' if row else 'none'}" for r, row in enumerate(rows)
        ]
        return (
            f"rank {rank}: the ranks wrap different models, with {', '.join(str(len(m)) for m in models)} parameters; "
            f"parameter {index} is on {'; '.join(texts)}. Build the same model on every rank."
        )
    raise AssertionError("unreachable: digests differ but the descriptions do not")


# ---- forward --------------------------------------------------------------------------------------------------------


class ParameterWatch:
    """Notices parameters that are no longer those that were wrapped: their gradients would stay local."""

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        self._entries = [
            (
                f"{prefix}.{key}" if prefix else key,
                owner._parameters,
                key,
                p,
                p.requires_grad,
                p.dtype,
                p.device,
            )
            for prefix, owner in module.named_modules()
            for key, p in owner._parameters.items()
            if p is not None and (f"{prefix}.{key}" if prefix else key) not in ignored
        ]

    def check(self) -> None:
        """Raises RuntimeError naming the first changed parameter. About 0.2 us a parameter."""
        for name, owner, key, parameter, requires_grad, dtype, device in self._entries:
            current = owner.get(key)
            if not isinstance(current, nn.Parameter):
                continue  # removed, or a tensor of torch.func.functional_call, which gets the gradient
            if current is not parameter:
                change = "replaced by another Parameter"
            elif current.dtype != dtype or current.device != device:
                change = f"changed from {dtype} on {device} to {current.dtype} on {current.device}"
            elif current.requires_grad and not requires_grad:
                change = "unfrozen"
            else:
                continue
            raise RuntimeError(
                f"rank {dist.get_rank()}: parameter {name} was {change} after wrapping in DistributedDataParallel; its "
                "gradient would not be reduced. Change the module first and wrap it then."
            )


# ---- backward -------------------------------------------------------------------------------------------------------


class BackwardWatch:
    """Notices gradients that were computed but not reduced.

    The Reducer is armed by a synchronised forward and done when all its buckets are. Hooks on the
    forward's outputs tell when a backward begins, hooks on the parameters which gradients it
    accumulates, an engine callback when it has ended. Not used with static_graph, where the Reducer
    itself watches.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._armed = False
        self._reached: list[
            torch.autograd.graph.Node
        ] = []  # outputs that this backward came through
        self._accumulated: set[int] = set()  # ids of the parameters whose gradients it added to
        parameters = ddp._build_params_for_reducer()[0]
        handles = [p.register_post_accumulate_grad_hook(self._noted()) for p in parameters]
        weakref.finalize(ddp, _remove_all, handles)

    def _noted(self) -> Callable[[torch.Tensor], None]:
        accumulated = self._accumulated
        return lambda parameter: accumulated.add(id(parameter))

    def forward_ended(self, output: Any) -> None:
        """To be called after every synchronised forward, with what it returned."""
        ddp = self._ddp()
        if ddp is None or ddp.static_graph or ddp._use_python_reducer:
            return
        self._armed = True
        self._reached = []
        for tensor in torch.nn.parallel.distributed._find_tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                node = tensor.grad_fn
                tensor.register_hook(lambda grad, node=node: self._backward_reached(node))

    def _backward_reached(self, node: torch.autograd.graph.Node) -> None:
        if not self._reached:
            self._accumulated.clear()
            engine = torch.autograd.Variable._execution_engine
            # Twice, so that it runs behind the Reducer's own callback, which is queued during backward.
            engine.queue_callback(lambda: engine.queue_callback(self._backward_ended))
        self._reached.append(node)

    def _backward_ended(self) -> None:
        ddp, reached, self._reached = self._ddp(), self._reached, []
        if ddp is None or not self._accumulated:  # torch.autograd.grad accumulates nothing
            return
        if not self._armed:
            raise RuntimeError(
                f"rank {dist.get_rank()}: backward() through a forward whose gradients "
                "DistributedDataParallel had already reduced; the new gradients of "
                f"{self._names(ddp)} are local. Call forward again before each backward, or add "
                "the losses and call backward once."
            )
        try:
            ddp.reducer._check_reducer_finalized()
            self._armed = False
        except RuntimeError:
            self._refuse_partial_reduction(ddp, reached)

    def _refuse_partial_reduction(
        self, ddp: DistributedDataParallel, reached: list[torch.autograd.graph.Node]
    ) -> None:
        """Raises if gradients were left out that this backward could have computed.

        Parameters that it could not reach may belong to a second loss, with a backward of its own; if not, torch's next
        forward says so.
        """
        reachable = {id(variable) for variable in _leaves(reached)}
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        left_out = [
            names.get(id(p), "?")
            for p in ddp._build_params_for_reducer()[0]
            if id(p) not in self._accumulated and (ddp.find_unused_parameters or id(p) in reachable)
        ]
        if left_out:
            raise RuntimeError(
                f"rank {dist.get_rank()}: backward() ended without the gradients of {', '.join(left_out)}, so "
                "DistributedDataParallel has not reduced all buckets and gradients differ between ranks. Do not pass "
                "inputs= to backward(), and return only tensors in tuples, lists and dicts from forward."
            )

    def _names(self, ddp: DistributedDataParallel) -> str:
        names = [n for n, p in ddp.module.named_parameters() if id(p) in self._accumulated]
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _leaves(nodes: list[torch.autograd.graph.Node]) -> Iterator[torch.Tensor]:
    """The leaf tensors of the graph behind the nodes."""
    seen: set[torch.autograd.graph.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack.extend(following for following, _ in node.next_functions if following is not None)
