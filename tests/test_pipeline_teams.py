"""Stages with replicas and shards of their own number train as the whole model does, and say what does not fit."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import G, attempt, refused, run, seeded, td
from torch import Tensor, nn
from torch.nn import functional

from pycomm.optim import clip_grad_norm_
from pycomm.pipeline import Pipeline, PipelineStage, Teams, pop, stash
from pycomm.pipeline.schedules import NAMES, build
from pycomm.pipeline.teams import share_of
from pycomm.tensor_parallel import gather_state_dict, parallelize
from pycomm.tensor_parallel.group import Group

mse = functional.mse_loss
WIDTH = 6
Sizes = list[tuple[int, int]]


class Block(nn.Module):
    """What a plan can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def blocks(count: int) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*(Block() for _ in range(count)))).double()


def data(rows: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    chance = G(seed)
    x, y = (torch.randn(rows, WIDTH, generator=chance, dtype=torch.float64) for _ in range(2))
    return x, y


def ranks_of(sizes: Sizes) -> int:
    return sum(replicas * shards for replicas, shards in sizes)


# ---- who exchanges what


@pytest.mark.parametrize("rows", [3, 4, 7, 12])
def test_every_row_travels_once(rows: int) -> None:
    """Whatever the two sizes: what a rank expects is what others send it, in the same order, and is all of its rows."""
    for sizes in product(product((1, 2, 3), (1, 2, 3)), repeat=2):
        n = ranks_of(list(sizes))
        everyone = [Teams(sizes, Group(None, None, rank, n)) for rank in range(n)]
        for source, goal in ((0, 1), (1, 0)):
            sent: dict[tuple[int, int], tuple[int, int]] = {}
            for teams in (one for one in everyone if one.team == source):
                begin, end = teams.share(rows)
                for peer, part in teams.pieces(goal, rows, sends=True):
                    assert (teams.group.rank, peer) not in sent
                    low, high = (0, end - begin) if part is None else (part.start, part.stop)
                    sent[teams.group.rank, peer] = (begin + low, begin + high)
            for teams in (one for one in everyone if one.team == goal):
                begin, end = teams.share(rows)
                at = begin
                for peer, part in teams.pieces(source, rows, sends=False):
                    low, high = (0, end - begin) if part is None else (part.start, part.stop)
                    assert sent.pop((peer, teams.group.rank)) == (begin + low, begin + high)
                    assert begin + low == at
                    at = begin + high
                assert at == end
            assert not sent


def test_shares_are_even_and_whole() -> None:
    for rows, replicas in product(range(9), range(1, 5)):
        ends = [share_of(rows, replicas, replica) for replica in range(replicas)]
        assert [begin for begin, _ in ends] == [0, *(end for _, end in ends)][:-1]
        assert ends[-1][1] == rows
        sizes = [end - begin for begin, end in ends]
        assert max(sizes) - min(sizes) <= 1


def test_places() -> None:
    """Ranks by team, then replica, then shard."""
    places = [
        (teams.team, teams.replica, teams.shard)
        for teams in (Teams([(2, 1), (1, 3), (2, 2)], Group(None, None, r, 9)) for r in range(9))
    ]
    last = [(2, replica, shard) for replica in range(2) for shard in range(2)]
    assert places == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2), *last]


# ---- gradients of the whole model


def own_pipeline(
    sizes: Sizes, name: str, microbatches: int, model: nn.Sequential, split: bool = True
) -> Pipeline:
    """With tensor parallel layers where there are shards."""
    teams = Teams(sizes)
    schedule = build(name, len(sizes), microbatches, 2 if name == "auto" else None)
    stages = []
    for index in schedule.stages_of(teams.team):
        part: nn.Module = model[index]
        if teams.shards > 1 and split:
            part = parallelize(part, {"up": "column", "down": "row"}, teams.shard_group)
        stages.append(PipelineStage(part, index, schedule.stages))
    return Pipeline(schedule, stages, loss_fn=mse, teams=teams)


def stages_in(name: str, teams: int) -> int:
    return build(name, teams, 4, 2 if name == "auto" else None).stages


