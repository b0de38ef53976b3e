"""What DistributedDataParallel checks so that gradients never differ between ranks in silence.

At construction: all ranks wrap the same model. At each forward: the parameters are still those that
were wrapped. At each backward: every gradient that was computed was also reduced. At an optimizer's
step: none is still missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pycomm.backend import has_cpu, living_communicators
from pycomm.config import config
from pycomm.errors import GradientError, InvalidArgument, MismatchError
from pycomm.extension import c10d

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pycomm.ddp import DistributedDataParallel


def refuse(ddp: DistributedDataParallel, problem: str) -> NoReturn:
    """Raises GradientError here and, where this rank is waited for, AbortedError with the same words."""
    for communicator in living_communicators(ddp.process_group):
        communicator.abort(problem)
    _raise(ddp, problem)


def _raise(ddp: DistributedDataParallel, problem: str) -> NoReturn:
    error = GradientError(f"rank {dist.get_rank(ddp.process_group)}: {problem}")
    if ddp.logger is not None:
        ddp.logger.set_error_and_log(f"{type(error)}: {error}")
    raise error


# ---- construction ---------------------------------------------------------------------------------------------------


def check_models_agree(
    module: nn.Module,
    process_group: dist.ProcessGroup | None,
    device_mesh: Any,
    with_buffers: bool,
) -> None:
    """Collective: raises MismatchError on every rank if the ranks' parameters, or buffers, differ.

    Compared are number, names, shapes, strides, dtypes and requires_grad, in order. Costs a small
    all-gather, and two more if something differs.
    """
    group = _group_of(process_group, device_mesh)
    if group is None or any(map(is_lazy, module.parameters())):
        return  # torch's constructor has the words for these
    if dist.get_rank(group) < 0:
        raise InvalidArgument(
            f"rank {dist.get_rank()} wraps a module with a process group that it is not a member of"
        )
    description = _describe(module.named_parameters(), module)
    if with_buffers:
        description += _describe(module.named_buffers(), module)
    encoded = json.dumps(description).encode()
    digest = hashlib.sha256(encoded).digest()
    digests = _all_gather_bytes(digest, group)
    if all(other == digest for other in digests):
        return
    lengths = _all_gather_bytes(len(encoded).to_bytes(8, "little"), group)
    longest = max(int.from_bytes(length, "little") for length in lengths)
    texts = _all_gather_bytes(encoded.ljust(longest), group)
    raise MismatchError(_first_difference([json.loads(text) for text in texts], group))


def check_replicated(
    module: nn.Module, process_group: dist.ProcessGroup | None, device_mesh: Any
) -> None:
    """Raises InvalidArgument if ranks of the group have parts of one parameter, which cannot be averaged."""
    group = _group_of(process_group, device_mesh)
    if group is None or dist.get_rank(group) < 0:
        return  # others have the words for these
    for name, parameter in module.named_parameters():
        layout = getattr(parameter, "tensor_parallel_layout", None)
        split_over = None if layout is None else layout.group.process_group
        if split_over is None:
            continue
        sharing = set(dist.get_process_group_ranks(split_over))
        both = sharing & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise InvalidArgument(
                f"rank {dist.get_rank(group)}: {name} is split over ranks {sorted(sharing)} by tensor parallel, and "
                f"averaged between {sorted(both)} it would be a mix of parts; pass the group of its replicas, as "
                'process_group=mesh["dp"].get_group()'
            )


def _group_of(
    process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup | None:
    """The group that torch's constructor will use, or None if it will refuse the arguments."""
    if process_group is not None:
        return process_group if device_mesh is None else None
    if device_mesh is not None:
        return device_mesh.get_group(mesh_dim=0) if device_mesh.ndim == 1 else None
    return dist.group.WORLD if dist.is_initialized() else None


def _describe(named: Iterable[tuple[str, torch.Tensor]], module: nn.Module) -> list[list[str]]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [
        [
            name,
            f"shape {list(t.shape)}, strides {_strides(t)}, {t.dtype}, requires_grad={t.requires_grad}",
        ]
        for name, t in named
        if name not in ignored and not is_lazy(t)
    ]


def _strides(tensor: torch.Tensor) -> list[int]:
    return list(tensor.stride()) if tensor.layout == torch.strided else []


def _all_gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's ``data``, of equal length on all."""
    device = torch.device("cpu" if has_cpu(group) else "cuda")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    return [tensor.cpu().numpy().tobytes() for tensor in all_ranks]


