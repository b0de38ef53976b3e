"""The files of pycomm.trace: dumps, broken ones, torch's format, timelines; and dumps on a signal."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DIED, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.flight_recorder import fr_trace
from trace_scenes import Fake, World, done, enter_all_but, ns, with_history

import pycomm
from pycomm.trace import BadDump, diagnose, dump, install_signal_dump, read_job
from pycomm.trace.__main__ import main
from pycomm.trace.chrome import chrome_trace
from pycomm.trace.format import CORE_CAUSES
from pycomm.trace.read import read_dump
from pycomm.trace.table import print_tables
from pycomm.trace.torch_format import file_name


def killed(size: int = 3) -> World:
    """Rank 1 is dead, all others wait for it in operation 9."""
    world = with_history(size)
    enter_all_but(world, 1)
    world.end(1, alive=False)
    world.default.fail(5.05, "died", 1)
    return world


def names(folder: Path) -> list[str]:
    """The files of a folder."""
    return sorted(path.name for path in folder.iterdir())


# ---- writing


def test_what_a_dump_holds(tmp_path: Path) -> None:
    """All ranks' states and records of all groups of the process, under its rank in the job."""
    world = killed(4)
    world.group("tp", 2, 3).all_do("barrier", 4.9)
    path = dump(world.communicators(3), tmp_path / "new" / "folder", "why not")
    assert path == tmp_path / "new" / "folder" / "pycomm-trace.3.json"
    content = json.loads(path.read_text())
    assert (content["rank"], content["reason"], content["version"]) == (3, "why not", 2)
    assert content["torch"] == torch.__version__
    assert content["pid"] == os.getpid()
    assert abs(content["time_ns"] - time.time_ns()) < 60e9
    assert {"host", "time"} <= content.keys()
    world_group, pair = content["groups"]
    assert world_group["ranks"] == [0, 1, 2, 3]
    assert (pair["name"], pair["rank"], pair["ranks"]) == ("tp", 1, [2, 3])
    assert world_group["failure"] == world.default.failure
    assert [state["alive"] for state in world_group["states"]] == [True, False, True, True]
    assert [len(records) for records in world_group["records"]] == [9, 8, 9, 9]
    assert world_group["records"][0][-1]["state"] == "failed"


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    world = killed()
    world.default.post(0, "send", 2, at=6, tag=3, shape=(2, 3))
    world.dump(tmp_path, 0, at=7)
    read = read_dump(tmp_path / "pycomm-trace.0.json")
    for rank, ring in enumerate(world.default.rings):
        for record, original in zip(read.groups[0].records[rank], ring, strict=True):
            for name, value in original.items():
                assert getattr(record, name) == value, name
    assert read.time_ns == ns(7)
    assert read.groups[0].states[1].alive is False


def test_a_dump_replaces_the_older_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is whole, also if writing fails; nothing else stays behind."""
    world = with_history()
    world.dump(tmp_path, 0, at=5, reason="first")
    world.dump(tmp_path, 0, at=6, reason="second")
    assert names(tmp_path) == ["pycomm-trace.0.json", file_name(0)]
    assert read_dump(tmp_path / "pycomm-trace.0.json").reason == "second"

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        world.dump(tmp_path, 0, at=7, reason="third")
    assert names(tmp_path) == ["pycomm-trace.0.json", file_name(0)]
    assert read_dump(tmp_path / "pycomm-trace.0.json").reason == "second"


def test_nothing_to_dump(tmp_path: Path) -> None:
    with pytest.raises(pycomm.InvalidArgument, match="in no group"):
        dump([], tmp_path, "why")
    assert names(tmp_path) == []


def test_what_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A group may end while it is looked at."""

    class Ending(Fake):
        def records(self, rank: int, /) -> list[dict[str, Any]]:
            if rank == 2:
                raise pycomm.AbortedError("gone")
            return super().records(rank)

        def rank_state(self, rank: int, /) -> dict[str, Any]:
            if rank == 1:
                raise pycomm.AbortedError("gone")
            return super().rank_state(rank)

    with caplog.at_level(logging.INFO, "pycomm.trace"):
        dump([Ending(killed().default, 0)], tmp_path, "why")
    assert "the state of rank 1 cannot be read: gone" in caplog.text
    assert "the records of rank 2 cannot be read: gone" in caplog.text
    assert "rank 0 wrote" in caplog.text
    group = read_dump(tmp_path / "pycomm-trace.0.json").groups[0]
    assert [len(records) for records in group.records] == [9, 8, 0]
    assert group.states[1].pid == 0


