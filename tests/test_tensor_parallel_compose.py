"""Parallel models within DDP and FSDP2, checkpointed, compiled, in 16 bits: still the unsharded model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import G, attempt, near, refused, run, seeded
from tensor_parallel_models import FusedBlock, Gpt, Llama, Mlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from whole_modules import check_equal, check_same_gradients, randn, whole

import pycomm
from pycomm import tensor_parallel as tp
from pycomm.tensor_parallel.layout import layout_of

PAIR = {"a": "column", "b": "row"}


def grid(dp: int, tp: int) -> DeviceMesh:
    """Of replicas and, within each, ranks that share layers."""
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of predicting the next one."""
    logits = model(ids)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained(model: nn.Module, ids: torch.Tensor, steps: int = 3) -> list[float]:
    """The losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- data parallel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "width"), [(2, 2), (2, 1), (1, 3)])
def test_ddp(dp: int, width: int) -> None:
    """Each replica sees a part of the batch; gradients, and weights after some steps, are those of one process."""

    def worker(rank: int, n: int) -> None:
        mesh = grid(dp, width)
        ids = torch.randint(0, 13, (4, 6), generator=G(1))
        own = ids.chunk(dp)[mesh.get_local_rank("dp")]
        for make, plan in ((Gpt, "gpt2"), (Llama, "llama")):
            plain: Any = seeded(make).double()
            inner = tp.parallelize(copy.deepcopy(plain), plan, mesh["tp"])
            model = pycomm.DistributedDataParallel(inner, process_group=mesh["dp"].get_group())
            loss_of(model, own).backward()
            loss_of(plain, ids).backward()
            check_same_gradients(inner, plain, 1e-9)
            model.zero_grad()
            plain.zero_grad()
            trained(model, own)
            trained(plain, ids)
            for name, value in tp.gather_state_dict(model).items():
                assert near(value, plain.state_dict()[name], 1e-8), name

    run(dp * width, worker, wall=60)


@pytest.mark.parametrize(("dp", "width"), [(2, 2), (1, 2)])
def test_fsdp(dp: int, width: int) -> None:
    """Parameters sharded again over replicas: the same training, and whole states out of it and into it."""

    def worker(rank: int, n: int) -> None:
        mesh = grid(dp, width)
        ids = torch.randint(0, 13, (4, 6), generator=G(1))
        own = ids.chunk(dp)[mesh.get_local_rank("dp")]
        plain: Any = seeded(Llama).double()
        model: Any = tp.parallelize(copy.deepcopy(plain), "llama", mesh["tp"])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        up = model.layers[0].mlp.up_proj
        assert layout_of(up.weight) == up.layouts["weight"]
        gathered = tp.gather_state_dict(model)
        assert list(gathered) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert torch.equal(gathered[name], value), name
        ours = torch.tensor(trained(model, own))
        dist.all_reduce(ours, dist.ReduceOp.AVG, mesh["dp"].get_group())
        assert near(ours, torch.tensor(trained(plain, ids)), 1e-6)
        gathered = tp.gather_state_dict(model)
        for name, value in plain.state_dict().items():
            assert near(gathered[name], value, 1e-8), name
        tp.load_full_state_dict(model, seeded(Llama).double().state_dict())
        for name, value in tp.gather_state_dict(model).items():
            assert torch.equal(value, seeded(Llama).double().state_dict()[name]), name
        assert refused([attempt(model.state_dict)], "gather_state_dict")

    run(dp * width, worker, wall=60)


def test_replicas_that_are_none() -> None:
    """DDP or FSDP2 over ranks that have different parts of a layer is refused; its parts may have the same shape."""

    def worker(rank: int, n: int) -> None:
        mesh = grid(2, 2)
        model = tp.parallelize(seeded(Mlp), PAIR, mesh["tp"])
        for group in (None, mesh["tp"].get_group()):
            for sync in (True, False):
                bad = attempt(
                    lambda g=group, s=sync: pycomm.DistributedDataParallel(  # type: ignore[misc]
                        model, process_group=g, init_sync=s
                    )
                )
                assert refused([bad], "a.weight", "tensor parallel", 'mesh["dp"]')
        whole = mesh._flatten("all")
        worse: Any = attempt(
            lambda: fully_shard(tp.parallelize(seeded(Mlp), PAIR, mesh["tp"]), mesh=whole)
        )
        assert refused([worse], "ColumnParallelLinear.weight", "FSDP", 'mesh["dp"]')

    run(4, worker)


# ---- checkpointed, compiled, in 16 bits -----------------------------------------------------------------------------


def test_activation_checkpointing() -> None:
    """Blocks run again in backward: the same gradients, with dropout the same masks."""

    class Checkpointed(Gpt):
        reentrant: bool | None = None

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[-1]))
            for block in self.h:
                run_again: Any = functools.partial(checkpoint, block, use_reentrant=self.reentrant)
                x = block(x) if self.reentrant is None else run_again(x)
            return self.lm_head(self.ln_f(x))

    def worker(rank: int, n: int) -> None:
        ids = torch.randint(0, 13, (2, 6), generator=G(1))
        for dropout in (0.0, 0.4):
            plain = seeded(lambda d=dropout: Checkpointed(dropout=d)).double()  # type: ignore[misc]
            once = tp.parallelize(copy.deepcopy(plain), "gpt2")
            torch.manual_seed(9)
            loss_of(once, ids).backward()
            for reentrant in (False, True):
                again: Any = tp.parallelize(copy.deepcopy(plain), "gpt2")
                again.reentrant = reentrant
                torch.manual_seed(9)
                loss_of(again, ids).backward()
                for ours, theirs in zip(again.parameters(), once.parameters(), strict=True):
                    assert ours.grad is not None
                    assert theirs.grad is not None
                    assert torch.equal(ours.grad, theirs.grad)
            if not dropout:
                loss_of(plain, ids).backward()
                check_same_gradients(once, plain, 1e-9)
            tp.check_random_states()

    run(2, worker, wall=60)


def test_compile() -> None:
    """Blocks and whole models are compiled around what communicates; one graph for all is refused in words."""

    def worker(rank: int, n: int) -> None:
        ids = torch.randint(0, 13, (2, 6), generator=G(1))
        plain = seeded(lambda: Gpt(blocks=1)).double()
        model: Any = tp.parallelize(copy.deepcopy(plain), "gpt2")
        for block in model.h:
            block.compile(backend="aot_eager")
        check_equal(model, plain, ids)
        check_equal(model, plain, ids)
        whole_model = torch.compile(tp.parallelize(seeded(Mlp).double(), PAIR), backend="aot_eager")
        check_equal_within(whole_model, seeded(Mlp).double(), randn(1, 3, 6))
        one_graph = torch.compile(
            tp.parallelize(seeded(Mlp), PAIR), backend="aot_eager", fullgraph=True
        )
        bad = attempt(lambda: one_graph(torch.ones(3, 6)), Exception)
        assert refused([bad], "pycomm communicates outside of compiled graphs")

    run(2, worker, wall=120)


def check_equal_within(compiled: Any, plain: nn.Module, x: torch.Tensor) -> None:
    """As check_equal, of the module that was compiled; and its state has the plain names."""
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = compiled(ours), plain(theirs)
    assert near(y, z, 1e-9)
    y.pow(2).sum().backward()
    z.pow(2).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert near(ours.grad, theirs.grad, 1e-9)
    check_same_gradients(compiled._orig_mod, plain, 1e-9)
    assert list(tp.gather_state_dict(compiled)) == list(plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    """Weights in 16 bits, and autocast: as near to float64 as the plain model, whatever the number of ranks."""

    def worker(rank: int, n: int) -> None:
        x = randn(1, 2, 5, 16)
        wide = seeded(lambda: FusedBlock(16, 4, 0.0)).double()
        wanted = wide(x)
        plan = {
            "attn.c_attn": "qkv",
            "attn.c_proj": "row",
            "mlp.c_fc": "column",
            "mlp.c_proj": "row",
        }

        def error(y: torch.Tensor) -> float:
            return float((y.double() - wanted).norm() / wanted.norm())

        plain = copy.deepcopy(wide).to(dtype)
        parallel = tp.parallelize(copy.deepcopy(plain), plan)
        theirs, ours = error(plain(x.to(dtype))), error(parallel(x.to(dtype)))
        assert 0 < ours < 2 * theirs
        parallel(x.to(dtype)).sum().backward()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in parallel.parameters())
        later = tp.parallelize(copy.deepcopy(wide), plan).to(dtype)
        assert torch.equal(later(x.to(dtype)), parallel(x.to(dtype)))
        if dtype is torch.float16:
            return
        single = copy.deepcopy(wide).float()
        mixed = tp.parallelize(copy.deepcopy(single), plan)
        with torch.autocast("cpu", dtype):
            y, z = mixed(x.float()), single(x.float())
        assert 0 < error(y) < 2 * error(z)
        y.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in mixed.parameters())

    for n in (2, 3):
        run(n, worker)


def test_frozen_layers() -> None:
    """Parameters that are frozen stay so; what is below them all needs no communication backward."""

    def worker(rank: int, n: int) -> None:
        plain: Any = seeded(Llama).double()
        for frozen in (plain.embed_tokens, plain.layers[0], plain.layers[1].input_layernorm):
            frozen.requires_grad_(False)
        parallel: Any = tp.parallelize(copy.deepcopy(plain), "llama")
        ids = torch.randint(0, 13, (2, 6), generator=G(1))
        check_equal(parallel, plain, ids)
        assert not parallel.layers[0].mlp.up_proj.weight.requires_grad
        loss = loss_of(parallel, ids)
        before = pycomm.stats()["kinds"]["all_reduce"]["operations"]
        loss.backward()
        # Of the output layer and of the MLP of the upper layer; its attention's input needs no gradient.
        assert pycomm.stats()["kinds"]["all_reduce"]["operations"] == before + 2

    run(2, worker)


def test_same_losses_at_any_degree() -> None:
    """A training with dropout outside only, at 1 to 4 ranks."""

    def worker(rank: int, n: int) -> list[float]:
        ids = torch.randint(0, 13, (4, 8), generator=G(1))
        model = tp.parallelize(seeded(lambda: Gpt(width=12, heads=6)).double(), "gpt2")
        losses = trained(model, ids, 5)
        assert losses[-1] < losses[0]
        assert torch.equal(whole(model.lm_head.weight), whole(model.wte.weight))  # type: ignore[arg-type, union-attr]
        return losses

    found = [run(n, worker)[0] for n in (1, 2, 3, 4)]
    assert all(near(torch.tensor(losses), torch.tensor(found[0]), 1e-9) for losses in found)
