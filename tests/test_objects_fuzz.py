"""Wrong sizes and random bytes in torch's object collectives: an exception, or a value; no crash, hang or huge memory.

One rank calls the object collective; the other, in its place, the plain collectives that it is made of, with sizes and
bytes as a faulty peer could send them. What torch makes of them is torch's own code: it allocates as many bytes as the
peer says (which the system refuses or, being untouched, grants; the peer's tensor then differs, and pycomm raises
before it is used), cuts what arrived by the size as Python slices do, also by a negative one, and unpickles the rest.
pickle itself allocates what its opcodes say and imports what they name: objects are for peers that one trusts, and the
limit on memory here is the test's.
"""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import Refused, attempt, run, td
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pycomm

#: Of this test's ranks; more is "huge".
MEMORY: Final = 4 << 30
#: As far as the faulty rank goes along with what it said.
LARGEST: Final = 1 << 16
OBJECT: Final = {"epoch": 3, "loss": [0.5, None, "x" * 40]}
EXAMPLES: Final = 60
SECONDS: Final = 10.0  # until an example must be over; operations have more


@dataclass(frozen=True)
class Plan:
    """What the faulty rank does."""

    size: int | None  # None: the right one
    size_off: int  # to be added to the right one
    payload: bytes | None  # None: the right one
    flip: int  # position of a byte of the right one that is changed; -1: none
    count_off: int  # elements more than the other rank expects
    sizes: int = 1  # how many sizes are sent


#: A rank that does nothing wrong.
RIGHT: Final = Plan(None, 0, None, -1, 0)


def plans() -> st.SearchStrategy[Plan]:
    """All kinds of sizes and bytes, right ones among them."""
    sizes = st.one_of(
        st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1]),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 300),
    )
    return st.builds(
        Plan,
        size=st.none() | sizes,
        size_off=st.sampled_from([0, 0, -1, 1, -7]),
        payload=st.none() | st.binary(max_size=300),
        flip=st.integers(-1, 80),
        count_off=st.sampled_from([0, 0, 0, -1, 1, 1000]),
        sizes=st.sampled_from([1, 1, 1, 1, 0, 2]),
    )


def right() -> bytes:
    """OBJECT as torch sends it."""
    return bytes(dist.distributed_c10d._object_to_tensor(OBJECT, torch.device("cpu"), None)[0])


class Faulty:
    """A rank's part in an object collective, by hand. Its peer is rank 0."""

    def __init__(self, plan: Plan) -> None:
        whole = bytearray(right())
        if 0 <= plan.flip < len(whole):
            whole[plan.flip] ^= 0x41
        self.bytes = bytes(whole) if plan.payload is None else plan.payload
        size = len(right()) + plan.size_off if plan.size is None else plan.size
        self.size = min(max(size, -(2**63)), 2**63 - 1)
        self.plan = plan

    def size_tensor(self, count: int | None = None) -> torch.Tensor:
        return torch.full((self.plan.sizes if count is None else count,), self.size)

    def payload(self, expected: int) -> torch.Tensor:
        """The bytes, as many as the other rank expects but for the plan's deviation."""
        count = min(max(expected + self.plan.count_off, 0), LARGEST)
        return torch.tensor([*self.bytes.ljust(count, b"\0")[:count]], dtype=torch.uint8)

    def all_sizes(self) -> torch.Tensor:
        """Both ranks' sizes, exchanged as torch does."""
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(parts, self.size_tensor())
        return torch.cat(parts)

    def all_gather_object(self) -> None:
        mine = self.payload(int(self.all_sizes().max()))
        dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)

    def gather_object(self) -> None:
        dist.gather(self.payload(int(self.all_sizes().max())), None, 0)

    def broadcast_object_list(self) -> None:
        dist.broadcast(self.size_tensor(), 1)
        dist.broadcast(self.payload(self.size), 1)

    def scatter_object_list(self) -> None:
        dist.broadcast(self.size_tensor(), 1)
        mine = self.payload(self.size)
        dist.scatter(torch.empty_like(mine), [mine, mine], 1)
        dist.scatter(torch.zeros(1, dtype=torch.int64), [self.size_tensor(1)] * 2, 1)

    def recv_object_list(self) -> None:
        dist.send(self.size_tensor(), 0)
        dist.send(self.payload(self.size), 0)


