"""What compression keeps from step to step, in checkpoints: by parameter name, for any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from pycomm.errors import InvalidArgument

log = logging.getLogger("pycomm")

VERSION = 1


class KeepsResiduals(Protocol):
    """What holds residuals: of every compressed parameter a float32 tensor of its elements, in memory order.

    Buckets of torch's Reducer are in memory order, too; sync_gradients goes by indices.
    """

    def residuals(self) -> Mapping[str, torch.Tensor]:
        """By name; the tensors themselves."""


class Group(Protocol):
    """The ranks between which gradients travel."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def world_size(self) -> int:
        """How many."""

    def all_reduce(self, tensor: Any, op: str = "sum") -> Any:
        """In place."""


def state_dict(keeper: KeepsResiduals, group: Group, step: int) -> dict[str, Any]:
    """Collective: this rank's residuals, and their sums over all ranks, which another number of ranks can share."""
    own = {name: residual.clone() for name, residual in keeper.residuals().items()}
    total = {name: residual.clone() for name, residual in own.items()}
    for residual in total.values():
        group.all_reduce(residual)
    return {
        "version": VERSION,
        "step": step,
        "rank": group.rank,
        "world_size": group.world_size,
        "residuals": own,
        "total": total,
    }


def check(state: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for what is no such state."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise InvalidArgument("this is no compression state of this version of pycomm")


def load_state_dict(keeper: KeepsResiduals, group: Group, state: Mapping[str, Any]) -> int:
    """Takes over a state; returns its step. Bit-exact on the rank that it is of, in a world of the same size.

    Elsewhere every rank takes its share of the sum, so that what was left out still arrives: all ranks must then be
    given the state of the same step. Parameters that the state does not know begin at zero and are named in a warning,
    as those of another size are. Raises InvalidArgument for what is no such state.
    """
    check(state)
    is_own = (state["rank"], state["world_size"]) == (group.rank, group.world_size)
    source = state["residuals"] if is_own else state["total"]
    missing = []
    for name, residual in keeper.residuals().items():
        saved = source.get(name)
        if saved is None or saved.numel() != residual.numel():
            residual.zero_()
            missing.append(name)
        else:
            residual.copy_(saved if is_own else saved / group.world_size)
    if missing:
        log.warning(
            "rank %d: the compression state has no residual of %s; they begin at zero",
            *(group.rank, ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")),
        )
    return int(state["step"])
