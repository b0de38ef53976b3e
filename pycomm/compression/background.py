"""Work that goes on while backward does."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_Job = tuple[Callable[[], torch.Tensor], torch.futures.Future[torch.Tensor]]


class Background:
    """Runs jobs one after the other, in a thread that ends with this object or the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        """The job's result, or its exception, will be the future's."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="pycomm-compression", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._jobs.put((job, future))
        return future


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (entry := jobs.get()) is not None:
        job, future = entry
        try:
            result = job()
        except Exception as error:  # who waits for the future raises it
            future.set_exception(error)
        else:
            future.set_result(result)
        del job, future, entry