def check_weights(pipeline: Pipeline, dense: nn.Sequential, tolerance: float = 1e-13) -> None:
    """This rank's, gathered from its shards, are the dense model's."""
    for index, stage in pipeline.stages.items():
        whole = gather_state_dict(stage.module)
        for name, weight in dense[index].state_dict().items():
            assert (whole[name] - weight).abs().max() <= tolerance, (index, name)


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize(
    "sizes",
    [
        [(2, 1), (1, 1)],
        [(1, 1), (2, 1)],
        [(1, 1), (1, 2)],
        [(1, 2), (1, 1)],
        [(2, 1), (1, 2)],
        [(1, 2), (2, 1)],
        [(3, 1), (1, 1)],
        [(2, 1)],
        [(1, 1), (2, 1), (1, 1)],
    ],
)
def test_every_schedule(sizes: Sizes, backend: str) -> None:
    """Steps with an optimizer, from rows that nothing divides; losses, outputs and every rank's weights."""

    def worker(rank: int, n: int) -> None:
        for name in NAMES:
            model = blocks(stages_in(name, len(sizes)))
            dense = copy.deepcopy(model)
            pipeline = own_pipeline(sizes, name, 3, model)
            parameters = [p for s in pipeline.stages.values() for p in s.module.parameters()]
            optimizer = torch.optim.SGD(parameters, 0.1)
            exact = torch.optim.SGD(dense.parameters(), 0.1)
            for rows in (11, 9, 11):
                x, y = data(rows, rows)
                expected = mse(dense(x), y)
                expected.backward()
                losses: list[Tensor] = []
                loss = pipeline.step(x, target=y, losses=losses, everywhere=True)
                assert loss is not None
                assert abs(loss - expected) < 1e-13
                has_last = pipeline.schedule.placement[-1] == pipeline.teams.team
                assert len(losses) == (3 if has_last else 0)
                norm = clip_grad_norm_(parameters, 0.5, pipeline_group=pipeline.teams)
                whole_norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
                assert abs(norm - whole_norm) < 1e-12
                for one in (optimizer, exact):
                    one.step()
                    one.zero_grad()
                check_weights(pipeline, dense)
            x, y = data(10)
            output, loss = pipeline.evaluate(x, target=y, everywhere=True)
            assert loss is not None
            assert abs(loss - mse(dense(x), y)) < 1e-13
            assert (output is not None) == has_last
            assert output is None or (output - dense(x)).abs().max() < 1e-13

    run(ranks_of(sizes), worker, backend=backend, wall=120)


