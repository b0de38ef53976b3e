"""How the ranks of a group find each other: rank 0's offer of a shared segment, by way of the job's Store.

Two keys, under the group's own prefix:

* ``pycomm/offer`` is rank 0's: ``offer ATTEMPT ADDRESS``; ``error ATTEMPT CLASS TEXT`` if it failed; ``over`` if it has
  waited in vain. It is deleted when all ranks have joined.
* ``pycomm/left`` is that of another rank that gave up: ``RANK ATTEMPT ID TEXT``, its attempt being ``-`` if there was
  none to join.

From the first contact on everybody hears of failures over rank 0's socket (``csrc/shm/rendezvous.h``).

A Store may hold what an earlier rendezvous left. An offer is stale if its socket is gone; then a rank waits for another
one. News of an attempt that has already ended for a rank are none. An error, or a rank's farewell, that was there
before a rank came is believed if no better news come within ``COME_AGAIN`` seconds.

Nothing here blocks in torch's C++ code, where Ctrl-C is not heard: the Store is asked again and again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from pycomm import all_reduce_table
from pycomm.config import Config, config
from pycomm.errors import AbortedError, Error, InvalidArgument, MismatchError, TimeoutError
from pycomm.extension import core
from pycomm.flight import install

if TYPE_CHECKING:
    from pycomm._core import Communicator, ShmOffer

OFFER_KEY: Final = "pycomm/offer"
LEFT_KEY: Final = "pycomm/left"
NO_ATTEMPT: Final = "-"
#: Seconds in which a rank that failed before others came may come again.
COME_AGAIN = 5.0
#: Seconds between two looks, at first and at most, and how they grow.
SHORTEST_PAUSE: Final = 0.0001
LONGEST_PAUSE: Final = 0.02
GROWTH: Final = 1.3
#: Every so many looks a waiting rank also sees whether another one has left.
LOOKS_PER_LEFT: Final = 10
#: Address space of all ranks' heaps; a process may hold hundreds of groups.
MOST_HEAP_BYTES: Final = 256 << 30


class Store(Protocol):
    """What the rendezvous needs of a torch.distributed Store."""

    def set(self, key: str, value: str, /) -> None:
        """Publishes a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all the keys are there."""

    def delete_key(self, key: str, /) -> bool:
        """Removes a key; whether it was there."""


def create_communicator(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta = timedelta(minutes=30),
    settings: Config | None = None,
) -> Communicator:
    """Collective: the communicator of ``world_size`` ranks on this host that share ``store``.

    A store serves one communicator at a time, and another one when all ranks have this one; put ``PrefixStore`` before
    it for several at once. Rank 0 offers a shared segment and publishes where; the others fetch it. ``timeout`` bounds
    the rendezvous and, later, every operation's waits. ``settings`` of rank 0 hold for all ranks; None takes those of
    the environment.

    Raises TimeoutError naming the ranks that did not come; MismatchError if world sizes differ; AbortedError if another
    rank was interrupted meanwhile; Error if a rank is on another host, runs another version of pycomm, or is there
    twice. All may come again afterwards, with the same store.
    """
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"rank {rank} is not in a world of {world_size}")
    install()
    board = _Board(store, rank, world_size)
    if rank == 0:
        return _lead(board, timeout, settings or config())
    return _follow(board, timeout)


class _Board:
    """The Store, as one rank uses it. Its failures are Errors in words."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def read(self, key: str) -> str | None:
        """What is written there, or None. Does not wait."""
        try:
            return self.store.get(key).decode(errors="replace") if self.store.check([key]) else None
        except RuntimeError as error:
            raise self._failure(error) from error

    def write(self, key: str, text: str) -> None:
        try:
            self.store.set(key, text)
        except RuntimeError as error:
            raise self._failure(error) from error

    def leave(self, key: str, text: str) -> None:
        """Writes for the others what ended this rank's part, unless the Store is what failed."""
        with suppress(Error):
            self.write(key, text)

    def remove(self, key: str) -> None:
        """Deletes a key. Some Stores cannot: there it reads as nothing."""
        try:
            self.store.delete_key(key)
        except RuntimeError:
            self.write(key, "over")

    def _failure(self, error: RuntimeError) -> Error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Error(
            f"rank {self.rank}: the Store failed during the rendezvous of {self.world_size} ranks; has the process "
            f"that serves it (rank 0's, usually) ended? {reason}"
        )


