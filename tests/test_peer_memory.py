"""Peer memory as far as it gets without a device: how ranks agree on it, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm.errors import Error, InvalidArgument, TimeoutError
from pycomm.extension import core
from pycomm.peer_memory import open_peer_memory

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)

# ---- agreement ----------------------------------------------------------------------------------


class Memory:
    """Stands in for core.PeerMemory; rank `cannot_make` has no device, rank `cannot_map` not its peers."""

    cannot_make = cannot_map = -1

    def __init__(
        self, device: int, rank: int, world_size: int, timeout: timedelta, **layout: int
    ) -> None:
        self.device, self.rank, self.layout = device, rank, layout
        self.handles: list[str] = []
        self.closed = False
        if rank == self.cannot_make:
            raise Error("CUDA cannot be used on this machine")
        self.handle = f"memory of {rank}"

    def connect(self, handles: list[str]) -> None:
        if self.rank == self.cannot_map:
            raise Error(f"rank {self.rank} cannot map the memory of rank 0: it is on another host")
        self.handles = list(handles)

    def close(self) -> None:
        self.closed = True


def opened(kind: type[Memory], world_size: int = 3) -> tuple[list[Any], list[Memory]]:
    """What every rank got, and all memories that were made."""
    store, made = dist.HashStore(), list[Memory]()

    def make(*arguments: Any, **layout: Any) -> Memory:
        made.append(kind(*arguments, **layout))
        return made[-1]

    def rank(number: int) -> Any:
        return open_peer_memory(store, number, world_size, 0, MINUTE, make=make, blocks=7)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size))), made


def test_all_ranks_get_each_others_handles() -> None:
    got, made = opened(Memory)
    assert sorted(made, key=lambda memory: memory.rank) == got
    for memory in got:
        assert memory.handles == ["memory of 0", "memory of 1", "memory of 2"]
        assert memory.layout == {"blocks": 7}
        assert not memory.closed


def test_a_rank_without_a_device_means_none_for_all() -> None:
    class Fails(Memory):
        cannot_make = 1

    got, made = opened(Fails)
    assert got == ["rank 1 has no peer memory: CUDA cannot be used on this machine"] * 3
    assert len(made) == 2
    assert all(memory.closed for memory in made)


def test_a_rank_that_cannot_map_means_none_for_all() -> None:
    class Fails(Memory):
        cannot_map = 2

    got, made = opened(Fails)
    words = (
        "rank 2 has no peer memory: rank 2 cannot map the memory of rank 0: it is on another host"
    )
    assert got == [words] * 3
    assert len(made) == 3
    assert all(memory.closed for memory in made)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0: .*waited 1 s for ranks \[1, 2\] of 3"):
        open_peer_memory(dist.HashStore(), 0, 3, 0, SECOND, make=Memory)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_all_ranks_say_so() -> None:
    """The real class, or a build without one."""
    words = open_peer_memory(dist.HashStore(), 0, 1, 0, MINUTE)
    assert isinstance(words, str)
    assert words.startswith("rank 0 has no peer memory: ")
    assert ("CUDA cannot be used on this machine" in words) == (core.cuda is not None)
    assert ("built without CUDA" in words) == (core.cuda is None)


# ---- the class ----------------------------------------------------------------------------------

cuda_build = pytest.mark.skipif(core.cuda is None, reason="built without CUDA")


@cuda_build
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 17}, "holds 1 to 16 ranks, not 17"),
        ({"world_size": 0}, "holds 1 to 16 ranks, not 0"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"slots": 6}, "slots are a power of two, at least 4"),
        ({"slots": 2}, "slots are a power of two, at least 4"),
        ({"slot_bytes": 1000}, "1000 bytes: .* a multiple of 128"),
        ({"slot_bytes": 256}, "of at least 1024 bytes"),
        ({"blocks": 0}, "memory of 0 blocks"),
    ],
)
def test_layouts_that_cannot_be_are_refused(arguments: dict[str, int], words: str) -> None:
    """Before a driver is asked for."""
    call = {"device": 0, "rank": 0, "world_size": 2, "timeout": SECOND, **arguments}
    with pytest.raises(InvalidArgument, match=words):
        core.PeerMemory(**call)


@cuda_build
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_class_says_so() -> None:
    for _ in range(2):
        with pytest.raises(Error, match="CUDA cannot be used on this machine") as caught:
            core.PeerMemory(0, 0, 2, SECOND)
        assert type(caught.value) is Error


@cuda_build
def test_handles_tell_who_cannot_be_mapped() -> None:
    mine = core.peer_handle("host-a", 1, "0000:01:00.0")
    same = core.peer_handle("host-a", 2, "0000:02:00.0")
    assert core.why_not_mapped(mine, same) == ""
    other = core.peer_handle("host-b", 1, "0000:01:00.0")
    assert core.why_not_mapped(mine, other) == "it is on another host"
    smaller = core.peer_handle("host-a", 2, "0000:02:00.0", blocks=8)
    assert "has 8 blocks with 4 slots of 65536 bytes, this rank's has 32" in core.why_not_mapped(
        mine, smaller
    )


@cuda_build
@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + " more",
        lambda text: text[:-2] + "zz",
        lambda text: text.replace("pycomm-peer-1", "pycomm-peer-2"),
        lambda text: text.replace(" 65536 ", " many "),
    ],
)
def test_a_handle_that_is_none_is_refused(spoil: Any) -> None:
    good = core.peer_handle("host-a", 1, "0000:01:00.0")
    with pytest.raises(
        InvalidArgument, match="no handle of peer memory, or one of another version"
    ):
        core.why_not_mapped(good, spoil(good))
