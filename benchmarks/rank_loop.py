"""What each rank process of each engine does: wait for the driver's word, then measure.

A rank that is not told to do anything is blocked in a socket read, outside the library that it
measures, so an idle engine costs no CPU time. Requests and replies are lines of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import repeat
from typing import Any, Protocol

from cases import Buffers, Case, compare, encode, expected, make_buffers, pattern

Call = Callable[[], object]
Message = dict[str, Any]


class Unsupported(Exception):
    """This variant has no such operation or dtype; the message says what is missing."""


class Engine(Protocol):
    """One library, in one rank process."""

    rank: int

    def make_calls(self, case: Case, buffers: Buffers) -> Mapping[str, Call | Unsupported]:
        """For each variant, one call of the case's operation on these buffers."""
        ...

    def checks_results(self, variant: str) -> bool:
        """False for what moves nothing."""
        ...

    def barrier(self) -> None: ...

    def flag_latency_ns(self) -> float: ...


class Rank:
    """The requests that a rank answers; each method's result is its reply."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.case: Case | None = None
        self.buffers: Buffers | None = None
        self.calls: dict[str, Call] = {}

    def prepare(self, case: Message) -> Message:
        """New buffers and calls; why each missing variant is missing."""
        self.calls, self.buffers = {}, None  # frees the last case's memory first
        self.case = Case(**case)
        self.buffers = make_buffers(self.case)
        made = self.engine.make_calls(self.case, self.buffers)
        self.calls = {
            name: call for name, call in made.items() if not isinstance(call, Unsupported)
        }
        missing = {name: str(why) for name, why in made.items() if isinstance(why, Unsupported)}
        return {"variants": list(self.calls), "missing": missing}

    def verify(self, variant: str) -> Message:
        """One call with known inputs."""
        assert self.case is not None
        assert self.buffers is not None
        case, buffers, rank = self.case, self.buffers, self.engine.rank
        buffers.output.fill(1)
        buffers.input[:] = encode(pattern(buffers.input.size, rank), case.dtype)
        try:
            self.calls[variant]()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if not says_unsupported(error):
                raise
            return {"unsupported": str(error).splitlines()[0]}
        wrong = None
        if self.engine.checks_results(variant):
            wrong = compare(buffers.output, expected(case, rank), case.dtype)
        buffers.clear()
        return {"wrong": wrong and asdict(wrong)}

    def sample(self, variant: str, batches: int, calls: int) -> Message:
        """Nanoseconds of each batch of calls, after a barrier and one call that is not timed.

        The barrier at the end keeps a fast rank from leaving, deaf, while others still need it.
        """
        call, now = self.calls[variant], time.perf_counter_ns
        times: list[int] = []
        self.engine.barrier()
        call()
        start = now()
        for _ in range(batches):
            for _ in repeat(None, calls):
                call()
            end = now()
            times.append(end - start)
            start = end
        self.engine.barrier()
        return {"ns": times}

    def probe(self) -> Message:
        return {"ns": self.engine.flag_latency_ns()}

    def bind(self, cores: list[int]) -> Message:
        """This thread, which makes the calls, stays on the rank's core; helper threads do not."""
        os.sched_setaffinity(0, {cores[self.engine.rank]})
        return {}

    def cpu(self) -> Message:
        """CPU seconds of this process so far."""
        own = os.times()
        return {"seconds": own.user + own.system}


def says_unsupported(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, NotImplementedError) or any(
        sign in words for sign in ("does not support", "not supported", "not implemented")
    )


def serve(engine: Engine, path: str) -> None:
    """Answer the driver's requests until it says quit or is gone."""
    rank = Rank(engine)
    gc.collect()
    gc.disable()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as stream:

            def reply(message: Message) -> None:
                stream.write(json.dumps(message) + "\n")
                stream.flush()

            reply({"rank": engine.rank})
            for line in stream:
                request = json.loads(line)
                verb = request.pop("verb")
                if verb == "quit":
                    return
                reply(getattr(rank, verb)(**request))
