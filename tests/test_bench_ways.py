"""What python -m pycomm.bench sets side by side beyond backends: algorithms, encodings, codecs, steps; and --tune."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run
from test_bench import bench

from pycomm.all_reduce_table import ALGORITHMS, NO_LIMIT, of_text
from pycomm.bench import codecs, steps
from pycomm.bench.measure import Side, _check
from pycomm.bench.operations import Case, prepare
from pycomm.bench.settings import parser, settings_of
from pycomm.bench.tune import table_of, times_of, write
from pycomm.bench.ways import COMPRESSIONS, ROUNDING, Way
from pycomm.compression.codecs import NAMED
from pycomm.errors import InvalidArgument


def case_of(operation: str, count: int, rank: int, n: int) -> Case:
    return Case(operation, count, "float", "sum", 0, rank, n)


# ---- ways


def test_every_encoding_of_the_library_is_known() -> None:
    assert set(COMPRESSIONS) == set(NAMED)
    assert set(ROUNDING) == {"", *NAMED}


def test_names_and_order() -> None:
    """Backends first, so that they are what others are compared with."""
    words = ["all_reduce", "--backend", "pycomm,gloo", "--algorithm", "ring", "--wire", "fp16,int8"]
    settings = settings_of(parser().parse_args(words))
    assert [str(way) for way in settings.ways] == [
        *("pycomm", "gloo", "pycomm:ring", "pycomm+fp16", "pycomm+int8", "gloo+fp16", "gloo+int8")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("broadcast --algorithm ring", "all_reduce on backend pycomm"),
        ("all_reduce --backend gloo --algorithm ring", "all_reduce on backend pycomm"),
        ("all_reduce --algorithm rung", "one_shot, two_shot, ring"),
        ("all_reduce --algorithm ring,ring", "each once"),
        ("broadcast --compression fp16", "not broadcast"),
        ("all_reduce --compression zip", "fp16"),
        ("all_reduce --compression fp16 -d half", "of -d float"),
        ("all_reduce --compression fp16 -o max", "-o sum"),
        ("ddp -d double", "of -d float"),
        ("compress -u 4", "not for compress"),
        ("gather --tune table", "all_reduce on backend pycomm"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        settings_of(parser().parse_args(words.split()))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_way_gives_what_is_expected(n: int) -> None:
    """And a spoiled result is found in each: integers differ by more than two roundings, but for the coarsest."""

    def worker(rank: int, n: int) -> None:
        control: Any = dist.new_group(backend="gloo")
        groups: dict[str, Any] = {"pycomm": dist.group.WORLD, "gloo": control}
        ways = [Way("pycomm", algorithm=name) for name in ALGORITHMS]
        ways += [Way(backend, compression=name) for backend in groups for name in COMPRESSIONS]
        for way in ways:
            for count in (0, 1, 7, 5000):
                case = case_of("all_reduce", count, rank, n)
                call = prepare(case, groups[way.backend], True, 0, way)
                side = Side(str(way), True)
                _check(side, call, case, control)
                assert side.wrong == 0, (str(way), count, side.first_wrong)
                if count == 5000 and way.compression in ("", "fp16", "bf16", "int8"):
                    plain = call.run

                    def spoiled(call: Any = call, plain: Any = plain) -> None:
                        plain()
                        if rank == n - 1:
                            call.result[99] += 1

                    call.run = spoiled
                    _check(side, call, case, control)
                    assert side.wrong == 1, str(way)
                    assert f"rank {n - 1}, element 99" in side.first_wrong

    run(n, worker)


# ---- codecs and steps


@pytest.mark.parametrize("count", [0, 1, 255, 5000])
def test_codecs_are_checked(count: int) -> None:
    """Decoded values are what was encoded, within a rounding; a codec that leaves one out is found."""

    def worker(rank: int, n: int) -> None:
        control = dist.group.WORLD
        assert control is not None
        case = case_of("compress", count, rank, n)
        names = []
        for name, make in codecs.sides(case, COMPRESSIONS):
            names.append(name)
            call, side = make(), Side(name, False)
            _check(side, call, case, control)
            assert side.wrong == 0, (name, side.first_wrong)
            if count == 5000:
                call.run = lambda: None
                call.finish = None
                _check(side, call, case, control)
                assert side.wrong > 0, name
        assert names[0] == "copy"
        assert len(names) == 1 + 3 * len(COMPRESSIONS)

    run(1, worker, backend="gloo")


@pytest.mark.parametrize("n", [1, 2])
def test_steps_are_checked(n: int) -> None:
    """pycomm's class, torch's, and compressed ones, after several steps; gradients that stay local are found."""

    def worker(rank: int, n: int) -> None:
        control: Any = dist.new_group(backend="gloo")
        groups: dict[str, Any] = {"pycomm": dist.group.WORLD, "gloo": control}
        ways = (
            Way("pycomm"),
            Way("gloo"),
            Way("pycomm", compression="fp16"),
            Way("gloo", compression="fp16"),
        )
        case = case_of("ddp", steps.count_of(64 << 10), rank, n)
        assert case.bytes == 4 * 64 * 64 * 4
        for name, make in steps.sides(case, groups, ways):
            call, side = make(), Side(name, False)
            for _ in range(3):
                call.run()
            _check(side, call, case, control)
            assert side.wrong == 0, (name, side.first_wrong)
        alone = next(steps.sides(case, groups, ways))[1]()
        wanted = make().wanted
        alone.wanted = wanted
        _check(side, alone, case, control)
        assert (side.wrong > 0) == (n > 1)

    run(n, worker)


@pytest.mark.parametrize("bytes", [0, 15, 16, 63, 64, 1000, 1 << 20])
def test_layers_are_as_large_as_can_be(bytes: int) -> None:
    count = steps.count_of(bytes)
    width = round((count // steps.LAYERS) ** 0.5)
    assert count == steps.LAYERS * width**2
    assert 4 * count <= bytes < 4 * steps.LAYERS * (width + 1) ** 2


# ---- tune


def test_a_table_from_times() -> None:
    times = {
        1 << 10: {"one_shot": 1.0, "two_shot": 2.0, "ring": 3.0},
        2 << 10: {"one_shot": 2.0, "two_shot": 1.99, "ring": 3.0},  # a gain that is noise
        4 << 10: {"one_shot": 3.0, "two_shot": 2.0, "ring": 2.5},
        8 << 10: {"one_shot": 9.0, "two_shot": 3.0, "ring": 2.5},
        16 << 10: {"one_shot": 9.0, "two_shot": 3.0, "ring": 2.5},
    }
    assert table_of(times) == [(2 << 10, "one_shot"), (4 << 10, "two_shot"), (NO_LIMIT, "ring")]
    assert table_of({8: {"ring": 2.0, "one_shot": 1.0}}) == [(NO_LIMIT, "one_shot")]


def test_a_table_has_no_more_lines_than_the_core_takes() -> None:
    """However the times jump; sizes grow and neighbours differ."""
    pair = ("one_shot", "ring")
    times = {
        1 << k: {pair[k % 2]: 1.0, pair[1 - k % 2]: 9.0, "two_shot": 5.0} for k in range(10, 27)
    }
    table = table_of(times)
    assert 1 < len(table) <= 8
    assert [size for size, _ in table] == sorted({size for size, _ in table})
    assert all(a[1] != b[1] for a, b in pairwise(table))
    assert table[-1][0] == NO_LIMIT


def test_a_file_keeps_other_ranks_lines(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text("# of this host\n2 ring  # earlier\n4 8K:one_shot,ring\n")
    write(path, 2, [(NO_LIMIT, "two_shot")], "now")
    write(path, 8, [(4096, "one_shot"), (NO_LIMIT, "ring")], "now")
    assert path.read_text().splitlines() == [
        "# of this host",
        "4 8K:one_shot,ring",
        "2 two_shot  # now",
        "8 4K:one_shot,ring  # now",
    ]
    path.write_text("no table\n")
    with pytest.raises(ValueError, match="line 1"):
        write(path, 2, [(NO_LIMIT, "two_shot")], "now")
    assert path.read_text() == "no table\n"


def test_tune_writes_what_the_library_reads(tmp_path: Path) -> None:
    """The file is the record's verdict, and a group of as many ranks follows it."""
    path, record = tmp_path / "table", tmp_path / "record.json"
    words = f"all_reduce --ranks 2 -b 1K -e 64K -n 3 --rounds 2 --tune {path} --json {record}"
    done = bench(*words.split())
    assert f"export PYCOMM_ALL_REDUCE=@{path}" in done.stdout
    times = times_of(json.loads(record.read_text()))
    assert set(times) == {1 << 10, 4 << 10, 16 << 10, 64 << 10}
    assert all(set(by_name) == set(ALGORITHMS) for by_name in times.values())
    table = table_of(times)
    assert of_text(f"@{path}", 2) == table

    def worker(rank: int, n: int, path: str) -> list[str]:
        from datetime import timedelta

        import pycomm
        from pycomm.config import Config

        store = dist.distributed_c10d._get_default_store()
        communicator = pycomm.create_communicator(
            dist.PrefixStore("tuned", store),
            rank,
            n,
            timedelta(seconds=20),
            Config(all_reduce=f"@{path}"),
        )
        return [communicator.all_reduce_algorithm(size) for size in (1 << 10, 64 << 10, 1 << 30)]

    def taken(size: int) -> str:
        return next(algorithm for limit, algorithm in table if size <= limit)

    wanted = [taken(size) for size in (1 << 10, 64 << 10, 1 << 30)]
    assert run(2, worker, str(path)) == [wanted, wanted]