# ---- putting dumps together


def test_the_most_advanced_record_counts(tmp_path: Path) -> None:
    """Dumps are written at different times; the earlier one saw less."""
    world = with_history(2)
    records = [world.default.enter(rank, at=5) for rank in range(2)]
    world.dump(tmp_path, 0, at=5.1)
    for record in records:
        done(record, 5.2)
    world.default.all_do("barrier", 6)
    world.dump(tmp_path, 1, at=7)
    job = read_job(tmp_path)
    for rank in range(2):
        operations = job.groups[0].collectives(rank)
        assert [r.sequence for r in operations] == list(range(1, 11))
        assert {r.state for r in operations} == {"completed"}
    assert diagnose(job).kind == "fine"


def test_dumps_of_another_run_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1's file lies there since a run with other processes."""
    old = killed()
    old.pids[:] = [100, 101, 102]
    for rank, state in enumerate(old.default.states):
        state["pid"] = old.pids[rank]
    old.dump(tmp_path, 1, at=-100)
    with_history().dump(tmp_path, 0, 2, at=6)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert (
        "pycomm-trace.1.json is left out: it is of another run: rank 0 has pid 100" in printed.err
    )
    assert printed.out.startswith("Nothing went wrong")


def test_dumps_of_an_earlier_group_are_left_out(tmp_path: Path) -> None:
    """The same processes, with a group of the same name after a failure."""
    first = World(2)
    first.default.all_do("barrier", 1)
    first.dump(tmp_path, 1, at=2)
    second = World(2)
    second.default.all_do("all_gather", 3)
    second.dump(tmp_path, 0, at=4)
    (note,) = read_job(tmp_path).notes
    assert note.startswith("pycomm-trace.1.json is left out: it is of another group")


def test_groups_of_one_name(tmp_path: Path) -> None:
    """Communicators made by hand have no names; they are told apart by their order."""
    world = World(2)
    second = world.group("", 0, 1)
    world.default.all_do("barrier", 1)
    second.all_do("all_gather", 1)
    world.dump(tmp_path, at=2)
    job = read_job(tmp_path)
    assert job.notes == []
    assert [group.collectives(0)[0].operation for group in job.groups] == ["barrier", "all_gather"]


# ---- broken files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is no JSON, or was cut off"),
        (b"\xff\xfe", "it is no JSON, or was cut off"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "it is no dump of pycomm"),
        (b"{}", "it is no dump of pycomm"),
        (b'{"format": "pycomm-trace"}', "it has version None"),
        (
            b'{"format": "pycomm-trace", "version": 1}',
            "it has version 1, but this pycomm reads version 2",
        ),
        (
            b'{"format": "pycomm-trace", "version": 2, "rank": 0, "time_ns": 1, "groups": 3}',
            "the file: 'groups' is an integer, not a list",
        ),
    ],
)
def test_broken_files_are_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    """And the others are read."""
    with_history().dump(tmp_path, 0, at=6)
    (tmp_path / "pycomm-trace.1.json").write_bytes(content)
    with pytest.raises(BadDump):
        read_dump(tmp_path / "pycomm-trace.1.json")
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("pycomm.trace: pycomm-trace.1.json is left out: ")
    assert words in printed.err
    assert printed.out.startswith("Nothing went wrong")


def test_nothing_but_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed().dump(tmp_path, 0, at=6)
    path = tmp_path / "pycomm-trace.0.json"
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "pycomm-trace.1.json").mkdir()
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "pycomm-trace.0.json is left out: it is no JSON, or was cut off" in printed
    assert "pycomm-trace.1.json is left out: it cannot be read: Is a directory" in printed
    assert "no dumps (pycomm-trace.*.json) that can be read" in printed