def _new_id() -> str:
    return secrets.token_hex(8)


def _reason(error: BaseException) -> str:
    """Why a rank ends its part, for the others."""
    if isinstance(error, Error):
        return str(error)
    return f"it was interrupted ({type(error).__name__})"


@dataclass(frozen=True)
class _Farewell:
    """What a rank that has given up leaves in the Store."""

    rank: int
    attempt: str
    token: str
    text: str

    @classmethod
    def parse(cls, left: str | None) -> _Farewell | None:
        rank, attempt, token, text = [*(left or "").split(" ", 3), "", "", "", ""][:4]
        return cls(int(rank), attempt, token, text) if rank.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.rank} {self.attempt} {self.token} {self.text}"


# ---- rank 0


def _lead(board: _Board, timeout: timedelta, settings: Config) -> Communicator:
    """Rank 0's part; a failure is published too, so that nobody waits for an offer that cannot come."""
    attempt = _new_id()
    look = _Look(board, attempt)
    try:
        offer = _make_offer(board.world_size, settings)
        if board.world_size > 1:
            board.write(OFFER_KEY, f"offer {attempt} {offer.address}")
            offer.serve(timeout, look)
            board.remove(OFFER_KEY)
    except TimeoutError:
        board.leave(OFFER_KEY, "over")
        raise
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, Error) else AbortedError.__name__
        board.leave(OFFER_KEY, f"error {attempt} {kind} {_reason(error)}")
        raise
    return offer.accept(timeout)