# ---- the command


def test_the_commands_lines(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    few = ["--ranks", "2", "-n", "2", "--rounds", "2", "-w", "1"]
    both = [
        "all_reduce",
        "-b",
        "4K",
        "-e",
        "4K",
        "--backend",
        "pycomm,gloo",
        "--algorithm",
        "ring",
        "--compression",
        "fp16",
    ]
    done = bench(*both, *few, "--json", str(record), "--plot", str(tmp_path / "p.png"))
    for name in ("pycomm:ring", "pycomm+fp16", "gloo+fp16"):
        assert f" {name} " in done.stdout
    found = [side["backend"] for side in json.loads(record.read_text())["rows"][0]["sides"]]
    assert found == ["pycomm", "gloo", "pycomm:ring", "pycomm+fp16", "gloo+fp16"]
    done = bench(
        "compress", "-b", "4K", "-e", "4K", "--ranks", "1", "-n", "2", "--compression", "bf16"
    )
    assert [" copy " in done.stdout, " bf16 encode " in done.stdout] == [True, True]
    done = bench(
        "ddp", "-b", "64K", "-e", "64K", "--backend", "pycomm,gloo", *few, "--json", str(record)
    )
    assert "of a step is communication" in done.stdout
    sides = json.loads(record.read_text())["rows"][0]["sides"]
    assert [side["backend"] for side in sides] == ["alone", "pycomm", "gloo"]
    assert all(side["exposed"] == 1 - 1 / side["ratio"] for side in sides)
    assert torch.tensor([side["wrong"] for side in sides]).sum() == 0


def test_a_tune_file_that_is_none_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("something else\n")
    done = bench("all_reduce", "--ranks", "2", "--tune", str(path), code=2)
    assert "line 1" in done.stderr
    assert path.read_text() == "something else\n"
