"""Schedules as text and pictures, and the command that draws and compares them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pycomm import InvalidArgument
from pycomm.pipeline.__main__ import main
from pycomm.pipeline.schedules import NAMES, Costs, build, draw, plot, simulate
from pycomm.pipeline.schedules.draw import _COLUMNS

ROOT = Path(__file__).resolve().parent.parent

ONE_F_ONE_B = """\
rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  ."""

UNEQUAL = """\
rank 0  F0 F1 .  .  I0--- W0 I1--- W1
rank 1  .  F0 I0--- F1 I1--- W0 W1 ."""

ZBV = """\
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"""


def test_text() -> None:
    assert draw(build("1f1b", 2, 3)) == ONE_F_ONE_B
    assert draw(build("zb_h1", 2, 2), Costs(1, 2, 1)) == UNEQUAL
    assert draw(build("zbv", 2, 3)) == ZBV


@pytest.mark.parametrize("name", NAMES)
def test_text_has_every_action_where_it_runs(name: str) -> None:
    """Cells are of one width, so an action's column is its time."""
    schedule = build(name, 3, 12)
    played = simulate(schedule)
    unit = min(one.end - one.start for rank in played.intervals for one in rank)
    rows = draw(schedule).splitlines()
    assert len(rows) == 3
    width = 1 + max(len(word) for row in rows for word in row.replace("-", " ").split()[2:])
    for row, intervals in zip(rows, played.intervals, strict=True):
        cells = row[len("rank 0  ") :]
        for action, start, _ in intervals:
            at = round(start / unit) * width
            words = str(action) if schedule.chunks > 1 else f"{action.kind}{action.microbatch}"
            assert cells[at:].replace("-", " ").split()[0] == words


def test_text_stays_readable_of_extreme_costs() -> None:
    """A column is never so short that rows have no end; nothing at all takes no columns."""
    schedule = build("zb_h1", 2, 4)
    rows = draw(schedule, Costs(1, 1, 1e-9)).splitlines()
    assert max(map(len, rows)) < 4 * _COLUMNS
    assert "F3" in rows[0]
    assert draw(schedule, Costs(0, 0, 0)) == "rank 0\nrank 1"


def test_pictures(tmp_path: Path) -> None:
    """One bar per action, with its microbatch; a title per schedule."""
    pytest.importorskip("matplotlib")
    played = [simulate(build(name, 4, 8)) for name in ("1f1b", "zbv")]
    plot(played, tmp_path / "a.svg")
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    bars = [
        one for one in svg.iter() if one.tag.endswith("path") and "fill" in one.get("style", "")
    ]
    assert len(bars) >= 2 * 4 * 8 + 2 * 4 * 8 * 3
    texts = (tmp_path / "a.svg").read_text()
    for title in (
        "1f1b: makespan 33, bubble 9 (span 9)",
        "zbv: makespan 25.5, bubble 1.5 (span 0)",
    ):
        assert f"<!-- {title}" in texts
    plot(played, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    plot([simulate(build("zb_h1", 1, 1), Costs(0, 0, 0))], tmp_path / "b.png")
    with pytest.raises(InvalidArgument, match=r"txt is no kind of picture: .*svg"):
        plot(played, tmp_path / "a.txt")


def test_draw_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["draw", "1f1b", "--ranks", "2", "--microbatches", "3", "--programs"]
    assert main([*arguments, "--plot", str(tmp_path / "a.svg")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1f1b: makespan 12, bubble 3, by span 3; activations 2 1\n")
    assert ONE_F_ONE_B in printed
    assert "rank 0: 0F0 0SEND_F0 0F1 (0SEND_F1 0RECV_B0) 0B0 0F2" in printed
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_compare_command(capsys: pytest.CaptureFixture[str]) -> None:
    """All that has a name, the shortest first; with chunks those that take so many."""
    assert main(["compare", "--costs", "1,2,0.5"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(NAMES)
    spans = [float(row.split("|")[3]) for row in rows[2:]]
    assert spans == sorted(spans)
    assert "| 1f1b | 1 | 38.5 | 10.5 | 10.5 | 72.7 % | 4 | 0 |" in rows
    assert main(["compare", "--chunks", "3", "--memory", "4"]) == 0
    names = {
        row.split("|")[1].strip().split()[0] for row in capsys.readouterr().out.splitlines()[2:]
    }
    assert names == {"interleaved", "looped_bfs", "zb_h1", "auto"}
    assert main(["compare", "gpipe", "zbv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["draw", "pipedream"], "there is no schedule 'pipedream', but: gpipe"),
        (["draw", "zbv", "--chunks", "3"], "zbv has 2 chunk(s) on each rank, not 3"),
        (["compare", "zbv", "--chunks", "3"], "zbv has 2 chunk(s) on each rank, not 3"),
        (["draw", "zbv", "--costs", "1,2"], "'1,2' is not three or four times, as 1,1.2,0.8"),
        (["draw", "zbv", "--costs", "1,2,-1"], "weight must be 0 or more"),
        (["draw", "zbv", "--ranks", "0"], "'0' is no positive whole number"),
        (["draw", "auto", "--memory", "0.5"], "rank 0 may hold 0.5, but one microbatch"),
        (["draw", "zbv", "--plot", "a.txt"], "txt is no kind of picture"),
        (["draw", "zbv", "--plot", "/nowhere/a.svg"], "/nowhere/a.svg cannot be written: No such"),
        (["draw"], "the following arguments are required: NAME"),
    ],
)
def test_bad_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


def test_command_as_a_process() -> None:
    command = [sys.executable, "-m", "pycomm.pipeline", "compare", "--help"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert "--transfer" in done.stdout
    assert all(name in done.stdout for name in NAMES)