def _first_difference(models: list[list[list[str]]], group: dist.ProcessGroup) -> str:
    """Names the first parameter or buffer in which a rank differs from the group's rank 0."""
    rank = dist.get_rank(group)
    for index in range(max(map(len, models))):
        rows = [model[index] if index < len(model) else None for model in models]
        if all(row == rows[0] for row in rows):
            continue
        texts = [
            f"rank {r}: {f'{row[0]} ({row[1]})' if row else 'none'}" for r, row in enumerate(rows)
        ]
        return (
            f"rank {rank}: the ranks wrap different models, of {', '.join(str(len(m)) for m in models)} parameters and "
            f"buffers; number {index} is on {'; '.join(texts)}. Build the same model on every rank."
        )
    raise AssertionError("unreachable: digests differ but the descriptions do not")


# ---- forward --------------------------------------------------------------------------------------------------------


class ParameterWatch:
    """Notices parameters that are no longer those that were wrapped: their gradients would stay local."""

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._names, self._parameters = self._named_parameters()
        self._wrapped = {id(p) for p in self._parameters}
        self._before = [_traits_in_words(p) for p in self._parameters]
        self._traits = c10d.ParameterWatch(self._parameters)
        self._record_structure()

    def problem(self) -> str | None:
        """What is wrong with a parameter, by its name. About 0.15 us a parameter."""
        members = self._members_now()
        same = len(members) == len(self._members)
        if not same or not all(map(operator.is_, members, self._members)):
            self._record_structure()
        for name, parameter in self._others:
            if parameter.requires_grad:
                change = "replaced by another Parameter" if name in self._names else "added"
                return self._describe(name, change)
        for index in self._traits.changed():
            now = _traits_in_words(self._parameters[index])
            return self._describe(
                self._names[index], f"changed from {self._before[index]} to {now}"
            )
        return None

    def _named_parameters(self) -> tuple[list[str], list[nn.Parameter]]:
        """Those that DDP manages. In a torch.func.functional_call others than Parameters take their places."""
        found = [
            (name, p)
            for name, p in self._module.named_parameters()
            if name not in self._ignored and isinstance(p, nn.Parameter)
        ]
        return [name for name, _ in found], [p for _, p in found]

    def _record_structure(self) -> None:
        modules = list(self._module.modules())
        self._containers = [d for m in modules for d in (m._modules, m._parameters)]
        self._members = self._members_now()
        found = zip(*self._named_parameters(), strict=True)
        self._others = [(name, p) for name, p in found if id(p) not in self._wrapped]

    def _members_now(self) -> list[Any]:
        return [member for container in self._containers for member in container.values()]

    @staticmethod
    def _describe(name: str, change: str) -> str:
        return (
            f"parameter {name} was {change} after wrapping in DistributedDataParallel; its gradient would not be "
            "averaged. Change the module first and wrap it then."
        )


def _traits_in_words(parameter: torch.Tensor) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}{frozen}"


# ---- backward -------------------------------------------------------------------------------------------------------

#: What C++ calls each problem, and how to say it.
_PROBLEMS = {
    "twice": (
        "backward() brought the gradients of {names} twice since the last forward, and they are averaged once. Add the "
        "losses and call backward() once after each forward; with activation checkpointing use use_reentrant=False, or "
        "static_graph=True."
    ),
    "late": (
        "backward() went through a forward whose gradients DistributedDataParallel had already averaged; the new "
        "gradients of {names} are local. Call forward again before each backward, or add the losses and call backward "
        "once."
    ),
    "unseen": (
        "backward() brought the gradients of {names}, which find_unused_parameters=True had found unused: they are "
        "used outside of the forward, or it returned tensors in objects of another kind than tuples, lists, dicts and "
        "dataclasses. Return such objects, or set find_unused_parameters=False."
    ),
    "more": (
        "Your training graph has changed in this iteration: backward() brought more gradients of {names} than in the "
        "first one. With static_graph=True each iteration must use the parameters as the first one did."
    ),
    "fewer": (
        "Your training graph has changed in this iteration: backward() brought fewer gradients of {names} than in the "
        "first one. With static_graph=True each iteration must use the parameters as the first one did."
    ),
    "unreached": (
        "the gradients of {names} were not averaged: with static_graph=True the first backward() must go through what "
        "forward returned, in tensors or tuples, lists and dicts of them."
    ),
    "restricted": (
        "backward(inputs=...) left out the gradients of {names}, so DistributedDataParallel cannot average those of "
        "their buckets. Call backward() without inputs=, or torch.autograd.grad for gradients that stay local."
    ),
    "missing": (
        "backward() ended without the gradients of {names}, so DistributedDataParallel cannot average those of their "
        "buckets. Use these parameters in each forward and loss, on each rank, or set find_unused_parameters=True and "
        "return tensors, or tuples, lists and dicts of them, from forward."
    ),
    "interrupted": (
        "an error ended the last backward() before the gradients of {names} came, so DistributedDataParallel has not "
        "averaged those of their buckets. To go on after such an error, on every rank: make a new process group, call "
        "model._update_process_group(group), and set the gradients to zero."
    ),
}