def test_texts_cannot_harm_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(2, "\x1b[31mred\n\ud800")
    world.default.enter(0, at=1, line="a\x07.py:1 in f")
    world.dump(tmp_path, 0, at=60)
    main([str(tmp_path), "-v"])
    shown = capsys.readouterr().out
    assert "?[31mred ?" in shown
    assert not {"\x1b", "\x07", "\ud800"} & set(shown)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON document stands."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from paths(inner, (*path, key))


def busy_dump() -> str:
    """A dump with something of everything."""
    world = with_history(3, "world", rounds=1)
    pair = world.group("tp", 1, 2)
    pair.enter(1, at=5)
    pair.queue(1, at=5)
    world.default.post(0, "recv", -1, at=5)
    world.default.post(1, "send", 2, at=5, shape=(2, 3))
    enter_all_but(world, 1)
    world.end(2, stopped=True)
    world.default.fail(13, "timeout", 1)
    with tempfile.TemporaryDirectory() as folder:
        world.dump(Path(folder), 1, at=13.5)
        return (Path(folder) / "pycomm-trace.1.json").read_text()


DUMP = busy_dump()
PATHS = list(paths(json.loads(DUMP)))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["send", "recv", "failed", "started", "scheduled", "completed"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def everything(content: bytes) -> None:
    """Reads a directory with this file, and makes all that can be made of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pycomm-trace.1.json").write_bytes(content)
        (folder / "pycomm-trace.0.json").write_text(DUMP.replace('"rank":1', '"rank":0', 1))
        job = read_job(folder)
        assert len(job.dumps) + len(job.notes) == 2
        text = diagnose(job).text
        assert text.isprintable()
        assert text
        print_tables(job, 10, io.StringIO())
        json.dumps(chrome_trace(job))
        status = main([name, "--torch", str(folder / "out"), "--chrome", str(folder / "out.json")])
        assert status in (0, 1)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_may_be_wrong(data: st.DataObject) -> None:
    """Some values of a dump are replaced by anything; what comes of it is a paragraph, or words about the file."""
    content = json.loads(DUMP)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(PATHS))
        value = data.draw(JSON)
        target = content
        try:
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = value
        except (IndexError, KeyError, TypeError):
            content = value if not path else content
    everything(json.dumps(content).encode())


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=st.integers(0, len(DUMP)), at=st.integers(0, len(DUMP) - 1), junk=st.binary(max_size=4))
def test_any_byte_may_be_wrong(cut: int, at: int, junk: bytes) -> None:
    """Files that were cut off or overwritten."""
    content = DUMP.encode()
    everything(content[:cut])
    everything(content[:at] + junk + content[at + len(junk) :])


STATES = (
    {"alive": False},
    {"stopped": True},
    {"left": True},
    {"left": True, "farewell": "KeyError: 1"},
)


def draw_world(data: st.DataObject) -> World:
    """A job in which anything may happen, in any order."""

    def one(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    size = one(2, 3, 4)
    world = World(size, "world")
    world.group("tp", 0, 1)
    world.group("dp", size - 1, 0)
    for moment in range(data.draw(st.integers(0, 12))):
        group = one(*world.groups)
        rank = one(*range(len(group.ranks)))
        operation = one("all_reduce", "barrier", "broadcast", "all_to_all")
        event = one("all", "enter", "enter", "queue", "send", "recv", "done", "state", "fail")
        if event == "all":
            group.all_do(operation, moment)
        elif event == "enter":
            group.enter(rank, operation, moment)
        elif event == "queue":
            group.queue(rank, operation, moment)
        elif event in ("send", "recv"):
            peer = one(*range(len(group.ranks)), *([-1] if event == "recv" else []))
            group.post(rank, event, peer, moment, tag=one(0, 1))
        elif event == "done" and group.rings[rank] and group.rings[rank][-1]["started_ns"]:
            done(group.rings[rank][-1], moment)
        elif event == "state":
            world.end(one(*range(size)), **one(*STATES))
        elif event == "fail":
            culprit = one(-1, *range(len(group.ranks)))
            group.fail(moment, one(*CORE_CAUSES), culprit, one("it failed", "", "? ..."))
    return world


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_happened_there_is_a_paragraph(data: st.DataObject) -> None:
    """And it names only ranks of the job; tables, timelines and torch's files can be made, too."""
    world = draw_world(data)
    with tempfile.TemporaryDirectory() as name:
        for rank in data.draw(st.sets(st.sampled_from(range(len(world.pids))), min_size=1)):
            world.dump(Path(name), rank, at=data.draw(st.sampled_from([13, 14, 40])))
        job = read_job(Path(name))
        assert job.notes == []
        found = diagnose(job)
        assert found.text.isprintable()
        assert set(found.ranks) <= set(range(len(world.pids)))
        assert found.text.endswith(".")
        assert found.wrong or found.text.startswith("Nothing went wrong")
        assert found.wrong or not any(group.failure for group in job.groups)
        print_tables(job, 10, io.StringIO())
        json.dumps(chrome_trace(job))
        out = str(Path(name) / "out")
        assert main([name, "--torch", out]) == int(found.wrong)


# ---- torch's own analyser


@pytest.fixture
def analyse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], tuple[str, list[Any]]]:
    """Runs it on a directory: what it says, and its table of collectives. It takes the lowest rank as the reference."""
    walk = os.walk

    def in_order(top: Any) -> Iterator[Any]:
        for root, folders, files in walk(top):
            yield root, folders, sorted(files)

    def run_it(folder: Path) -> tuple[str, list[Any]]:
        monkeypatch.setattr(os, "walk", in_order)
        table = tmp_path / "table"
        with caplog.at_level(logging.INFO, "Flight Recorder"):
            fr_trace.main([str(folder), "-o", str(table)])
        _, database = pickle.loads(table.read_bytes())
        return caplog.text, database.collectives

    return run_it


