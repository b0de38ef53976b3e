"""Train on scanned digits with ranks that may die: the others go on, and a new one may take the free seat.

    python examples/elastic_digits.py --ranks 3 --kill 1@60              the survivors go on
    python examples/elastic_digits.py --ranks 3 --kill 1@60 --rejoin     and a new rank joins at the epoch's end
    torchrun --nproc-per-node 3 --max-restarts 2 examples/elastic_digits.py --kill 1@60
                                                  all start again from the newest checkpoint

In the first two forms nothing is restarted. The survivors get PeerDiedError in whatever they do, call
``pycomm.shrink()``, and take over the state of the rank that is furthest, so no step is lost. Every step uses the same
samples whatever the number of ranks: each takes its share of the batch, and the mean is weighted by shares. So the
training, and its result, stay what they were.

Checkpoints (``pycomm.checkpoint``) are written at every epoch's end. They are complete or not there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import pycomm
from pycomm import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from starting import threads_per_rank
from train_digits import load_data, make_model

EPILOG = """exit codes:
  0  trained, and the test accuracy is at least --min-accuracy
  1  a check at the end failed, or a rank did that was not told to
  2  wrong arguments
"""
TIMEOUT = timedelta(seconds=30)


# ---- the training, whoever takes part


class Training:
    """A model in training: its state is `step`, the module, the optimizer and the schedule."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.train_set, self.test_set = load_data(args.seed)
        self.steps_per_epoch = len(self.train_set) // args.batch_size
        self.steps = self.steps_per_epoch * args.epochs
        self.module = make_model()
        self.optimizer = AdamW(self.module.parameters(), lr=args.lr)
        self.schedule = OneCycleLR(self.optimizer, args.lr, total_steps=self.steps)
        self.step = 0

    @property
    def is_at_epochs_end(self) -> bool:
        """Whether the step before was an epoch's last."""
        return self.step % self.steps_per_epoch == 0

    def share(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the batch of this step."""
        epoch, place = divmod(self.step, self.steps_per_epoch)
        order = torch.randperm(len(self.train_set), generator=torch.Generator().manual_seed(epoch))
        batch = order[place * self.args.batch_size :][: self.args.batch_size]
        images, labels = self.train_set[batch[dist.get_rank() :: dist.get_world_size()].tolist()]
        return images, labels

    def train_step(self, model: nn.Module) -> None:
        """One step. The gradient is the mean over the batch, however it is shared out."""
        images, labels = self.share()
        self.optimizer.zero_grad()
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum") / self.args.batch_size
        self.die_if_told()
        (loss * dist.get_world_size()).backward()  # DDP divides by the world size
        self.optimizer.step()
        self.schedule.step()
        self.step += 1

    def die_if_told(self) -> None:
        """For the demonstration."""
        rank, _, step = self.args.kill.partition("@")
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if (rank, step) == (os.environ["RANK"], str(self.step)) and first_life:
            os.kill(os.getpid(), signal.SIGKILL)

    @torch.inference_mode()
    def test_accuracy(self) -> float:
        """Over the whole test set, of which each rank takes a share."""
        images, labels = self.test_set[
            list(range(len(self.test_set)))[dist.get_rank() :: dist.get_world_size()]
        ]
        correct = (self.module(images).argmax(dim=1) == labels).sum().reshape(1)
        dist.all_reduce(correct)
        return correct.item() / len(self.test_set)

    # ---- state

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "step": self.step,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes over such a state."""
        self.step = state["step"]
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def agree(self) -> None:
        """Collective: all ranks take over the state of the rank that is furthest.

        When a rank dies, some others may have finished a step that the rest have not: their state is as good as any.
        """
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, torch.tensor([self.step]))
        furthest = max(range(len(steps)), key=lambda rank: (steps[rank].item(), -rank))
        box = [self.state() if dist.get_rank() == furthest else None]
        dist.broadcast_object_list(box, src=furthest)
        if dist.get_rank() != furthest:
            assert box[0] is not None
            self.load(box[0])


# ---- the life of a rank