def receive(name: str) -> Any:
    """What rank 0 gets of rank 1's object."""
    found: list[Any] = [None, None]
    match name:
        case "all_gather_object":
            dist.all_gather_object(found, OBJECT)
            return found[1]
        case "gather_object":
            dist.gather_object(OBJECT, found, 0)
            return found[1]
        case "scatter_object_list":
            dist.scatter_object_list(found, None, 1)
            return found[0]
    one: list[Any] = [None]
    getattr(dist, name)(one, 1)
    return one[0]


def limit_memory() -> None:
    """Of this process' private memory; shared segments do not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard))


def meet(store: dist.Store, number: int, rank: int) -> None:
    """Begin the default group of an example."""
    prefix = dist.PrefixStore(f"example {number}", store)
    dist.init_process_group("pycomm", store=prefix, rank=rank, world_size=2, timeout=td(60))


def leave() -> None:
    """Ends the group; ranks that got into different calls hear of it here, and again they are free of it."""
    with contextlib.suppress(pycomm.MismatchError):
        return dist.destroy_process_group()
    return dist.destroy_process_group()


def one_example(name: str, plan: Plan, number: int, store: dist.Store) -> None:
    """Rank 0's part."""
    store.set(f"plan {number}", json.dumps(asdict(plan), default=list))
    meet(store, number, 0)
    began = time.monotonic()
    found = attempt(lambda: receive(name), Exception)
    leave()
    assert time.monotonic() - began < SECONDS
    faulty = Faulty(plan)
    fails = isinstance(found, Refused)
    assert fails or faulty.size < MEMORY, (plan, found)
    assert fails or plan.sizes == 1, (plan, found)
    if plan == RIGHT:
        assert found == OBJECT


@pytest.mark.parametrize(
    "name",
    [
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "recv_object_list",
    ],
)
def test_any_size_and_bytes(name: str, tmp_path: Any) -> None:
    """Rank 0 gets an exception or a value each time; it leaves the group and begins the next one."""

    def honest(store: dist.Store) -> None:
        numbers = iter(range(1, 1 << 30))

        @settings(
            deadline=None,
            database=None,
            max_examples=EXAMPLES,
            suppress_health_check=list(HealthCheck),
        )
        @given(plan=plans())
        def every(plan: Plan) -> None:
            one_example(name, plan, next(numbers), store)

        one_example(name, RIGHT, 0, store)
        every()
        one_example(name, RIGHT, next(numbers), store)

    def faulty(store: dist.Store) -> int:
        number = 0
        while True:
            store.wait([f"plan {number}"], td(60))
            plan = json.loads(store.get(f"plan {number}"))
            if plan is None:
                return number
            if plan["payload"] is not None:
                plan["payload"] = bytes(plan["payload"])
            meet(store, number, 1)
            act: Callable[[], None] = getattr(Faulty(Plan(**plan)), name)
            with contextlib.suppress(RuntimeError, ValueError):
                act()
            leave()
            number += 1

    def worker(rank: int, _: int) -> int:
        limit_memory()
        store = dist.FileStore(f"{tmp_path}/store", 2)
        if rank == 1:
            return faulty(store)
        count = [0]
        try:
            honest(store)
        finally:
            while store.check([f"plan {count[0]}"]):
                count[0] += 1
            store.set(f"plan {count[0]}", "null")
        return count[0]

    done, followed = run(2, worker, init=False, wall=90)
    assert done == followed
    assert done > EXAMPLES // 2
