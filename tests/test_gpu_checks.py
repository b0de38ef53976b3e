"""The device checks (tests/gpu) where there is no device: the CPU's kernels stand in, right and spoiled."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import gpu_bandwidth
import gpu_checks
import gpu_peer
import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_device import StandIn
from harness import run

from pycomm.extension import core

ROOT: Final = Path(__file__).resolve().parent.parent


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of the last byte."""
    if tensor.numel() > 0:
        tensor.view(torch.uint8)[-1] ^= 1


class SpoiledWire(StandIn):
    """Writes a last value that is off by a bit."""

    def transcode(self, codec: Any, count: int, **arguments: Any) -> Any:
        counts = super().transcode(codec, count, **arguments)
        if arguments["encoded"] is not None and count > 0:
            arguments["encoded"][0][count * codec.value_bytes - 1] ^= 1
        return counts


class WritesBehind(StandIn):
    """Writes one value too many."""

    def transcode(self, codec: Any, count: int, **arguments: Any) -> Any:
        counts = super().transcode(codec, count, **arguments)
        if (
            arguments["encoded"] is not None
            and len(arguments["encoded"][0]) > count * codec.value_bytes
        ):
            arguments["encoded"][0][count * codec.value_bytes] = 0
        return counts


class SpoiledResidual(StandIn):
    """Loses a residual's last bit."""

    def transcode(self, codec: Any, count: int, **arguments: Any) -> Any:
        counts = super().transcode(codec, count, **arguments)
        if arguments.get("residual") is not None:
            flip(arguments["residual"])
        return counts


class SpoiledOutput(StandIn):
    """Writes a last element that is off by a bit."""

    def transcode(self, codec: Any, count: int, **arguments: Any) -> Any:
        counts = super().transcode(codec, count, **arguments)
        if arguments.get("outputs"):
            flip(next(t for t in reversed(arguments["outputs"]) if t.numel() > 0))
        return counts