@dataclass
class Seat:
    """Where this process stands in the job; ranks change, the process stays."""

    store: dist.Store | None  # where newcomers ask for a seat; None under torchrun
    full: int = 0  # ranks below which the end of an epoch waits for a newcomer
    generation: int = 0
    events: list[str] = field(default_factory=list)

    def note(self, event: str) -> None:
        """Tells what happened; rank 0 speaks for all."""
        self.events.append(event)
        if dist.get_rank() == 0:
            print(event, flush=True)

    def join(self, generation: int, rank: int, world_size: int) -> None:
        """Collective: the default group of the present ranks."""
        assert self.store is not None
        self.generation = generation
        dist.init_process_group(
            "pycomm",
            store=dist.PrefixStore(f"generation {generation}", self.store),
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )

    def ask(self) -> None:
        """A newcomer's way in: waits for the others to give it a seat."""
        assert self.store is not None
        ticket = self.store.add("asked", 1)
        self.store.wait([f"seat {ticket}"], timedelta(minutes=5))
        self.join(*map(int, self.store.get(f"seat {ticket}").split()))

    def tickets_after(self, admitted: int, world_size: int) -> int:
        """How many have asked. A demonstration's newcomer is waited for: a training of seconds would be over."""
        assert self.store is not None
        expected = admitted + (world_size < self.full)
        deadline = time.monotonic() + 60
        while (asked := self.store.add("asked", 0)) < expected and time.monotonic() < deadline:
            time.sleep(0.05)
        return asked

    def admit(self) -> bool:
        """Collective: gives seats to those who ask. Whether the group has changed."""
        assert self.store is not None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tickets = torch.zeros(2, dtype=torch.int64)  # admitted before, and now
        if rank == 0:
            tickets[0] = self.store.add("admitted", 0)
            tickets[1] = self.tickets_after(int(tickets[0]), world_size)
        dist.broadcast(tickets, 0)
        before, now = tickets.tolist()
        if before == now:
            return False
        larger = world_size + now - before
        dist.destroy_process_group()
        if rank == 0:
            self.store.add("admitted", now - before)
            for place, ticket in enumerate(range(before + 1, now + 1)):
                seat = f"{self.generation + 1} {world_size + place} {larger}"
                self.store.set(f"seat {ticket}", seat)
        self.join(self.generation + 1, rank, larger)
        self.note(f"{now - before} rank(s) joined: {larger} go on")
        return True


def train(training: Training, seat: Seat) -> float:
    """Trains to the end, whatever happens; returns the test accuracy."""
    training.agree()
    model = pycomm.DistributedDataParallel(training.module)
    accuracy = 0.0
    while training.step < training.steps:
        try:
            training.train_step(model)
            if training.is_at_epochs_end:
                accuracy = end_epoch(training, seat)
                model = pycomm.DistributedDataParallel(training.module)
        except pycomm.Error as error:
            if seat.store is None:
                raise  # torchrun starts everybody again
            recover(training, seat, error)
            model = pycomm.DistributedDataParallel(training.module)
    return accuracy


def recover(training: Training, seat: Seat, error: pycomm.Error) -> None:
    """Collective over the survivors: they go on from the last step that one of them has finished."""
    began = time.perf_counter()
    mine = training.step
    pycomm.shrink()
    training.agree()
    seat.note(
        f"step {mine}: {type(error).__name__}; {dist.get_world_size()} ranks go on at step {training.step} after "
        f"{time.perf_counter() - began:.2f} s"
    )


def end_epoch(training: Training, seat: Seat) -> float:
    """Collective: test, save, and let newcomers in."""
    accuracy = training.test_accuracy()
    epoch = training.step // training.steps_per_epoch
    checkpoint.save(training.state(), training.args.out / "checkpoints", training.step)
    seat.note(f"epoch {epoch:3}  test accuracy {accuracy:7.2%}  {dist.get_world_size()} ranks")
    if seat.store is not None and seat.admit():
        training.agree()
    return accuracy