def _torch_words(rank: int, indices: list[int], names: list[str]) -> str:
    """What programs look for in torch's message, which its Reducer does not write when gradients go the direct way."""
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        more = "torch tells names if you set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
    else:
        more = f"Parameters which did not receive grad for rank {rank}: {', '.join(names)}"
    return (
        "Expected to have finished reduction in the prior iteration. What helps is passing the keyword argument "
        "`find_unused_parameters=True`, or to see that all `forward` function outputs participate in calculating loss. "
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, indices))}; {more}"
    )


class BackwardWatch:
    """Notices gradients that were computed but not reduced, and parameters for which other ranks would wait in vain.

    The work is done in C++ (csrc/c10d/backward_watch.h); here are the words. Not used with the Python reducer and mixed
    precision.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
        self._ddp = weakref.ref(ddp)
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._names = [names[id(p)] for p in parameters]
        self._in_use = not ddp._use_python_reducer and ddp.mixed_precision is None
        report = functools.partial(_report, self._ddp, self._names)
        watched = list(parameters) if self._in_use else []
        self._late = config().ddp_missing == "step"
        self._watch = c10d.BackwardWatch(watched, late=self._late, report=report)
        _watch_optimizers()
        _all_watches.add(self)

    @property
    def core(self) -> Any:
        """The C++ part."""
        return self._watch

    def attach(self) -> None:
        """To be called when the Reducer is there."""
        ddp = self._ddp()
        if ddp is not None and self._in_use:
            self._watch.attach(ddp.reducer)

    def stop(self) -> None:
        """Notices nothing from now on."""
        self._in_use = False
        self._watch.stop()

    def forward_begins(self, directly: bool) -> None:
        """To be called before every synchronised forward; `directly` if the DirectReducer is to be armed by it."""
        if self._in_use:
            self._watch.forward_begins(directly)

    def forward_ended(self, output: Any) -> None:
        """To be called after it, with what it returned."""
        if self._in_use:
            self._watch.forward_ended(_tensors_in(output))

    def problem(self) -> str | None:
        """What the last backward has left undone, in our words and torch's."""
        kind, ddp = self._watch.unfinished(), self._ddp()
        if kind is None or ddp is None:
            return None
        indices = self._watch.unfinished_indices()
        names = [self._names[index] for index in indices]
        words = _in_words(kind, names)
        try:
            ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            words += f"\n{error}"
        else:
            words += f"\n{_torch_words(dist.get_rank(ddp.process_group), indices, names)}"
        return words

    def check_before_forward(self) -> None:
        """Raises GradientError if the last backward has left something undone."""
        problem, ddp = self.problem(), self._ddp()
        if problem is None or ddp is None:
            return
        if self._late:
            _raise(ddp, problem)  # as torch: the group lives on
        refuse(ddp, problem)

    def check_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises GradientError if the optimizer would use gradients of which some are not averaged."""
        if self._watch.unfinished() is None or not self._watch.is_between_backwards():
            return  # within a backward an optimizer may step bucket by bucket
        problem, ddp = self.problem(), self._ddp()
        if problem is None or ddp is None:
            return
        managed = {id(p) for p in ddp.module.parameters()}
        if any(id(p) in managed for group in optimizer.param_groups for p in group["params"]):
            refuse(ddp, problem)


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors that torch finds in what a forward returned or, in an object unknown to it, in its attributes."""
    tensors = list(_find_tensors(output))
    return tensors or list(_find_tensors(getattr(output, "__dict__", None)))


def _report(
    ddp_weakref: weakref.ref[DistributedDataParallel],
    names: list[str],
    kind: str,
    indices: list[int],
) -> None:
    """What C++ calls when it has noticed something during a backward."""
    ddp = ddp_weakref()
    if ddp is not None:
        refuse(ddp, _in_words(kind, [names[index] for index in indices]))


def _in_words(kind: str, names: list[str]) -> str:
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return _PROBLEMS[kind].format(names=some)


# ---- optimizers -----------------------------------------------------------------------------------------------------

_all_watches: weakref.WeakSet[BackwardWatch] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Lets every optimizer ask, before its step, whether gradients are missing. Once for all of them."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watch in list(_all_watches):
        watch.check_before_step(optimizer)
