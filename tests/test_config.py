"""Settings from the environment, and the words for an extension that does not fit its torch."""

from __future__ import annotations

import builtins
import runpy
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import Refused, attempt, run

import pycomm
import pycomm.config
from pycomm import rendezvous
from pycomm.config import (
    BUILD_VARIABLES,
    TEST_VARIABLES,
    Config,
    Launch,
    child_environment,
    table,
)
from pycomm.extension import check_versions, minor


def test_defaults_without_variables() -> None:
    """An empty environment, or one of other programs' variables, gives the defaults silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_environment({}) == Config()
        assert Config.from_environment({"PATH": "/bin", "OTHER_SLOTS": "3"}) == Config()


def test_values_are_read_with_their_types() -> None:
    """Integers become int, also negative ones; the rest stays text."""
    environment = {
        "PYCOMM_SLOT_BYTES": "8192",
        "PYCOMM_SLOTS": "16",
        "PYCOMM_STREAMING": "never",
        "PYCOMM_SPIN_POLLS": "-1",
        "PYCOMM_HEAP_BYTES": "4096",
        "PYCOMM_CHANNEL_BYTES": "65536",
        "PYCOMM_SINGLE_COPY": "never",
        "PYCOMM_DDP_OVERLAP": "0",
        "PYCOMM_DDP_MISSING": "step",
    }
    assert Config.from_environment(environment) == Config(
        slot_bytes=8192,
        slots=16,
        streaming="never",
        spin_polls=-1,
        heap_bytes=4096,
        channel_bytes=65536,
        single_copy="never",
        ddp_overlap="0",
        ddp_missing="step",
    )


def test_build_and_test_variables_are_known() -> None:
    """Variables that setup.py or the tests read cause no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment = dict.fromkeys([*BUILD_VARIABLES, *TEST_VARIABLES], "1")
        assert Config.from_environment(environment) == Config()


@pytest.mark.parametrize("name", ["PYCOMM_SLOT_BYTES", "PYCOMM_SLOTS", "PYCOMM_SPIN_POLLS"])
@pytest.mark.parametrize("text", ["many", "", "1.5", "256k"])
def test_integers_must_be_integers(name: str, text: str) -> None:
    """The error names the variable and the text."""
    with pytest.raises(ValueError, match=f"{name} must be an integer, not {text!r}"):
        Config.from_environment({name: text})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("PYCOMM_STREAMING", "auto, never, always"),
        ("PYCOMM_DDP_OVERLAP", "auto, 0, 1"),
        ("PYCOMM_DDP_MISSING", "backward, step"),
    ],
)
def test_choices_must_be_among_the_known(name: str, allowed: str) -> None:
    """The error names the variable, the choices and the text."""
    with pytest.raises(ValueError, match=f"{name} must be one of {allowed}, not 'sometimes'"):
        Config.from_environment({name: "sometimes"})


def test_unknown_variables_are_named() -> None:
    """A typo in a variable's name is warned about, with the known names."""
    with pytest.warns(UserWarning, match=r"PYCOMM_SLOT_BYTE;.*PYCOMM_SLOT_BYTES") as caught:
        assert Config.from_environment({"PYCOMM_SLOT_BYTE": "1"}) == Config()
    assert len(caught) == 1


def test_the_table_has_a_row_for_every_variable() -> None:
    """Each row shows name, default and meaning, and nothing breaks the markdown."""
    head, rule, *rows = table().splitlines()
    assert (head, rule) == ("| variable | default | meaning |", "|---|---|---|")
    assert [row.split("`")[1] for row in rows] == list(Config.variables())
    assert all(row.count("|") == 4 for row in rows)
    for field in fields(Config):
        name, about = f"PYCOMM_{field.name.upper()}", field.metadata["about"]
        assert f"| `{name}` | `{field.default}` | {about} |" in rows


def test_the_module_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """What `python -m pycomm.config` runs prints README's table."""
    runpy.run_path(pycomm.config.__file__, run_name="__main__")
    assert capsys.readouterr().out == table() + "\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("PYCOMM_SLOT_BYTES", "5000", "4096"),
        ("PYCOMM_SLOT_BYTES", "0", "4096"),
        ("PYCOMM_SLOTS", "6", "power of two"),
        ("PYCOMM_SLOTS", "2", "4"),
        ("PYCOMM_CHANNEL_BYTES", "2048", "4096"),
        ("PYCOMM_CHANNEL_BYTES", "100000", "power of two"),
    ],
)
def test_values_that_shared_memory_cannot_take(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    """Every rank's init says what is wrong with the setting; nobody waits for an offer."""

    def worker(rank: int, n: int) -> Refused | None:
        rendezvous.COME_AGAIN = 0.5  # what a rank that comes after rank 0's error waits
        method = f"file://{tmp_path}/store"

        def init() -> None:
            dist.init_process_group("pycomm", init_method=method, rank=rank, world_size=n)

        return attempt(init)

    for result in run(2, worker, env={name: text}, init=False):
        assert isinstance(result, Refused)
        assert "Error" in result.kinds
        assert words in result.message, result.message


def test_versions_that_fit() -> None:
    """Patch level and build do not matter."""
    assert minor("2.14.1+cu130") == ("2", "14")
    check_versions("2.14.1+cu130", "2.14.0+cpu")


@pytest.mark.parametrize("running", ["2.13.1+cu130", "3.14.1", "2.1.4"])
def test_versions_that_do_not_fit(running: str) -> None:
    """Another minor version is refused with both versions and how to rebuild."""
    with pytest.raises(ImportError) as caught:
        check_versions("2.14.1+cu130", running)
    for words in ("built with torch 2.14.1+cu130", f"torch {running} is installed", "make build"):
        assert words in str(caught.value)


def test_errors_form_one_family() -> None:
    """All errors are pycomm.Error and RuntimeError; two are what Python calls them, too."""
    kinds = (
        pycomm.InvalidArgument,
        pycomm.MismatchError,
        pycomm.TimeoutError,
        pycomm.PeerDiedError,
        pycomm.AbortedError,
    )
    assert all(issubclass(kind, pycomm.Error) for kind in kinds)
    assert issubclass(pycomm.Error, RuntimeError)
    assert issubclass(pycomm.InvalidArgument, ValueError)
    assert issubclass(pycomm.TimeoutError, builtins.TimeoutError)


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Launch(3, 8, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Launch(3, 8, 3)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Launch(0, 2, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, Launch(1, 2, 0)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}, Launch(5, 6, 2)),
        ({"RANK": "3"}, None),
        ({}, None),
    ],
)
def test_what_a_launcher_told(told: dict[str, str], place: Launch | None) -> None:
    """torchrun's, Open MPI's, MPICH's and Slurm's variables; half of a pair is nobody's word."""
    assert Launch.from_environment(told) == place


def test_a_launchers_rank_is_a_number() -> None:
    with pytest.raises(ValueError, match="one"):
        Launch.from_environment({"RANK": "one", "WORLD_SIZE": "2"})


def test_children_see_what_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OTHER", "stays")
    seen = child_environment({"RANK": "1"})
    assert (seen["RANK"], seen["OTHER"]) == ("1", "stays")
