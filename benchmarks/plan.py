"""What pycomm.plan predicts, and what is measured: over shared memory, and between hosts with links of some bandwidths.

    python benchmarks/plan.py
    python benchmarks/plan.py --links 100 --repeats 3 --json plan.json

Shared memory: pycomm.Communicator on two ranks, a link fitted to two sizes (marked *) for each of three regimes, in
every repeat anew (but not the third): one_shot beside the header, two_shot in the caches, two_shot beyond them; and
pycomm's DDP, whose step is predicted from the plain module's. Hosts are network namespaces, whose links tc shapes
(which needs root, and `ip` and `tc`), and carry Gloo's ring: the bandwidth is the one that tc was given, in Mbit/s; the
latency of all links is fitted to the smallest message of two hosts on the first link (*); and torch's DDP, whose
buckets travel during backward. All sizes take turns; a repeat takes the fastest of its calls (of batches of them, if
short, and over shared memory of those up to 4 MB in which both ranks had a core), figures are medians [quartiles] of
repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ddp import MODELS, step
from links import DEVICE, PAYLOAD, hosts
from machine import cpu_model, others_share, read_clock
from ranks import quartiles
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from words import format_bytes

import pycomm
from pycomm.plan import Bucket, Group, Link, Sample, buckets_of, drain, fit_link, predict

K, M = 2**10, 2**20
#: Of shared memory: how it goes there, the two sizes of the fit, and those that are predicted.
REGIMES = (
    ("one_shot", (64, 16 * K), (8, K, 4 * K)),  # what travels beside the header
    ("two_shot", (64 * K, 512 * K), (128 * K, 256 * K, M, 4 * M)),
    ("two_shot", (48 * M, 128 * M), (64 * M, 96 * M, 192 * M)),
)
#: Between hosts; the first one is what the latency is fitted to.
SIZES = (4 * K, 64 * K, 256 * K, M, 4 * M, 16 * M)
CAPS = (4, 25)  # MiB a bucket
PLAIN = "plain"
#: The part of a batch during which a rank must have run, if it never rests.
OWN_CORE = 0.9


# ---- a rank ---------------------------------------------------------------------------------------------------------


def deep() -> tuple[nn.Module, torch.Tensor]:
    """8.4 M parameters in 8 equal layers, whose backward takes about as long as they travel."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(512, 1024)


def reducer(arguments: argparse.Namespace) -> Callable[[torch.Tensor], object]:
    """What is measured."""
    if arguments.link:
        return dist.all_reduce
    communicator = pycomm.get_communicator()
    return lambda tensor: communicator.all_reduce(tensor, "max")


def batch_of(
    calls: int, reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor
) -> tuple[float, float]:
    """Seconds per call, and how much of them this rank had a core."""
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        reduce(tensor)
    seconds = time.perf_counter() - began
    return seconds / calls, (time.process_time() - worked) / seconds


