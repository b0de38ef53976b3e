"""The device checks (tests/gpu) where there is no device: the CPU's kernels stand in, right and spoiled."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gpu_bandwidth
import gpu_checks
import gpu_peer
import pytest
import torch
from gpu_device import StandIn

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
        (SpoiledOutput, "outputs differs"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_script_without_a_gpu_says_so() -> None:
    """Before it builds anything."""
    done = subprocess.run(
        ["bash", "tests/gpu/run.sh"], cwd=ROOT, text=True, timeout=120, check=False, capture_output=True
    )  # fmt: skip
    assert done.returncode == gpu_checks.NO_DEVICE
    assert "no CUDA device" in done.stderr
