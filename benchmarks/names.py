"""Names and colours of what is compared."""

from __future__ import annotations

GLOO = "gloo"
PYCOMM = "pycomm"
COMMUNICATOR = "pycomm.Communicator"
SHARED = "pycomm, shared tensors"
FLOOR = "fake (dispatch floor)"
OPEN_MPI = "Open MPI"
MPICH = "MPICH"
INTEL_MPI = "Intel MPI"
ONECCL = "oneCCL"
BOUND = "memory bound"

PEERS = (OPEN_MPI, MPICH, INTEL_MPI, ONECCL)
VARIANTS = (GLOO, *PEERS, PYCOMM, COMMUNICATOR, SHARED, FLOOR, BOUND)
OWN = (PYCOMM, COMMUNICATOR, SHARED)

COLORS = {
    GLOO: "#4b5563",
    OPEN_MPI: "#cc79a7",
    MPICH: "#009e73",
    INTEL_MPI: "#56b4e9",
    ONECCL: "#b8860b",
    PYCOMM: "#0072b2",
    COMMUNICATOR: "#d55e00",
    SHARED: "#111827",
    FLOOR: "#9ca3af",
    BOUND: "#111111",
}


def engine_of(variant: str) -> str | None:
    """Variants of one library count as one engine; what moves no data as none."""
    if variant in (FLOOR, BOUND):
        return None
    return PYCOMM if variant in OWN else variant
