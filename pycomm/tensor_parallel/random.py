"""Random numbers: the same on all ranks outside of parallel regions, different inside.

    torch.manual_seed(0)  # the same on all ranks of a tensor parallel group
    with tensor_parallel.own_random_numbers():
        part = functional.dropout(part)  # this rank's heads: another mask than the other ranks'
    whole = functional.dropout(whole)  # again the same on all ranks

There is no other state than torch's: a region's seed is a digest of torch's generator, which is in the same state on
all ranks, and of the rank. So activation checkpointing, which sets torch's generator back, gets the same masks when it
runs a region again, and a checkpoint needs torch's state alone (:class:`RandomState`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycomm.errors import MismatchError
from pycomm.tensor_parallel.group import Group, GroupLike, group_of

_outside: list[list[torch.Tensor]] = []  # torch's states outside of the regions that are entered


def enter(ranks: Group) -> list[torch.Tensor]:
    """From here on random numbers differ between ranks; what it returns is for ``leave``."""
    outside = _states()
    _outside.append(outside)
    digest = hashlib.blake2b(str(ranks.rank).encode(), digest_size=7)
    for state in outside:
        digest.update(state.numpy().data)
    torch.manual_seed(int.from_bytes(digest.digest(), "big"))
    return _states()


def leave(first: list[torch.Tensor]) -> None:
    """From here on they go on as if nothing or, if any was drawn since, as if one had been drawn."""
    is_untouched = all(map(torch.equal, first, _states()))
    _restore(_outside.pop())
    if not is_untouched:
        torch.rand(())


@contextmanager
def own_random_numbers(group: GroupLike | Group = None) -> Iterator[None]:
    """Inside, torch's random numbers differ between the group's ranks; outside they go on as if one had been drawn.

    As if none, where nothing was drawn inside.
    """
    ranks = group_of(group)
    if ranks.world_size == 1:
        yield
        return
    first = enter(ranks)
    try:
        yield
    finally:
        leave(first)


@contextmanager
def common_random_numbers() -> Iterator[None]:
    """Within ``own_random_numbers``: the same numbers on all ranks again, those that follow outside."""
    if not _outside:
        yield
        return
    inside, outside = _states(), _outside.pop()
    _restore(outside)
    try:
        yield
    finally:
        _outside.append(_states())
        _restore(inside)


def check_random_states(group: GroupLike | Group = None) -> None:
    """Collective: raises MismatchError if torch's generators are in different states, so that dropout would differ."""
    ranks = group_of(group)
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7).digest()
    everyone = ranks.gather_numbers([int.from_bytes(digest, "big")])
    for rank, of_rank in enumerate(everyone):
        if of_rank != everyone[0]:
            raise MismatchError(
                f"rank {ranks.rank}: the random state of rank {rank} of the tensor parallel group is not that of rank "
                "0, so weights and dropout would differ; seed all ranks of the group alike (torch.manual_seed)"
            )


class RandomState:
    """torch's random state for checkpoints: ``pycomm.checkpoint.save({"random": RandomState(), ...}, ...)``.

    It is one for all ranks of a tensor parallel group; data parallel replicas that draw other numbers need a name each.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of the CPU's generator, and of the current CUDA device's where it is used."""
        return {f"state{i}": state for i, state in enumerate(_states())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        _restore([state[f"state{i}"] for i in range(len(state))])


def _states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
