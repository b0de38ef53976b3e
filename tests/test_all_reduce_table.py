"""Tables of algorithms by size: as text, in files, and in the ranks' hands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import G, attempt, refused, run, td
from torch import distributed as dist

import pycomm
from pycomm.all_reduce_table import NO_LIMIT, nearest, of_text, to_text
from pycomm.config import Config
from pycomm.extension import core

TABLES = {
    "two_shot": [(NO_LIMIT, "two_shot")],
    "64K:one_shot,two_shot": [(64 << 10, "one_shot"), (NO_LIMIT, "two_shot")],
    "100:ring,8M:one_shot,1G:two_shot,ring": [
        (100, "ring"),
        (8 << 20, "one_shot"),
        (1 << 30, "two_shot"),
        (NO_LIMIT, "ring"),
    ],
}
WRONG = {
    "three_shot": "names none of one_shot, two_shot, ring",
    "one_shot,two_shot": "all but the last",
    "64K:one_shot": "all but the last",
    "64K:one_shot,32K:ring,two_shot": "sizes must grow",
    "64k:one_shot,ring": "no size like",
    "-1:one_shot,ring": "no size like",
    ":one_shot,ring": "no size like",
    ",": "names none",
    ",".join([*(f"{k}:ring" for k in range(8)), "ring"]): "in 8 parts",
}


@pytest.mark.parametrize("text", TABLES)
def test_text_and_back(text: str) -> None:
    assert of_text(text, 2) == TABLES[text]
    assert to_text(TABLES[text]) == text


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_table_is_told_by_the_variables_name(text: str) -> None:
    with pytest.raises(ValueError, match=WRONG[text]) as found:
        Config(all_reduce=text)
    assert "PYCOMM_ALL_REDUCE" in str(found.value)


def test_nothing_is_the_cores_own() -> None:
    assert of_text("", 4) == []
    assert Config().all_reduce == ""


@pytest.mark.parametrize(("ranks", "right"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (9, 8)])
def test_of_a_file_the_line_of_as_many_ranks(tmp_path: Path, ranks: int, right: int) -> None:
    """Or of the next larger number, or of the largest that there is."""
    path = tmp_path / "table"
    path.write_text(
        "# measured\n8 8K:one_shot,ring\n\n2 2K:one_shot,ring # here\n4 4K:one_shot,ring\n"
    )
    assert of_text(f"@{path}", ranks)[0] == (right << 10, "one_shot")
    assert nearest([8, 2, 4], ranks) == right


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no table"),
        ("# none\n", "has no table"),
        ("\n2 3 ring\n", "line 2"),
        ("two ring\n", "line 1"),
        ("2 rung\n", "names none"),
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_files_that_have_no_table(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    path = tmp_path / "table"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        Config(all_reduce=f"@{path}")


def test_ranks_follow_rank_0s_table() -> None:
    """Also where only rank 0 has the setting; sums are right on both sides of every size."""

    def worker(rank: int, n: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        table = "1K:one_shot,64K:ring,two_shot"
        for round, setting in enumerate((table if rank == 0 else "", table)):
            prefixed = dist.PrefixStore(f"round {round}", store)
            communicator = pycomm.create_communicator(
                prefixed, rank, n, td(20), Config(all_reduce=setting)
            )
            for count, algorithm in (
                (256, "one_shot"),
                (257, "ring"),
                (16384, "ring"),
                (16385, "two_shot"),
            ):
                assert communicator.all_reduce_algorithm(4 * count) == algorithm
                values = torch.randint(-99, 99, (count,), generator=G(rank)).float()
                sum = torch.stack(
                    [torch.randint(-99, 99, (count,), generator=G(r)).float() for r in range(n)]
                ).sum(0)
                communicator.all_reduce(values)
                assert torch.equal(values, sum)
            communicator.shutdown()

    run(3, worker)


def test_the_core_refuses_tables_of_its_own_accord() -> None:
    def offer(table: Any) -> Any:
        settings = Config()
        return attempt(
            lambda: core.ShmOffer(
                2,
                slot_bytes=settings.slot_bytes,
                slots=settings.slots,
                streaming="auto",
                spin_polls=-1,
                heap_bytes=0,
                channel_bytes=4096,
                single_copy="auto",
                records=8,
                liveness="auto",
                all_reduce=table,
            ),
        )

    for table, words in (
        ([(4, "ring")], "no limit"),
        ([(8, "ring"), (8, "ring"), (NO_LIMIT, "ring")], "grow"),
        ([(NO_LIMIT, "auto")], "auto"),
        ([(NO_LIMIT, "rung")], "rung"),
        ([(k, "ring") for k in range(9)], "8 lines"),
    ):
        assert refused([offer(table)], words), table