Analyse = Callable[[Path], tuple[str, list[Any]]]


def test_torch_finds_nothing_wrong_with_a_clean_run(tmp_path: Path, analyse: Analyse) -> None:
    """Every operation there is, an uneven one, several groups, messages of two tags."""
    world = with_history(4)
    pair = world.group("tp", 3, 1)
    for at, operation in enumerate(
        ["reduce_scatter", "gather", "scatter", "all_to_all", "monitored_barrier", "flag_latency"]
    ):
        world.default.all_do(operation, 5 + at)
        pair.all_do("all_gather", 5.5 + at)
    for rank in range(4):
        done(world.default.enter(rank, "all_gather", at=12, count=rank, shape=(rank,)), 12.1)
    for tag in (1, 2, 1):
        done(world.default.post(3, "send", 0, at=13, tag=tag), 13.1)
    for tag in (2, 1, 1):
        done(world.default.post(0, "recv", 3, at=13, tag=tag), 13.1)
    world.dump(tmp_path / "dumps", at=14)
    said, collectives = analyse(tmp_path / "dumps")
    assert len(collectives) == 8 + 6 + 6 + 1 + 3
    assert all(c.pass_check and not c.missing_ranks for c in collectives)
    assert said == ""


@pytest.mark.parametrize(
    ("operation", "other", "words"),
    [
        ("broadcast", {}, "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"),
        ("all_reduce", {"count": 6}, "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH"),
        ("all_reduce", {"dtype": "int64"}, "Culprit rank 1; Error type: COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_torch_names_the_culprit(
    tmp_path: Path, analyse: Analyse, operation: str, other: dict[str, Any], words: str
) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.default.enter(1, operation, at=5, **other)
    world.default.fail(5.1, "mismatch")
    world.dump(tmp_path / "dumps", at=6)
    said, collectives = analyse(tmp_path / "dumps")
    assert "Collective sequence number: 9 has errors" in said
    assert words in said
    assert said.count("Culprit") == 1
    assert "step at train.py:88" in said
    assert [c.collective_seq_id for c in collectives if not c.pass_check] == [9]


def test_torch_names_a_missing_rank(tmp_path: Path, analyse: Analyse) -> None:
    """Rank 1 is dead: others have written its file."""
    killed().dump(tmp_path / "dumps", 0, 2, at=6)
    said, _ = analyse(tmp_path / "dumps")
    assert "Not all ranks joining collective, sequence number: 9" in said
    assert "missing ranks: {1}" in said


def test_torch_reads_what_the_command_writes(tmp_path: Path, analyse: Analyse) -> None:
    """All ranks' files out of one dump. Records that other ranks have overwritten are left out."""
    world = with_history()
    world.default.capacity = 4
    for second in range(3):
        world.default.all_do("barrier", 5 + second)
    enter_all_but(world, 1, at=9)
    world.default.rings[0][-1]["line"] = "train.py:99"  # outside of any function
    world.dump(tmp_path / "dumps", 2, at=19)
    assert main([str(tmp_path / "dumps"), "--torch", str(tmp_path / "out")]) == 1
    assert names(tmp_path / "out") == [file_name(rank) for rank in range(3)]
    said, collectives = analyse(tmp_path / "out")
    assert "missing ranks: {1}" in said
    assert "<module> at train.py:99" in said
    assert [c.collective_seq_id for c in collectives] == [9, 10, 11, 12]


def test_torch_names_a_message_that_nobody_sends(tmp_path: Path, analyse: Analyse) -> None:
    world = with_history()
    world.default.post(2, "recv", 0, at=5)
    world.dump(tmp_path / "dumps", at=6)
    said, _ = analyse(tmp_path / "dumps")
    assert "collective: gloo:recv 1<-0" in said
    assert "missing ranks: {0}" in said


def test_files_of_others_are_only_made_for_ranks_that_cannot(tmp_path: Path) -> None:
    """A dead rank's own file is left alone, unless it lies there from an earlier run."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    own, stale = folder / file_name(1), folder / file_name(3)
    own.write_bytes(b"its own")
    stale.write_bytes(b"of yesterday")
    os.utime(stale, (1, 1))
    world = killed(5)
    world.end(3, stopped=True)
    world.dump(folder, 0, at=6)
    assert names(folder) == ["pycomm-trace.0.json", file_name(0), file_name(1), file_name(3)]
    assert own.read_bytes() == b"its own"
    assert pickle.loads(stale.read_bytes())["entries"]


# ---- timelines


def test_chrome_trace(tmp_path: Path) -> None:
    """One process per group, one row per rank, waiting within the operation."""
    world = killed()
    pair = world.group("tp", 0, 2)
    pair.all_do("all_gather", 4.9)
    world.dump(tmp_path, 0, at=6)
    out = tmp_path / "out.json"
    assert main([str(tmp_path), "--chrome", str(out)]) == 1
    events = json.loads(out.read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["The default group", "Group tp"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows[1, 1] == "rank 1 (4711)"
    assert rows[2, 2] == "rank 2 (4712)"
    complete = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in complete} <= rows.keys()
    failed = [e for e in complete if e["name"] == "all_reduce (failed)"]
    assert [(e["tid"], round(e["dur"])) for e in failed] == [(0, 50_000), (2, 50_200)]
    assert failed[0]["ts"] == 5e6
    assert failed[0]["args"] == {
        "number": 9,
        "count": 5,
        "dtype": "float32",
        "bytes": 20,
        "op": "sum",
        "line": "train.py:88 in step",
        "state": "failed",
    }
    waits = [e for e in complete if e["cat"] == "wait" and (e["pid"], e["tid"]) == (1, 0)]
    assert [(w["ts"], w["dur"]) for w in waits[:2]] == [(0, 2), (500_000, 2)]
    assert (waits[-1]["ts"], waits[-1]["dur"]) == (failed[0]["ts"], failed[0]["dur"])


def test_messages_do_not_overlap_in_a_timeline(tmp_path: Path) -> None:
    world = World(2)
    for tag in range(3):
        done(world.default.post(0, "send", 1, at=tag, tag=tag), 1.5 + tag)
    world.dump(tmp_path, 0, at=6)
    events = chrome_trace(read_job(tmp_path))["traceEvents"]
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, rows.values())) == 3
    assert len(rows) == 2
    for spans in rows.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    named = {
        e["tid"] for e in events if e["name"] == "thread_name" and "messages" in str(e["args"])
    }
    assert named == set(rows)


def test_rich_draws_tables_on_a_terminal(tmp_path: Path) -> None:
    """Names that look like rich's markup are shown as they are."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    world = World(2, "[red]tp[/red]")
    world.default.all_do("barrier", 1)
    world.dump(tmp_path, at=2)
    terminal, plain = Terminal(), io.StringIO()
    print_tables(read_job(tmp_path), 10, terminal)
    print_tables(read_job(tmp_path), 10, plain)
    assert "[red]tp[/red]" in terminal.getvalue()
    assert "┃" in terminal.getvalue()
    assert "┃" not in plain.getvalue()


# ---- signals


@pytest.fixture
def restored() -> Iterator[None]:
    """The handlers of SIGUSR1 as they were."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("restored")
def test_a_signal_dumps_and_the_process_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups: list[Fake] = []
    assert install_signal_dump(signal.SIGUSR1, tmp_path, lambda: groups)
    signal.raise_signal(signal.SIGUSR1)
    assert "SIGUSR1: there is no group to dump" in caplog.text
    groups += with_history().communicators(1)
    signal.raise_signal(signal.SIGUSR1)
    assert read_dump(tmp_path / "pycomm-trace.1.json").reason == "signal SIGUSR1"


@pytest.mark.usefixtures("restored")
def test_an_earlier_handler_is_called_too(tmp_path: Path) -> None:
    called = []
    signal.signal(signal.SIGUSR1, lambda number, _: called.append((number, names(tmp_path))))
    assert install_signal_dump(signal.SIGUSR1, tmp_path, with_history(1).communicators(0).copy)
    signal.raise_signal(signal.SIGUSR1)
    assert called == [(signal.SIGUSR1, ["pycomm-trace.0.json", file_name(0)])]


@pytest.mark.usefixtures("restored")
def test_a_dump_that_fails_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    communicators = with_history(1).communicators(0)
    assert install_signal_dump(signal.SIGUSR1, tmp_path / "file", lambda: communicators)
    signal.raise_signal(signal.SIGUSR1)
    assert "SIGUSR1: no dump: " in caplog.text

    def fails() -> list[Fake]:
        raise RuntimeError("no groups here")

    assert install_signal_dump(signal.SIGUSR1, tmp_path, fails)
    signal.raise_signal(signal.SIGUSR1)
    assert "SIGUSR1: no dump: no groups here" in caplog.text


def test_handlers_need_the_main_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    results: list[bool] = []
    thread = threading.Thread(
        target=lambda: results.append(install_signal_dump(signal.SIGUSR1, tmp_path, list))
    )
    thread.start()
    thread.join()
    assert results == [False]
    assert "SIGUSR1 will not dump: handlers can only be set in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_that_ends_a_process_still_does(tmp_path: Path) -> None:
    """SIGTERM dumps first."""

    def worker(_rank: int, _n: int, folder: str) -> None:
        communicators = with_history(1).communicators(0)
        assert install_signal_dump(signal.SIGTERM, folder, lambda: communicators)
        signal.raise_signal(signal.SIGTERM)
        signal.pause()

    assert run(1, worker, str(tmp_path), init=False, may_die=[0]) == [DIED]
    assert read_dump(tmp_path / "pycomm-trace.0.json").reason == "signal SIGTERM"


def test_a_rank_that_waits_dumps_too(tmp_path: Path) -> None:
    """Rank 0 is in a barrier when rank 1 sends the signal; rank 1 enters it when the dump is there."""

    def worker(rank: int, _: int, folder: str) -> bool:
        store = dist.distributed_c10d._get_default_store()
        expected = Path(folder) / "pycomm-trace.0.json"
        if rank == 0:
            communicators = with_history(1).communicators(0)
            install_signal_dump(signal.SIGUSR1, folder, lambda: communicators)
            store.set("pid", str(os.getpid()))
        else:
            os.kill(int(store.get("pid")), signal.SIGUSR1)
            deadline = time.monotonic() + 10
            while not expected.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        dist.barrier()
        return expected.exists()

    assert run(2, worker, str(tmp_path)) == [True, True]


# ---- the command as it is run


def test_python_m(tmp_path: Path) -> None:
    """No warning, no traceback, the paragraph alone; also where only ASCII can be printed."""
    world = World(2, "größe")
    world.default.enter(0, at=1)
    world.dump(tmp_path, 0, at=60)
    command = [sys.executable, "-m", "pycomm.trace", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": "error"}
    done_ = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert (done_.returncode, done_.stderr) == (1, "")
    assert done_.stdout.startswith("Rank 1 (pid 4711) did not come to operation 1, all_reduce(")
    assert done_.stdout.count("\n") == 1
