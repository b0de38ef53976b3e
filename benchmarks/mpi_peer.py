"""One rank of an MPI, through mpi4py: started by the driver with that MPI's own mpiexec."""

from __future__ import annotations

import sys
from functools import partial

from cases import ROOT, STORAGE, Buffers, Case
from mpi4py import MPI
from rank_loop import Call, Unsupported, serve


def mpi_dtype(name: str) -> MPI.Datatype | None:
    """The MPI's name of a dtype, or None; what MPIs call bfloat16 none of them can sum."""
    if name == "bfloat16":
        return None
    dtype = MPI.Datatype.fromcode(STORAGE[name].char)
    return None if dtype == MPI.DATATYPE_NULL else dtype


class MpiEngine:
    """MPI's blocking calls on numpy memory, described beforehand to save mpi4py's look at it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.comm = MPI.COMM_WORLD
        self.rank: int = self.comm.rank

    def make_calls(self, case: Case, buffers: Buffers) -> dict[str, Call | Unsupported]:
        dtype = mpi_dtype(case.dtype)
        if dtype is None:
            return {self.name: Unsupported(f"this MPI has no {case.dtype}")}
        source, target = (buffers.input, dtype), (buffers.output, dtype)
        return {self.name: self.make_call(case, source, target)}

    def make_call(self, case: Case, source: object, target: object) -> Call:
        comm, at_root = self.comm, self.rank == ROOT
        match case.op:
            case "all_reduce":
                return partial(comm.Allreduce, MPI.IN_PLACE, target)
            case "broadcast":
                return partial(comm.Bcast, target, ROOT)
            case "all_gather":
                return partial(comm.Allgather, source, target)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, source, target)
            case "reduce":
                if at_root:
                    return partial(comm.Reduce, MPI.IN_PLACE, target, MPI.SUM, ROOT)
                return partial(comm.Reduce, target, None, MPI.SUM, ROOT)
            case "gather":
                return partial(comm.Gather, source, target if at_root else None, ROOT)
            case "scatter":
                return partial(comm.Scatter, source if at_root else None, target, ROOT)
            case "all_to_all":
                return partial(comm.Alltoall, source, target)
            case "send_recv":
                return self.ping_pong(source, target)
            case "barrier":
                return comm.Barrier
        raise ValueError(f"unknown operation {case.op!r}")

    def ping_pong(self, source: object, target: object) -> Call:
        send, receive = self.comm.Send, self.comm.Recv

        def first() -> None:
            send(source, 1)
            receive(target, 1)

        def second() -> None:
            receive(target, 0)
            send(source, 0)

        return (first, second, lambda: None)[min(self.rank, 2)]

    def checks_results(self, _variant: str) -> bool:
        return True

    def barrier(self) -> None:
        self.comm.Barrier()

    def flag_latency_ns(self) -> float:
        return 0.0  # pycomm's ranks probe


def main() -> None:
    path, name = sys.argv[1:3]
    if name == "--version":
        print(MPI.Get_library_version().splitlines()[0])
        return
    serve(MpiEngine(name), path)


if __name__ == "__main__":
    main()