def test_steps_add_up_and_no_sync() -> None:
    """Gradients of several steps, some without a sync, are the sum; the average is not taken twice."""

    def worker(rank: int, n: int) -> None:
        model = blocks(2)
        dense = copy.deepcopy(model)
        pipeline = own_pipeline([(2, 1), (1, 1)], "1f1b", 2, model)
        for number, rows in enumerate((5, 8, 6)):
            x, y = data(rows, rows)
            mse(dense(x), y).backward()
            if number == 1:
                with pipeline.no_sync():
                    pipeline.step(x, target=y)
            else:
                pipeline.step(x, target=y)
        for index, stage in pipeline.stages.items():
            for own, other in zip(
                stage.module.parameters(), dense[index].parameters(), strict=True
            ):
                assert own.grad is not None
                assert other.grad is not None
                assert (own.grad - other.grad).abs().max() < 1e-13

    run(3, worker)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The value, and a mask of its rows without a gradient."""
        stash("skip", x * 2)
        return self.linear(x), x[:, 0] > 0


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Goes on with the rows that the mask has."""
        return torch.where(mask[:, None], self.linear(x), x), mask


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Adds what was put aside."""
        out: Tensor = self.linear(x) + pop("skip") * mask[:, None]
        return out


def test_tuples_masks_and_skips_are_divided_too() -> None:
    def worker(rank: int, n: int) -> None:
        model = seeded(lambda: nn.ModuleList([Down(), Middle(), Up()])).double()
        dense = copy.deepcopy(model)
        x, y = data(7)
        value: Any = (x,)
        for part in dense:
            value = part(*value) if isinstance(value, tuple) else part(value)
        mse(value, y).backward()
        teams = Teams([(1, 1), (2, 1), (1, 1)])
        stage = PipelineStage(model[teams.team], teams.team, 3)
        pipeline = Pipeline("1f1b", stage, 3, loss_fn=mse, teams=teams)
        for _ in range(2):
            for p in model.parameters():
                p.grad = None
            pipeline.step(x, target=y)
            for own, other in zip(
                model[teams.team].parameters(), dense[teams.team].parameters(), strict=True
            ):
                assert own.grad is not None
                assert other.grad is not None
                assert (own.grad - other.grad).abs().max() < 1e-13

    run(4, worker)


class Tail(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """By a weight that the first stage has, too."""
        return x @ self.weight


def tied_pipeline(sizes: Sizes) -> tuple[Pipeline, nn.Parameter, nn.Linear, Tensor, Tensor]:
    teams = Teams(sizes)
    head = seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False)).double()
    letters = head.weight
    assert isinstance(letters, nn.Parameter)
    parts = [head, Tail(letters)]
    dense = copy.deepcopy(nn.Sequential(*parts))
    x, y = data(8)
    mse(dense(x), y).backward()
    own = parts[teams.team]
    if teams.team == 1:
        own = Tail(nn.Parameter(head.weight.detach().clone()))
    weight = own.weight
    assert isinstance(weight, nn.Parameter)
    stage = PipelineStage(own, teams.team, 2, tied={"letters": weight})
    first = dense[0]
    assert isinstance(first, nn.Linear)
    return Pipeline("1f1b", stage, 2, loss_fn=mse, teams=teams), weight, first, x, y


def test_tied_parameters_of_teams_alike() -> None:
    def worker(rank: int, n: int) -> None:
        pipeline, weight, first, x, y = tied_pipeline([(2, 1), (2, 1)])
        pipeline.step(x, target=y)
        assert weight.grad is not None
        assert first.weight.grad is not None
        assert (weight.grad - first.weight.grad).abs().max() < 1e-13
        norm = clip_grad_norm_(
            [weight],
            1e9,
            pipeline_group=pipeline.teams,
            counted_elsewhere=pipeline.counted_elsewhere,
        )
        assert abs(norm - first.weight.grad.norm()) < 1e-12

    run(4, worker)


def test_tied_parameters_of_other_teams_are_refused() -> None:
    def worker(rank: int, n: int) -> Any:
        pipeline, _, _, x, y = tied_pipeline([(2, 1), (1, 1)])
        return attempt(lambda: pipeline.step(x, target=y))

    assert refused(run(3, worker), "letters is tied", "same sizes")


# ---- what does not fit


def test_teams_that_cannot_be() -> None:
    def worker(rank: int, n: int) -> list[Any]:
        def both() -> None:
            teams = Teams([(1, 1), (1, 1)])
            stage = PipelineStage(nn.Linear(2, 2), teams.team, 2)
            Pipeline("1f1b", stage, 2, data_group=dist.group.WORLD, teams=teams)

        return [
            attempt(lambda: Teams([(2, 1), (1, 1)])),
            attempt(lambda: Teams([(0, 1), (2, 1)])),
            attempt(lambda: Teams([])),
            attempt(both),
        ]

    for results, words in zip(
        zip(*run(2, worker), strict=True),
        ("teams of 2 + 1 = 3", "1 replica and 1 shard", "1 replica and 1 shard", "of their own"),
        strict=True,
    ):
        assert refused(results, words)


@pytest.mark.parametrize("what", ["inputs", "targets", "rows"])
def test_one_batch_for_all_of_a_team(what: str) -> None:
    """A sampler that gives each replica its own rows would train on a part of each."""

    def worker(rank: int, n: int) -> Any:
        sizes = [(2, 1), (1, 1)] if what != "targets" else [(1, 1), (2, 1)]
        pipeline = own_pipeline(sizes, "1f1b", 2, blocks(2))
        x, y = data(8)
        others, more = data(8 if what != "rows" else 10, 4 + rank)
        if what == "targets":
            return attempt(lambda: pipeline.step(x, target=more))
        return attempt(lambda: pipeline.step(others if rank == 1 else x, target=y))

    assert refused(run(3, worker), "whole batch")


def test_too_few_rows_for_the_replicas() -> None:
    def worker(rank: int, n: int) -> Any:
        pipeline = own_pipeline([(2, 1), (1, 1)], "1f1b", 3, blocks(2))
        x, y = data(5)
        return attempt(lambda: pipeline.step(x, target=y))

    assert refused(run(3, worker), "5 rows does not give 2 replicas")


class Folding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Rows that are no more the batch's."""
        return x.reshape(-1, WIDTH // 2)


def test_values_that_have_no_rows_are_not_divided() -> None:
    def worker(rank: int, n: int) -> Any:
        teams = Teams([(2, 1), (1, 1)])
        own = nn.Sequential(nn.Linear(WIDTH, WIDTH), Folding()) if teams.team == 0 else nn.Tanh()
        stage = PipelineStage(own, teams.team, 2)
        pipeline = Pipeline("1f1b", stage, 2, loss_fn=lambda out, y: out.sum(), teams=teams)
        x, y = data(8)
        return attempt(lambda: pipeline.step(x.float(), target=y.float()))

    assert refused(run(3, worker), "first dimension must be the microbatch's")


class Half(nn.Module):
    def __init__(self, shard: int) -> None:
        super().__init__()
        self.shard, self.linear = shard, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of each shard its own, as sequence parallel layers have it."""
        out: Tensor = self.linear(x) + self.shard
        return out


def test_ends_that_differ_between_shards() -> None:
    def worker(rank: int, n: int) -> Any:
        teams = Teams([(1, 2), (1, 1)])
        own = seeded(lambda: Half(teams.shard)) if teams.team == 0 else nn.Tanh()
        stage = PipelineStage(own, teams.team, 2)
        pipeline = Pipeline("1f1b", stage, 2, loss_fn=mse, teams=teams)
        x, y = data(8)
        return attempt(lambda: pipeline.step(x.float(), target=y.float()))

    assert refused(run(3, worker), "differs between shards")


class Failing(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.linear = fails, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Raises in one replica."""
        if self.fails:
            raise ValueError("spoiled")
        out: Tensor = self.linear(x)
        return out


def test_a_replica_that_fails_while_the_other_one_waits_for_the_average() -> None:
    """Which is in the replicas' group, not in the pipeline's; the one that failed does not leave."""

    def worker(rank: int, n: int) -> Any:
        teams = Teams([(2, 1)])
        stage = PipelineStage(Failing(teams.replica == 1), 0, 1)
        pipeline = Pipeline("1f1b", stage, 2, loss_fn=mse, teams=teams)
        x, y = data(8)
        found = attempt(
            lambda: pipeline.step(x.float(), target=y.float()), (RuntimeError, ValueError)
        )
        store = dist.distributed_c10d._get_default_store()
        store.set(f"heard by {rank}", "")
        store.wait([f"heard by {other}" for other in range(n)], td(20))
        return found

    found = run(2, worker, wall=30)
    assert refused(found, "spoiled")
    assert [one.kinds[0] for one in found] == ["AbortedError", "ValueError"]


@pytest.mark.parametrize("team", [0, 1])
def test_a_replica_that_fails_is_named_on_all_ranks(team: int) -> None:
    """Also by the other replica, which waits in the average and not for a message."""

    def worker(rank: int, n: int) -> Any:
        teams = Teams([(2, 1), (2, 1)])
        stage = PipelineStage(Failing((teams.team, teams.replica) == (team, 1)), teams.team, 2)
        pipeline = Pipeline("1f1b", stage, 2, loss_fn=mse, teams=teams)
        x, y = data(8)
        return attempt(
            lambda: pipeline.step(x.float(), target=y.float()), (RuntimeError, ValueError)
        )

    found = run(4, worker, wall=30)
    assert refused(found, "spoiled")
    kinds = [one.kinds[0] for one in found]
    assert kinds.count("ValueError") == 1
    assert kinds.count("AbortedError") == 3