class SpoiledReduction(StandIn):
    """Sums, and flips a bit."""

    def reduce(
        self,
        output: torch.Tensor,
        sources: Sequence[torch.Tensor],
        op: str,
        scales: Sequence[float] | None = None,
    ) -> None:
        super().reduce(output, sources, op, scales)
        if output.dtype == torch.int32:
            flip(output)


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (SpoiledWire, "wire differs"),
        (WritesBehind, "written behind the wire"),
        (SpoiledResidual, "residual differs"),
        (SpoiledOutput, "outputs differ"),
        (SpoiledReduction, "int32: differs"),
    ],
)
def test_checks_notice_a_wrong_kernel(
    spoiled: type[StandIn], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault under its name, and the exit status that says so."""
    assert gpu_checks.run(core, spoiled(core), True, tmp_path) == gpu_checks.WRONG
    differences = json.loads((tmp_path / "gpu.json").read_text())["correctness"]["differences"]
    assert any(words in line for line in differences)
    assert "FAILED: kernels are wrong" in capsys.readouterr().out


class SpoiledSums(gpu_peer.StandInPeers):
    """The last rank of a sum has another last bit."""

    def all_reduce(
        self, inputs: Sequence[torch.Tensor], op: str, algorithm: str, scales: list[float] | None
    ) -> list[torch.Tensor]:
        outputs = super().all_reduce(inputs, op, algorithm, scales)
        if inputs[0].dtype == torch.int32:
            flip(outputs[-1])
        return outputs


class SpoiledPeerResidual(gpu_peer.StandInPeers):
    """Rank 0 loses a residual's last bit."""

    def compressed(self, call: gpu_peer.Compressed) -> None:
        super().compressed(call)
        flip(call.residuals[0])


class OtherShards(gpu_peer.StandInPeers):
    """Sums with the algorithm of two_shot whatever was asked."""

    def compressed(self, call: gpu_peer.Compressed) -> None:
        super().compressed(dataclasses.replace(call, algorithm="two_shot"))


class ReplaysOnce(gpu_peer.StandInPeers):
    """Forgets the turns of a graph."""

    def replayed(self, inputs: Sequence[torch.Tensor], turns: int) -> list[torch.Tensor]:
        return super().replayed(inputs, 1)


class SaysNothing(gpu_peer.StandInPeers):
    """Of a rank that does not come."""

    def alone(self) -> str:
        return "nothing"


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (SpoiledSums, r"sum of 4 x \d+ int32: rank 3 differs"),
        (SpoiledPeerResidual, "rank 0: residuals differ"),
        (OtherShards, r"one_shot of 4 x \d+ .*: results differ"),
        (ReplaysOnce, "a graph of 2 ranks gives other sums"),
        (SaysNothing, "a rank that does not come: nothing"),
    ],
)
def test_checks_notice_wrong_peers(
    spoiled: type[gpu_peer.StandInPeers], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault under its name, and without one none."""
    device = StandIn(core)
    monkeypatch.setattr(gpu_peer, "StandInPeers", spoiled)
    monkeypatch.setattr(gpu_peer, "COUNTS", (17, 300))
    found = [line for lines in gpu_peer.differences(device, True) for line in lines]
    assert any(re.search(words, line) for line in found), found[:5]


def test_shards_cover_every_value_once() -> None:
    """As the kernel divides them, in order."""
    for count in (1, 64, 4099, 300_001):
        for name, block in gpu_peer.CODECS:
            codec = core.Codec(name, block)
            tensors = tuple(torch.zeros(count) for _ in range(3))
            call = gpu_peer.Compressed(codec, "two_shot", 1.0, tensors, tensors)
            pieces = list(gpu_peer.owned(call))
            assert [begin for begin, _, _ in pieces] == [0, *(end for _, end, _ in pieces[:-1])]
            assert pieces[-1][1] == count
            assert all(begin % gpu_peer.granule(codec) == 0 for begin, _, _ in pieces)


def test_checks_pass_with_the_cpu_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line; every kernel has a line and no figure counts."""
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_checks.main(["--stand-in", "--quick"]) == gpu_checks.RIGHT
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["stand_in"] is True
    assert report["correctness"]["differences"] == []
    assert report["correctness"]["cases"] > 2000
    rows = len(gpu_bandwidth.CODECS) * len(gpu_bandwidth.OPERATIONS) + len(
        gpu_bandwidth.ELEMENTWISE
    )
    assert len(report["bandwidth"]) == rows
    assert "speeds, which were not of a device" in capsys.readouterr().out


def test_a_few_checks_for_slow_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kernel, right and spoiled."""
    assert gpu_checks.main(["--stand-in", "--tiny"]) == gpu_checks.RIGHT
    found = re.search(r"^(\d+) cases .* 0 differences", capsys.readouterr().out, re.MULTILINE)
    assert found
    assert 40 < int(found[1]) < 200
    monkeypatch.setattr(gpu_checks, "StandIn", SpoiledWire)
    assert gpu_checks.main(["--stand-in", "--tiny"]) == gpu_checks.WRONG
    monkeypatch.setattr(gpu_checks, "StandIn", SpoiledReduction)
    assert gpu_checks.main(["--stand-in", "--tiny"]) == gpu_checks.WRONG


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_ranks_check_holds_on_shared_memory(ranks: int) -> None:
    """Started as tests/gpu/run.sh does; every check has a line."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         "tests/gpu/gpu_ranks.py", "--device", "cpu"],
        cwd=ROOT, text=True, timeout=240, check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for check in gpu_ranks.CHECKS:
        assert done.stdout.count(f": {check.__name__}: 0 differences") == ranks


class SpoilsSums:
    """An all_reduce whose last element is off by one on the last rank."""

    def __init__(self, sound: Callable[..., Any]) -> None:
        self.sound = sound

    def __call__(self, tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        work = self.sound(tensor, *args, **named)
        if work is not None:
            work.wait()
        if dist.get_rank() == dist.get_world_size() - 1:
            tensor.view(-1)[-1:] += 1
        return work


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (gpu_ranks.collectives, r"all_reduce .* of 17: 1 of 17 elements differ, first 16"),
        (gpu_ranks.streams, "all_reduce between other work, async True: 1 of"),
    ],
)
def test_ranks_notice_a_wrong_sum(check: Any, words: str) -> None:
    """On the rank that has it."""

    def worker(rank: int, n: int) -> list[str]:
        dist.all_reduce = SpoilsSums(dist.all_reduce)
        return list(check(gpu_ranks.Ranks(torch.device("cpu"))))

    sound, spoiled = run(2, worker)
    assert sound == []
    assert any(re.search(words, line) for line in spoiled), spoiled


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_script_without_a_gpu_says_so() -> None:
    """Before it builds anything."""
    done = subprocess.run(
        ["bash", "tests/gpu/run.sh"], cwd=ROOT, text=True, timeout=120, check=False, capture_output=True
    )  # fmt: skip
    assert done.returncode == gpu_checks.NO_DEVICE
    assert "no CUDA device" in done.stderr
