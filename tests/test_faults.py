"""A sample of the fault matrix (faults.py), chosen so that every fault, moment and operation occurs."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Cell, cells, check


def sample() -> list[Cell]:
    """Cells with a fault, moment, operation or pair of fault and moment that none before has, and every tenth."""
    seen: set[object] = set()
    chosen = []
    for index, cell in enumerate(cells()):
        traits = {cell.fault, cell.moment, cell.operation, cell.world, (cell.fault, cell.moment)}
        if not traits <= seen or index % 10 == 0:
            chosen.append(cell)
        seen |= traits
    return chosen


def test_the_matrix_is_large_and_its_names_are_unique() -> None:
    """At least 150 jobs; of these a third at most is run here."""
    names = [str(cell) for cell in cells()]
    assert len(names) >= 150
    assert len(set(names)) == len(names)
    assert 30 <= len(sample()) <= len(names) / 3


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_fault(cell: Cell, tmp_path: Path) -> None:
    """Every other rank gets the right error, soon, and nothing is left over."""
    check(cell, tmp_path)
