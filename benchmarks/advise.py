"""What pycomm.compression.advise predicts, and what is measured: over shared memory, and over links of some bandwidths.

    python benchmarks/advise.py
    python benchmarks/advise.py --links 200,1000 --values 4e6 --plot docs/advise.png

Two ranks average a model's gradients with pycomm.sync_gradients, all compressions taking turns. Links connect two
network namespaces, shaped by tc (which needs root, and `ip` and `tc` of iproute2), and carry Gloo; speeds are in
Mbit/s. A gain is the time without compression by that with it, of the same repeat: medians [quartiles].
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from links import DEVICE, hosts
from machine import cpu_model
from ranks import quartiles
from torch import nn

import pycomm
from pycomm.compression import PowerSGD, TopK
from pycomm.compression.advice import advise

COMPRESSIONS = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "int8": "int8",
    "top-k": TopK(0.01),
    "low rank": PowerSGD(),
}
WIDTH = 2048  # of the model's matrices


def model_of(values: float) -> list[nn.Parameter]:
    """Square matrices, as many as hold so many values."""
    count = max(1, round(values / WIDTH**2))
    return [nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(count)]


# ---- measuring ------------------------------------------------------------------------------------------------------


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank: seconds of every repeat and compression, which rank 0 prints."""
    torch.set_num_threads(1)
    rank = arguments.rank
    backend = "gloo" if arguments.link else "pycomm"
    store = dist.FileStore(arguments.store, 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    parameters = model_of(arguments.values)
    for parameter in parameters:
        parameter.grad = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
    rows = []
    for repeat in range(arguments.repeats + 1):
        row = {}
        for name, compression in COMPRESSIONS.items():
            dist.barrier()
            began = time.perf_counter()
            pycomm.sync_gradients(parameters, compression=averagers(name, compression, parameters))
            dist.barrier()
            row[name] = time.perf_counter() - began
        if repeat:  # the first one warms up
            rows.append(row)
    if rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


_averagers: dict[str, pycomm.compression.Averager] = {}


def averagers(
    name: str, compression: object, parameters: list[nn.Parameter]
) -> pycomm.compression.Averager | None:
    """One of each compression, which keeps its residuals."""
    if compression is None:
        return None
    if name not in _averagers:
        assert isinstance(compression, str | pycomm.compression.Compressor)
        named = [(str(i), p) for i, p in enumerate(parameters)]
        _averagers[name] = pycomm.compression.Averager(compression, named)
    return _averagers[name]


def measure(arguments: argparse.Namespace, megabits: int | None) -> list[dict[str, float]]:
    """Starts both ranks, and returns rank 0's times."""
    words = ["--values", str(arguments.values), "--repeats", str(arguments.repeats)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        prefixes = stack.enter_context(hosts(2, megabits)) if megabits else [[], []]
        ranks = []
        for rank, prefix in enumerate(prefixes):
            own = ["--rank", str(rank), "--store", str(Path(folder) / "store")]
            own += ["--link"] if megabits else []
            command = [*prefix, sys.executable, __file__, *words, *own]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE} if megabits else None
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        outputs = [process.communicate(timeout=600)[0] for process in ranks]
        assert all(process.returncode == 0 for process in ranks)
    found: list[dict[str, float]] = json.loads(outputs[0])
    return found


@dataclass
class Comparison:
    """Of one compression over one link."""

    where: str
    compression: str
    seconds: float
    gain: tuple[float, float, float]  # quartiles
    predicted: float


def compare(
    arguments: argparse.Namespace, megabits: int | None, rows: list[dict[str, float]]
) -> list[Comparison]:
    """Next to the prediction."""
    torch.set_num_threads(1)
    chosen = [compression for compression in COMPRESSIONS.values() if compression is not None]
    bandwidth = megabits * 125e3 if megabits else None
    advices = advise(model_of(arguments.values), bandwidth, compressions=chosen)
    found = []
    for (name, _), advice in zip(COMPRESSIONS.items(), advices, strict=True):
        gains = [row["none"] / row[name] for row in rows]
        where = f"{megabits} Mbit/s" if megabits else "shared memory"
        seconds = median(row[name] for row in rows)
        found.append(Comparison(where, name, seconds, quartiles(gains), advice.gain))
    return found


# ---- results --------------------------------------------------------------------------------------------------------


def markdown(found: list[Comparison]) -> str:
    """A table of one link."""
    lines = [
        f"| {found[0].where} | ms | gain | predicted | off by |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in found:
        low, middle, high = one.gain
        gain = f"{middle:.2f} [{low:.2f}-{high:.2f}]"
        off = f"{(one.predicted / middle - 1) * 100:+.0f} %"
        lines.append(
            f"| {one.compression} | {one.seconds * 1e3:.1f} | {gain} | {one.predicted:.2f} | {off} |"
        )
    return "\n".join(lines)


def plot(found: list[list[Comparison]], path: Path) -> None:
    """Predicted by measured gains."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    names = [name for name in COMPRESSIONS if name != "none"]
    markers = dict(zip(names, "osD^vP", strict=True))
    for of_link, color in zip(
        found, ("tab:gray", "tab:red", "tab:blue", "tab:green"), strict=False
    ):
        for one in of_link[1:]:
            axes.plot(
                one.gain[1], one.predicted, markers[one.compression], color=color, ms=8, alpha=0.8
            )
        axes.plot([], [], "s", color=color, label=of_link[0].where)
    for name, marker in markers.items():
        axes.plot([], [], marker, color="k", label=name)
    gains = [gain for of_link in found for one in of_link for gain in (one.gain[1], one.predicted)]
    ends = [min(gains) / 1.3, max(gains) * 1.3]
    axes.plot(ends, ends, color="0.6", lw=1)
    axes.axhline(1, color="0.8", lw=1)
    axes.axvline(1, color="0.8", lw=1)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured gain", ylabel="predicted gain", title="Compression: above 1 it pays")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Prints a table per link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--links",
        type=lambda text: [int(word) for word in text.split(",") if word],
        default=[200, 1000, 5000],
        help="Mbit/s, with commas; '' for shared memory alone (200,1000,5000)",
    )
    parser.add_argument("--values", type=float, default=8e6, help="of the model (8e6)")
    parser.add_argument("--repeats", type=int, default=7, help="at least 2 (7)")
    parser.add_argument("--plot", type=Path, help="write a picture")
    parser.add_argument("--json", type=Path, help="write the comparisons")
    for name in ("--rank", "--store", "--link"):  # of a rank that this program starts
        kind = {"action": "store_true"} if name == "--link" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)  # type: ignore[arg-type]
    arguments = parser.parse_args()
    if arguments.repeats < 2 or not arguments.values > 0 or min(arguments.links, default=1) < 1:
        parser.error("at least 2 repeats, some values and positive links")
    if arguments.rank is not None:
        arguments.rank = int(arguments.rank)
        run_rank(arguments)
        return 0
    found = []
    print(f"2 ranks, {cpu_model()}, torch {torch.__version__}, {arguments.values:.0f} values\n")
    for megabits in (None, *arguments.links):
        rows = measure(arguments, megabits)
        found.append(compare(arguments, megabits, rows))
        print(markdown(found[-1]) + "\n", flush=True)
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for row in found for one in row]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