def _make_offer(world_size: int, settings: Config) -> ShmOffer:
    heap_bytes = min(settings.heap_bytes, MOST_HEAP_BYTES // world_size // 4096 * 4096)
    offer: ShmOffer = core.ShmOffer(
        world_size,
        slot_bytes=settings.slot_bytes,
        slots=settings.slots,
        streaming=settings.streaming,
        spin_polls=settings.spin_polls,
        heap_bytes=heap_bytes,
        channel_bytes=settings.channel_bytes,
        single_copy=settings.single_copy,
        records=settings.records,
        liveness=settings.liveness,
        all_reduce=all_reduce_table.of_text(settings.all_reduce, world_size),
    )
    return offer


class _Look:
    """Rank 0's look at the Store while it waits: has a rank given up that is not in touch with it?"""

    def __init__(self, board: _Board, attempt: str) -> None:
        self.board = board
        self.attempt = attempt
        self.before = self._read() if board.world_size > 1 else None
        self.came = time.monotonic()

    def __call__(self, present: list[int]) -> str:
        """Why to give up, or nothing."""
        try:
            left = self._read()
            if left is None or not self._concerns_us(left, present):
                return ""
            self.board.remove(LEFT_KEY)
        except Error as error:
            return str(error)
        return f"rank 0: rank {left.rank} gave up the rendezvous: {left.text}"

    def _read(self) -> _Farewell | None:
        return _Farewell.parse(self.board.read(LEFT_KEY))

    def _concerns_us(self, left: _Farewell, present: list[int]) -> bool:
        if left.attempt not in (NO_ATTEMPT, self.attempt):
            return False
        has_come_again = left.rank in present
        return left != self.before or (
            not has_come_again and time.monotonic() - self.came > COME_AGAIN
        )


# ---- the other ranks

#: (rank, attempt): what is over for ranks of this process.
_ended: set[tuple[int, str]] = set()


def _follow(board: _Board, timeout: timedelta) -> Communicator:
    """Another rank's part. What ends it, and rank 0 cannot know, is published."""
    visitor = _Visitor(board, timeout)
    try:
        return visitor.join()
    except TimeoutError:  # it may come again to the same attempt
        raise
    except Error:
        visitor.end()
        raise
    except BaseException as error:
        visitor.end()
        visitor.say_farewell(error)
        raise


class _Visitor:
    """A rank that waits for rank 0's offer and joins."""

    def __init__(self, board: _Board, timeout: timedelta) -> None:
        self.board = board
        self.rank = board.rank
        self.timeout = timeout
        self.came = time.monotonic()
        self.deadline = self.came + timeout.total_seconds()
        self.attempt = NO_ATTEMPT  # of rank 0's, which this rank joins
        self.stale: str | None = None  # an offer that is over
        self.first: str | None = None  # what was there at first
        self.left_before: _Farewell | None = None

    def join(self) -> Communicator:
        for look in looks(self.deadline):
            news = self.board.read(OFFER_KEY)
            if look == 0:
                self.first = news
            communicator = self._follow(news)
            if communicator is not None:
                return communicator
            if look % LOOKS_PER_LEFT == LOOKS_PER_LEFT // 2:
                self._see_who_left(is_first=look < LOOKS_PER_LEFT)
        raise TimeoutError(self._in_vain())

    def end(self) -> None:
        """Further news of this attempt are none."""
        if self.attempt != NO_ATTEMPT:
            _ended.add((self.rank, self.attempt))

    def say_farewell(self, error: BaseException) -> None:
        left = _Farewell(self.rank, self.attempt, _new_id(), _reason(error))
        self.board.leave(LEFT_KEY, str(left))

    def _follow(self, news: str | None) -> Communicator | None:
        """What comes of what rank 0 has written: None if nothing yet."""
        kind, attempt, text = [*(news or "over").split(" ", 2), "", ""][:3]
        if kind == "over" or news == self.stale:
            return None
        if kind not in ("offer", "error"):
            raise Error(
                f"rank {self.rank}: key {OFFER_KEY} of the Store holds what rank 0 has not written "
                f"({len(news or '')} characters); put a PrefixStore before a Store that others use, too"
            )
        if kind == "offer":
            self.attempt = attempt
            return self._accept(news, text)
        is_new = news != self.first or time.monotonic() - self.came > COME_AGAIN
        if is_new and (self.rank, attempt) not in _ended:
            self.attempt = attempt
            name, _, why = text.partition(" ")
            raised = {c.__name__: c for c in (AbortedError, MismatchError)}.get(name, Error)
            raise raised(f"rank {self.rank}: rank 0 could not make the shared segment: {why}")
        return None

    def _accept(self, news: str | None, address: str) -> Communicator | None:
        left = timedelta(seconds=max(self.deadline - time.monotonic(), 0))
        communicator: Communicator | None = core.try_join_shm(
            address, self.rank, self.board.world_size, left, self.timeout
        )
        if communicator is None:
            self.stale, self.attempt = news, NO_ATTEMPT
            try:
                core.check_reachable(address, self.rank)
            except Error as error:
                self.say_farewell(error)
                raise
        return communicator

    def _see_who_left(self, *, is_first: bool) -> None:
        left = _Farewell.parse(self.board.read(LEFT_KEY))
        if is_first:
            self.left_before = left
        elif left and left != self.left_before and left.attempt == NO_ATTEMPT:
            raise AbortedError(
                f"rank {self.rank}: rank {left.rank} gave up the rendezvous: {left.text}"
            )

    def _in_vain(self) -> str:
        stale = (
            "; it had offered a shared segment, but nobody of this user and job listens there any more"
            if self.stale
            else ""
        )
        return (
            f"rank {self.rank}: rank 0 of {self.board.world_size} did not come to the rendezvous within "
            f"{self.timeout}{stale}. Is it running, and does it use the same Store?"
        )


def looks(deadline: float) -> Iterator[int]:
    """Counts from 0, at once and after growing pauses, until the deadline (by time.monotonic) is there."""
    pause, look = SHORTEST_PAUSE, 0
    while True:
        yield look
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(pause * GROWTH, LONGEST_PAUSE)
        look += 1