def fastest_of(
    arguments: argparse.Namespace, reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor
) -> float | None:
    """Seconds per call; over shared memory, where ranks never rest, of a batch that had both cores, or None."""
    size = 4 * tensor.numel()
    calls = max(1, min(5 if arguments.link else 100, 4 * M // size))
    large = size > 4 * M  # takes so long that somebody always wants the core
    batches = 2 if large else 5 if arguments.link else 30
    reduce(tensor)
    found = [batch_of(calls, reduce, tensor) for _ in range(batches)]
    shares = torch.tensor([share for _, share in found], dtype=torch.float64)
    dist.all_reduce(shares, dist.ReduceOp.MIN)
    times = [
        seconds
        for (seconds, _), share in zip(found, shares.tolist(), strict=True)
        if arguments.link or large or share > OWN_CORE
    ]
    return min(times, default=None)


def collectives(
    arguments: argparse.Namespace, reduce: Callable[[torch.Tensor], object]
) -> list[dict[str, float]]:
    """Seconds per call, by bytes, of every repeat. While others have the cores, there are up to three times as many."""
    tensors = {size: torch.ones(size // 4) for size in arguments.sizes}
    found: list[dict[str, float]] = []
    chance, order = random.Random(1), list(tensors)
    for _ in range(3 * arguments.repeats + 1):
        chance.shuffle(order)
        times = {size: fastest_of(arguments, reduce, tensors[size]) for size in order}
        found.append({str(size): slowest(t) for size, t in times.items() if t is not None})
        if sum(len(row) == len(order) for row in found[1:]) == arguments.repeats:
            break
    return found[1:]  # the first one warmed up


def slowest(seconds: float) -> float:
    """Of all ranks."""
    box = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def ready_times(module: nn.Module, batch: torch.Tensor) -> tuple[list[tuple[int, float]], float]:
    """Bytes of every gradient and seconds after backward's begin at which it is there; and when backward ends."""
    found: list[tuple[int, float]] = []
    output = module(batch).square().mean()
    began = time.perf_counter()
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda p: found.append((4 * p.numel(), time.perf_counter() - began))
        )
        for parameter in module.parameters()
    ]
    output.backward()
    end = time.perf_counter() - began
    for handle in handles:
        handle.remove()
    return found, end


def steps(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Seconds of a step, by how the module is wrapped; and of the plain one when its gradients are there."""
    torch.manual_seed(0)
    module, batch = {**MODELS, "deep": deep}[name]()
    models: dict[str, nn.Module] = {PLAIN: copy.deepcopy(module)}
    if arguments.link:
        models |= {f"{cap} MiB": TorchDdp(module, bucket_cap_mb=cap) for cap in CAPS}
    else:
        models["pycomm"] = pycomm.DistributedDataParallel(module)
    optimizers = {
        key: torch.optim.SGD(m.parameters(), 1e-6, foreach=True) for key, m in models.items()
    }
    found: dict[str, Any] = {key: [] for key in models}
    found["ready"] = []
    chance, order = random.Random(1), list(models)
    for repeat in range(arguments.repeats + 1):
        chance.shuffle(order)
        for key in order:
            dist.barrier()
            began = time.perf_counter()
            step(models[key], optimizers[key], batch)
            seconds = slowest(time.perf_counter() - began)
            if repeat:
                found[key].append(seconds)
        models[PLAIN].zero_grad()
        dist.barrier()
        found["ready"].append(ready_times(models[PLAIN], batch))
    return found


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank; rank 0 prints what all found."""
    torch.set_num_threads(1)
    store = dist.FileStore(arguments.store, arguments.ranks)
    backend = "gloo" if arguments.link else "pycomm"
    dist.init_process_group(backend, store=store, rank=arguments.rank, world_size=arguments.ranks)
    found: dict[str, Any] = {"seconds": collectives(arguments, reducer(arguments))}
    found["steps"] = {name: steps(arguments, name) for name in arguments.models}
    if arguments.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def measure(
    arguments: argparse.Namespace, ranks: int, megabits: int, sizes: list[int], models: list[str]
) -> dict[str, Any]:
    """Starts the ranks, and returns what rank 0 prints. Over shared memory: 0 megabits."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # What the link lets pass at once: 2 ms, in which a busy machine may look away.
        burst = max(64 * K, megabits * 250)
        prefixes = stack.enter_context(hosts(ranks, megabits, burst)) if megabits else [[]] * ranks
        words = ["--repeats", str(arguments.repeats), "--ranks", str(ranks)]
        words += ["--sizes", ",".join(map(str, sizes)), "--models", ",".join(models)]
        words += ["--store", str(Path(folder) / "store"), *(["--link"] if megabits else [])]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE} if megabits else None
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, __file__, *words, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank, prefix in enumerate(prefixes)
        ]
        for process in processes:
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=900)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes)
    found: dict[str, Any] = json.loads(outputs[0])
    return found


# ---- comparing ------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One measurement, and the prediction."""

    where: str
    what: str
    seconds: tuple[float, float, float]  # quartiles
    predicted: float
    off: float  # by which part the prediction is too high
    fitted: bool = False  # to this very measurement


def row_of(where: str, what: str, values: list[float], predicted: float) -> Row:
    """With what was predicted once, for all repeats."""
    found = quartiles(values)
    return Row(where, what, found, predicted, predicted / found[1] - 1)


def compare_regime(
    repeats: list[dict[str, float]], algorithm: str, fitted: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[list[Row], list[Link]]:
    """A link per repeat, in which all sizes were measured while the cores were as near or far; medians of those."""
    sizes = tuple(sorted((*fitted, *sizes)))
    whole = [row for row in repeats if all(str(size) in row for size in sizes)]
    if len(whole) < 2:
        raise pycomm.InvalidArgument("others had a core all the time")
    if sizes[0] > 4 * M:  # memory is as far from all cores, and too many share it for one repeat
        middle = {str(size): median(row[str(size)] for row in whole) for size in fitted}
        links = [fit_link([Sample(n, middle[str(n)], algorithm) for n in fitted], 2)] * len(whole)
    else:
        links = [fit_link([Sample(n, r[str(n)], algorithm) for n in fitted], 2) for r in whole]
    rows = []
    for size in sizes:
        times = [row[str(size)] for row in whole]
        predicted = [
            predict(Group(1, 2, link, link), size, algorithm=algorithm).seconds for link in links
        ]
        found = quartiles(times)
        off = median(p / t - 1 for p, t in zip(predicted, times, strict=True))
        what = f"{format_bytes(size)}, {algorithm}"
        rows.append(Row("shared memory", what, found, median(predicted), off, size in fitted))
    return rows, links


def compare_shared_memory(found: dict[str, Any]) -> list[Row]:
    """A link per regime; steps with the last one, as gradients come from memory. What others spoilt is left out."""
    rows = []
    links: list[Link] = []
    for algorithm, fitted, predicted in REGIMES:
        try:
            of_regime, links = compare_regime(found["seconds"], algorithm, fitted, predicted)
            rows += of_regime
        except pycomm.InvalidArgument as error:
            links = []
            smallest, largest = min(*fitted, *predicted), max(*fitted, *predicted)
            print(f"left out {format_bytes(smallest)} to {format_bytes(largest)}: {error}\n")
    for name, times in found["steps"].items() if links else ():
        total = sum(size for size, _ in times["ready"][0][0])
        average = median(
            predict(Group(1, 2, link, link), total, algorithm="two_shot").seconds for link in links
        )
        plain = median(times[PLAIN])
        predicted_step = plain + drain([Bucket(0.0, average)], 0.0, overlap=False).exposed
        what = f"step of {name}, plain {plain * 1e3:.0f} ms"
        rows.append(row_of("shared memory", what, times["pycomm"], predicted_step))
    return rows


def latency_of(seconds: float, size: int, megabits: int) -> float:
    """Of a message, from the smallest all-reduce of two ranks, which is two steps of half of it."""
    return max(0.0, (seconds - size / link_of(megabits, 0.0).bandwidth) / 2)


def link_of(megabits: int, latency: float) -> Link:
    """What tc leaves for data."""
    return Link(megabits * 125e3 * PAYLOAD, latency)


def compare_hosts(found: dict[str, Any], ranks: int, megabits: int, latency: float) -> list[Row]:
    """By the bandwidth that tc was given."""
    link = link_of(megabits, latency)
    group = Group(ranks, 1, link, link)
    where = f"{ranks} hosts, {megabits} Mbit/s"
    rows = []
    for size in found["seconds"][0]:
        one = predict(group, int(size), algorithm="ring")
        seconds = [repeat[size] for repeat in found["seconds"]]
        rows.append(row_of(where, f"{format_bytes(int(size))}, ring", seconds, one.seconds))
    rows.sort(key=lambda row: row.predicted)
    for name, times in found["steps"].items():
        for cap in CAPS:
            one_step = predict_ddp_step(times, cap * M, group)
            what = (
                f"step of {name}, buckets of {cap} MiB, plain {median(times[PLAIN]) * 1e3:.0f} ms"
            )
            rows.append(row_of(where, what, times[f"{cap} MiB"], one_step))
    return rows


def predict_ddp_step(times: dict[str, Any], bucket_bytes: int, group: Group) -> float:
    """The plain step, and what the buckets take after its backward."""
    backward = median(end for _, end in times["ready"])
    sizes = [size for size, _ in times["ready"][0][0]]
    ready = [median(one[0][i][1] for one in times["ready"]) for i in range(len(sizes))]
    buckets = []
    for members in buckets_of(sizes, bucket_bytes, min(M, bucket_bytes)):
        bytes = sum(sizes[i] for i in members)
        one = predict(group, bytes, algorithm="ring")
        buckets.append(Bucket(ready[members[-1]], one.seconds))
    return median(times[PLAIN]) + drain(buckets, backward).exposed


# ---- results --------------------------------------------------------------------------------------------------------


def markdown(rows: list[Row]) -> str:
    """A table."""
    lines = ["| where | what | measured, ms | predicted | off by |", "|---|---|---:|---:|---:|"]
    for row in rows:
        low, middle, high = (seconds * 1e3 for seconds in row.seconds)
        off = "*" if row.fitted else f"{row.off * 100:+.0f} %"
        lines.append(
            f"| {row.where} | {row.what} | {middle:.4g} [{low:.4g}-{high:.4g}] | "
            f"{row.predicted * 1e3:.4g} | {off} |"
        )
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """How many are how near."""
    offs = sorted(abs(row.off) for row in rows if not row.fitted)
    if not offs:
        return "0 of 0 predictions within 20 %"
    near = sum(off <= 0.2 for off in offs)
    return (
        f"{near} of {len(offs)} predictions within 20 %; median off by {median(offs) * 100:.0f} %, "
        f"most {offs[-1] * 100:.0f} %"
    )


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--links",
        type=numbers,
        default=[200, 1000],
        help="Mbit/s, with commas; '' for shared memory alone (200,1000)",
    )
    made.add_argument("--hosts", type=numbers, default=[2, 4], help="how many (2,4)")
    made.add_argument("--repeats", type=int, default=9, help="at least 2 (9)")
    made.add_argument(
        "--models",
        type=lambda text: [word for word in text.split(",") if word],
        default=["mlp", "gpt"],
        help=f"whose steps are measured over shared memory, of {', '.join(MODELS)} (mlp,gpt)",
    )
    made.add_argument("--most", type=int, default=2**31, help="no sizes above so many bytes")
    made.add_argument("--json", type=Path, help="write the comparisons")
    for name in ("--rank", "--ranks", "--store", "--sizes"):  # of a rank that this program starts
        kind: Any = {"--store": str, "--sizes": numbers}.get(name, int)
        made.add_argument(name, help=argparse.SUPPRESS, type=kind)
    made.add_argument("--link", action="store_true", help=argparse.SUPPRESS)
    return made


def run(arguments: argparse.Namespace) -> list[Row]:
    """All measurements, each printed as soon as it is there."""
    sizes = sorted({size for _, *both in REGIMES for some in both for size in some})
    found = measure(arguments, 2, 0, sizes, arguments.models)
    rows = compare_shared_memory(found)
    print(markdown(rows) + "\n", flush=True)
    latency = None
    for megabits in arguments.links:
        for ranks in arguments.hosts:
            between = [size for size in SIZES if size <= arguments.most]
            models = ["deep"] if ranks == 2 else []
            found = measure(arguments, ranks, megabits, between, models)
            smallest = median(repeat[str(SIZES[0])] for repeat in found["seconds"])
            is_first = latency is None
            if latency is None:
                latency = latency_of(smallest, SIZES[0], megabits)
            new = compare_hosts(found, ranks, megabits, latency)
            new[0].fitted = is_first
            print(markdown(new) + "\n", flush=True)
            rows += new
    return rows


def main() -> int:
    """Prints tables, and how near the predictions are."""
    made = parser()
    arguments = made.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return 0
    if arguments.repeats < 2 or min(arguments.links, default=1) < 1:
        made.error("at least 2 repeats, and positive links")
    if arguments.hosts[:1] != [2] or set(arguments.models) - set(MODELS):
        made.error(f"hosts begin with 2, and models are some of {', '.join(MODELS)}")
    began = read_clock(0)
    print(f"{cpu_model()}, torch {torch.__version__}, {arguments.repeats} repeats\n", flush=True)
    rows = run(arguments)
    print(verdict(rows))
    busy = others_share(began, read_clock(sum(os.times()[2:4])))
    print(f"others used {busy * 100:.0f} % of the machine")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
