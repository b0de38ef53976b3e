"""One rank of oneCCL, through the C functions of oneccl_peer.cpp: started by Intel MPI's mpiexec."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from cases import Buffers, Case
from rank_loop import Call, Unsupported, serve

DTYPES = {"int32": 4, "int64": 6, "float16": 8, "float32": 9, "float64": 10, "bfloat16": 11}
BY_PART = ("all_gather", "reduce_scatter", "all_to_all")  # counted by one rank's part
OPS = ("all_reduce", "broadcast", "reduce", "barrier", *BY_PART)


def check(status: int) -> None:
    if status:
        raise OSError("a oneCCL call failed; see above")


def exchange(library: Any, rank: int, file: Path) -> ctypes.Array[ctypes.c_char]:
    """Rank 0's address, which the others find in a file."""
    address = ctypes.create_string_buffer(library.peer_address_bytes())
    if rank == 0:
        check(library.peer_create(address))
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_bytes(address.raw)
        unfinished.rename(file)
        return address
    while not file.exists():
        time.sleep(0.01)
    address.raw = file.read_bytes()
    return address


class OneCclEngine:
    """oneCCL's calls, each waited for."""

    def __init__(self, name: str, library: Any, rank: int) -> None:
        self.name, self.library, self.rank = name, library, rank

    def make_calls(self, case: Case, buffers: Buffers) -> dict[str, Call | Unsupported]:
        if case.op not in OPS:
            return {self.name: Unsupported(f"no {case.op} for CPU memory")}
        function = getattr(self.library, f"peer_{case.op}")
        source = ctypes.c_void_p(buffers.input.ctypes.data)
        target = ctypes.c_void_p(buffers.output.ctypes.data)
        count = ctypes.c_uint64(case.shard if case.op in BY_PART else case.count)
        dtype = ctypes.c_int(DTYPES[case.dtype])

        def call() -> None:
            if function(source, target, count, dtype):
                raise OSError("a oneCCL call failed; see above")

        return {self.name: call}

    def checks_results(self, _variant: str) -> bool:
        return True

    def barrier(self) -> None:
        check(self.library.peer_barrier(None, None, ctypes.c_uint64(0), 0))

    def flag_latency_ns(self) -> float:
        return 0.0  # pycomm's ranks probe


def main() -> None:
    path, name, compiled, file = sys.argv[1:]
    rank, world_size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    library = ctypes.CDLL(compiled)
    check(library.peer_open(world_size, rank, exchange(library, rank, Path(file))))
    serve(OneCclEngine(name, library, rank), path)
    check(library.peer_close())


if __name__ == "__main__":
    main()