def run_rank(args: argparse.Namespace) -> int:
    """Be one rank, started by torchrun or by start_ranks()."""
    torch.set_num_threads(threads_per_rank(args.ranks))
    training = Training(args)
    address = os.environ.get("ELASTIC_STORE")
    if address is None:
        dist.init_process_group("pycomm", timeout=TIMEOUT)
        seat = Seat(None)
        resume(training, args.out / "checkpoints", seat)
    else:
        host, _, port = address.partition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
        seat = Seat(store, args.ranks if args.rejoin else 0)
        if os.environ["RANK"] == "newcomer":
            seat.ask()
        else:
            seat.join(0, int(os.environ["RANK"]), args.ranks)
    accuracy = train(training, seat)
    if dist.get_rank() == 0:
        report(training, seat, accuracy)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if accuracy >= args.min_accuracy else 1


def resume(training: Training, folder: Path, seat: Seat) -> None:
    """Collective: goes on from the newest checkpoint, if there is one."""
    newest = [checkpoint.latest(folder)]
    dist.broadcast_object_list(newest, src=0)
    if newest[0] is None:
        return
    training.load(load_state(training, folder, newest[0]))
    seat.note(f"goes on at step {training.step} from {folder}")


def load_state(training: Training, folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds; it is read into a state of the same form."""
    fill_optimizer(training.optimizer)
    state = training.state()
    checkpoint.load(state, folder, step)
    return state


def fill_optimizer(optimizer: AdamW) -> None:
    """Gives a new optimizer the state that a step would: a place for what is loaded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def report(training: Training, seat: Seat, accuracy: float) -> None:
    """Writes metrics.json."""
    out: Path = training.args.out
    metrics = {
        "test_accuracy": accuracy,
        "steps": training.step,
        "ranks_at_the_end": dist.get_world_size(),
        "events": seat.events,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"test accuracy {accuracy:.2%}; wrote {out}/metrics.json", flush=True)


# ---- the start of all ranks, without torchrun


def start_ranks(args: argparse.Namespace) -> int:
    """Starts the ranks and serves the Store where newcomers ask; it does nothing else."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    doomed = args.kill.partition("@")[0]
    shutil.rmtree(args.out / "checkpoints", ignore_errors=True)  # of an earlier run

    def start(rank: str) -> subprocess.Popen[bytes]:
        names = {"RANK": rank, "ELASTIC_STORE": f"127.0.0.1:{store.port}"}
        return subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]], env={**os.environ, **names}
        )

    ranks = {str(rank): start(str(rank)) for rank in range(args.ranks)}
    codes: dict[str, int] = {}
    while ranks:
        for name, process in list(ranks.items()):
            if process.poll() is None:
                continue
            codes[name] = process.returncode
            del ranks[name]
            if name == doomed and args.rejoin:
                ranks["newcomer"] = start("newcomer")
        time.sleep(0.05)
    bad = [name for name, code in codes.items() if code != 0 and name != doomed]
    if bad:
        print(f"FAILED: rank {', '.join(bad)} ended badly: {codes}", file=sys.stderr)
    return 1 if bad else 0


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=3, help="processes at the start (3); torchrun's number counts")
    add("--kill", default="", metavar="RANK@STEP", help="kill this rank in the midst of this step")
    add("--rejoin", action="store_true", help="start another process in its place")
    add("--epochs", type=int, default=8, help="passes over the training set (8)")
    add("--batch-size", type=int, default=96, help="samples per step over all ranks (96)")
    add("--lr", type=float, default=4e-3, help="peak learning rate of AdamW (0.004)")
    add("--seed", type=int, default=0, help="of the split, the order and the weights (0)")
    add("--min-accuracy", type=float, default=0.95, help="fraction of the test set (0.95)")
    add("--out", type=Path, default=Path("runs/elastic"), help="folder to write to (runs/elastic)")
    args = parser.parse_args()
    if args.ranks < 1 or (args.kill and not all(p.isdigit() for p in args.kill.split("@"))):
        parser.error("--ranks counts from 1, and --kill is like 1@60")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> int:
    """Starts the ranks, or is one of them."""
    args = parse_arguments()
    return run_rank(args) if "RANK" in os.environ else start_ranks(args)


if __name__ == "__main__":
    sys.exit(main())
