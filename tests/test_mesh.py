"""Where ranks stand in a mesh, and meshes that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Refused, attempt, run

import pycomm


def test_ranks_and_refusals() -> None:
    def worker(rank: int, n: int) -> Any:
        mesh = pycomm.init_mesh(dp=1, pp=2, tp=2)
        other = pycomm.init_mesh(dp=2, pp=2)
        places = [[m[d].get_local_rank() for d in ("pp", "dp", "tp")] for m in (mesh, other)]
        bad = [attempt(lambda: pycomm.init_mesh(dp=3)), attempt(lambda: pycomm.init_mesh(pp=-4))]
        return places, [m[d].size() for m in (mesh, other) for d in ("pp", "dp", "tp")], bad

    for rank, (places, sizes, bad) in enumerate(run(4, worker)):
        assert places == [[rank // 2, 0, rank % 2], [rank // 2, rank % 2, 0]]
        assert sizes == [2, 1, 2, 2, 2, 1]
        assert all(isinstance(one, Refused) and "InvalidArgument" in one.kinds for one in bad)
        assert "dp 3 x pp 1 x tp 1 are 3 ranks, but the job has 4" in bad[0].message
        assert "{'pp': -4}" in bad[1].message


def test_without_a_group() -> None:
    with pytest.raises(pycomm.InvalidArgument, match="init_process_group"):
        pycomm.init_mesh()
