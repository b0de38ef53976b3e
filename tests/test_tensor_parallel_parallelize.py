"""parallelize(): ordinary models split by names equal the unsharded ones; plans that do not fit change nothing."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import G, attempt, near, refused, run, seeded
from tensor_parallel_models import Conv1D, GatedMlp, Gpt, GroupedAttention, Llama, Mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from whole_modules import (
    check_equal,
    check_same_gradients,
    check_same_parameters,
    randn,
    whole,
    whole_grad,
)

import pycomm
from pycomm import tensor_parallel as tp
from pycomm.errors import InvalidArgument, MismatchError
from pycomm.tensor_parallel import plans

WORLDS = [1, 2, 3, 4]
PAIR = {"a": "column", "b": "row"}


def made(make: Any, plan: Any, group: Any = None, **options: Any) -> tuple[Any, Any]:
    """The module from seed 0 in float64, parallel and as it was."""
    plain = seeded(make).double()
    return tp.parallelize(copy.deepcopy(plain), plan, group, **options), plain


def integers(module: nn.Module) -> nn.Module:
    """With parameters of small integers, so that sums are exact in any order."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=G(index)))
    return module


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
def test_models(n: int) -> None:
    """By ready plans: fused and grouped heads, fewer heads of keys than ranks, tied weights, sizes nothing divides."""

    def worker(rank: int, n: int) -> None:
        ids = torch.randint(0, 13, (2, 5), generator=G(1))
        models: list[tuple[Any, str]] = [
            (Gpt, "gpt2"),
            (lambda: Gpt(words=11, width=15, heads=5), "gpt2"),
            (Llama, "llama"),
            (lambda: Llama(heads=6, kv=3), "llama"),
            (lambda: Llama(heads=6, kv=1), "llama"),
            (lambda: Llama(heads=4, kv=4), "llama"),
            (
                lambda: Llama(width=20, heads=10, kv=2),
                "llama",
            ),  # heads of a rank need keys unevenly
        ]
        for make, plan in models:
            parallel, plain = made(make, plan)
            check_same_parameters(parallel, plain)
            check_equal(parallel, plain, ids.remainder(11))
            gathered = tp.gather_state_dict(parallel)
            assert list(gathered) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert torch.equal(gathered[name], value), name
            if plan == "gpt2":
                assert parallel.lm_head.weight is parallel.wte.weight
                attention = parallel.h[0].attn
                assert attention.split_size == attention.num_heads * attention.head_dim

    run(n, worker, wall=90)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sequence_parallel_models(n: int) -> None:
    """By ready plans: norms and what lies between have a part of the sequence, also an uneven one; also in chunks."""

    def worker(rank: int, n: int) -> None:
        def fewer_keys() -> nn.Module:
            return Llama(heads=6, kv=1)

        for make, plan in ((Gpt, plans.gpt2), (Llama, plans.llama), (fewer_keys, plans.llama)):
            for length, chunks in ((6, 1), (7, 1), (12, 2)):
                options: Any = {"overlap_chunks": chunks, "uneven_sequence": length % n != 0}
                parallel, plain = made(make, plan(sequence_parallel=True), **options)
                ids = torch.randint(0, 13, (2, length), generator=G(1))
                check_equal(parallel, plain, ids)
        if n > 1:
            parallel, _ = made(Gpt, plans.gpt2(sequence_parallel=True))
            bad = attempt(lambda: parallel(torch.zeros(1, 7, dtype=torch.int64)), InvalidArgument)
            assert refused([bad], f"not divisible by {n} ranks", "uneven_sequence")

    run(n, worker, wall=60)


@pytest.mark.parametrize("n", WORLDS)
def test_exactly(n: int) -> None:
    """With integers, outputs and gradients of linear layers, embeddings and convolutions are equal, also in 16 bits."""

    def worker(rank: int, n: int) -> None:
        layers: list[tuple[Any, Any, Any]] = [
            (
                lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 9)),
                {"0": "column", "2": "row", "3": "vocab"},
                lambda: torch.randint(-2, 3, (4, 5), generator=G(7)),
            ),
            (
                lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 4)),
                {"0": "vocab", "1": "column", "2": "row"},
                lambda: torch.randint(0, 9, (2, 3), generator=G(7)),
            ),
            (
                lambda: nn.Sequential(
                    nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 5, 2)
                ),
                {"0": "column", "2": "groups", "3": "row"},
                lambda: torch.randint(-2, 3, (2, 3, 5, 5), generator=G(7)),
            ),
        ]
        for make, plan, data in layers:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                plain: Any = integers(seeded(make)).to(dtype)
                parallel = tp.parallelize(copy.deepcopy(plain), plan)
                given = data()
                x, q = given, given
                if not isinstance(plain[0], nn.Embedding):
                    x, q = (given.to(dtype).requires_grad_() for _ in range(2))
                ours, theirs = parallel(x), plain(q)
                assert torch.equal(ours, theirs)
                if dtype is torch.bfloat16:
                    continue  # gradients are larger than its integers
                ours.sum().backward()
                theirs.sum().backward()
                if x.grad is not None and q.grad is not None:
                    assert torch.equal(x.grad, q.grad)
                for own, wanted in zip(parallel.parameters(), plain.parameters(), strict=True):
                    grad = whole_grad(own)
                    assert grad is not None
                    assert wanted.grad is not None
                    assert torch.equal(grad, wanted.grad)

    run(n, worker, wall=60)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_encoder(n: int) -> None:
    """Its attention and its MLP, or one of them; also in eval(), where torch would compute with the weights itself."""

    def worker(rank: int, n: int) -> None:
        def make() -> nn.Module:
            layer = nn.TransformerEncoderLayer(12, 6, 16, 0.0, batch_first=True)
            return nn.TransformerEncoder(layer, 2)

        mlp = {"*.linear1": "column", "*.linear2": "row"}
        x = randn(1, 2, 4, 12)
        padding = torch.tensor([[False] * 4, [False, False, True, True]])
        for plan in (mlp, {"*.self_attn": "attention"}, {**mlp, "*.self_attn": "attention"}):
            parallel, plain = made(make, plan)
            check_same_parameters(parallel, plain)
            check_equal(parallel, plain, x)
            with torch.no_grad():
                parallel.eval(), plain.eval()
                assert near(parallel(x), plain(x), 1e-9)
                ours, theirs = (m(x, src_key_padding_mask=padding) for m in (parallel, plain))
                assert near(ours[~padding], theirs[~padding], 1e-9)

    run(n, worker, wall=60)


def test_transformers_models() -> None:
    """The real ones, whole and in sequence parallel, their loss included."""
    pytest.importorskip("transformers")

    def worker(rank: int, n: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        def gpt2() -> nn.Module:
            sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}
            none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=1))

        def llama(heads: int, kv: int, tied: bool) -> nn.Module:
            sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 37}
            return LlamaForCausalLM(
                LlamaConfig(
                    **sizes,
                    num_hidden_layers=2,
                    num_attention_heads=heads,
                    num_key_value_heads=kv,
                    tie_word_embeddings=tied,
                )
            )

        models: list[tuple[Any, Any]] = [
            (gpt2, plans.gpt2),
            (lambda: llama(6, 2, False), plans.llama),
            (lambda: llama(4, 1, True), plans.llama),
        ]
        ids = torch.randint(0, 61, (2, 12), generator=G(1))
        for make, plan in models:
            for sequence in (False, True):
                parallel, plain = made(make, plan(sequence_parallel=sequence))
                ours, theirs = parallel(ids, labels=ids), plain(ids, labels=ids)
                assert near(ours.logits, theirs.logits, 1e-9)
                ours.loss.backward()
                theirs.loss.backward()
                check_same_gradients(parallel, plain, 1e-8)
                split, _ = made(make, plan(sequence_parallel=sequence, gather_logits=False))
                for items in ({}, {"num_items_in_batch": torch.tensor(7)}):
                    of_split, of_plain = (m(ids, labels=ids, **items).loss for m in (split, plain))
                    assert near(of_split, of_plain, 1e-5)
                if sequence:
                    continue
                words = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
                told = [m.eval().generate(ids[:, :4], **words) for m in (parallel, plain)]
                assert torch.equal(*told)

    run(3, worker, wall=120)


# ---- the cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_bias_is_added_once(n: int) -> None:
    """Case TP-01: contiguous and transposed inputs; the bias's gradient is the same on all ranks."""

    def worker(rank: int, n: int) -> None:
        layers = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))  # noqa: E731
        parallel, plain = made(layers, {"0": "column", "2": "row"})
        for x0 in (randn(3, 5, 6), randn(4, 6, 5).t()):
            x = x0.clone(memory_format=torch.preserve_format).requires_grad_()
            q = x0.clone().requires_grad_()
            parallel.zero_grad()
            plain.zero_grad()
            a, b = parallel(x), plain(q)
            a.pow(2).sum().backward()
            b.pow(2).sum().backward()
            assert near(a, b, 1e-9)
            assert x.grad is not None
            assert q.grad is not None
            assert near(x.grad, q.grad, 1e-9)
            check_same_gradients(parallel, plain, 1e-9)
            everyone = [torch.empty_like(parallel[2].bias.grad) for _ in range(n)]
            dist.all_gather(everyone, parallel[2].bias.grad)
            assert all(torch.equal(other, everyone[0]) for other in everyone)

    run(n, worker)


@pytest.mark.parametrize("n", WORLDS)
def test_initial_weights(n: int) -> None:
    """Case TP-03: the unsharded model's bit for bit, also drawn anew; nothing is drawn by splitting."""

    def worker(rank: int, n: int) -> bytes:
        layers = lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Embedding(9, 4))  # noqa: E731
        plain = seeded(layers)
        state = torch.get_rng_state()
        plan = {"0": "column", "1": "row", "2": "vocab"}
        parallel: Any = tp.parallelize(copy.deepcopy(plain), plan)
        assert torch.equal(torch.get_rng_state(), state)
        check_same_parameters(parallel, plain)
        each = len(parallel[0].weight)
        gathered = whole(parallel[0].weight)
        assert n == 1 or not torch.equal(gathered[:each], gathered[-each:])
        torch.manual_seed(3)
        for layer in parallel:
            layer.reset_parameters()
        torch.manual_seed(3)
        for layer in plain:
            layer.reset_parameters()  # type: ignore[operator]
        check_same_parameters(parallel, plain)
        return torch.get_rng_state().numpy().tobytes()

    assert len(set(run(n, worker))) == 1


@pytest.mark.parametrize("n", [2, 4])
def test_what_the_gradient_norm_counts(n: int) -> None:
    """Case TP-05: split parameters know it, whole ones are whole on all ranks, and their gradients the same."""

    def worker(rank: int, n: int) -> None:
        parallel, plain = made(Mlp, PAIR)
        x = randn(3, 5, 6)
        parallel(x).pow(3).sum().backward()
        plain(x).pow(3).sum().backward()
        check_same_gradients(parallel, plain, 1e-9)
        from pycomm.tensor_parallel.layout import layout_of

        split = {name for name, p in parallel.named_parameters() if layout_of(p) is not None}
        assert split == {"a.weight", "a.bias", "b.weight"}
        squares = torch.zeros(2, dtype=torch.float64)
        for name, parameter in parallel.named_parameters():
            squares[int(name in split)] += parameter.grad.square().sum()
        dist.all_reduce(squares[1])
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert near(squares.sum().sqrt(), wanted, 1e-9)

    run(n, worker)


# ---- bad plans ------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """What plans go wrong at."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.words = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.memory = nn.LSTM(4, 4)
        self.image = nn.Conv2d(1, 1, 2)
        self.torchs = nn.MultiheadAttention(4, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.hooked = nn.Linear(4, 4)
        self.hooked.register_forward_hook(lambda module, args, output: output * 2)
        self.own = OwnLinear(4, 4)
        self.nameless = Nameless()
        self.grouped = GroupedAttention(8, 4, 2)
        self.fused = Fused()
        self.mlp = GatedMlp(4, 6)
        self.one = One()


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Nameless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = 2
        self.q_proj = nn.Linear(4, 4)
        self.o_proj = nn.Linear(4, 4)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = 1
        self.qkv = nn.Linear(4, 12)
        self.proj = nn.Linear(4, 4)


class Fused(nn.Module):
    """Queries, keys and values may lie one after the other, or head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 2
        self.query_key_value = nn.Linear(4, 12)
        self.dense = nn.Linear(4, 4)


BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"upp": "column"}, ('"upp": matches no module', "near: up")),
    ({"*.q_porj": "column"}, ("*.q_porj", "matches no module", "nameless.q_proj")),
    ({"up": "column", "down": "row", "x|y": "row"}, ('"x|y": matches no module',)),
    ({"up": "columm"}, ("columm", '"column": each rank', '"whole"')),
    ({"up": "column", "u*": "row", "down": "row"}, ('is "column" by "up", but "row" by "u*"',)),
    ({"up": "column"}, ('"up": leaves its outputs split', "gather_output=True")),
    ({"down": "row"}, ('"down": takes each rank', "input_is_parallel=False")),
    ({"memory": "column"}, ("LSTM has no parallel form", "nn.Linear")),
    ({"mlp": "row"}, ("GatedMlp has no parallel form",)),
    ({"words": "column"}, ('Embedding has no parallel form "column"',)),
    ({"up": "attention"}, ("Linear has no parallel form", "nn.MultiheadAttention")),
    ({"own": tp.Style("column", gather_output=True)}, ("OwnLinear has no parallel form",)),
    ({"words": "vocab"}, ('"head.weight": is tied to "words.weight"',)),
    ({"words": tp.Style("vocab", pad_to=8), "head": "vocab"}, ("tied", "another way")),
    ({"torchs.out_proj": tp.Style("row", input_is_parallel=True)}, ("read by nn.MultiheadAttention",)),
    ({"torchs": "attention", "torchs.out_proj": "row"}, ('is within "torchs"',)),
    ({"normed": tp.Style("column", gather_output=True)}, ("parametrized",)),
    ({"hooked": tp.Style("column", gather_output=True)}, ("hooks",)),
    ({"image": tp.Style("column")}, ("leaves its outputs split",)),
    ({"image": tp.Style("column", gather_output=True)}, ("too small for 2 ranks",)),
    ({"up": tp.Style("column", gather=True), "down": "row"}, ("options", "gather")),
    ({"nameless.q_proj": "column", "nameless.o_proj": "row"}, ("num_heads", "unit=<width")),
    ({"grouped.q_proj": "column", "grouped.o_proj": "row"}, ('"grouped.k_proj" and 1 more: is left out',)),
    ({"fused.query_key_value": "column", "fused.dense": "row"}, ("12 outputs", '"qkv"', "fused.query_key_value")),
    ({"one.qkv": "qkv", "one.proj": "row"}, ('"one": has 1 heads, fewer than 2 ranks',)),
    ({"mlp": "shared"}, ("no parameters of its own; plan the parts",)),
    ({"words": ColwiseParallel()}, ("RowwiseParallel(input_layouts=Replicate())",)),
    ({"words": RowwiseParallel(), "head": "vocab"}, ("input_layouts=Replicate()",)),
    ({"up": ColwiseParallel(use_local_output=False), "down": "row"}, ("DTensor",)),
    ({"up": ColwiseParallel(output_layouts=Shard(0))}, ("Shard(dim=0)",)),
    ({"*.q_proj": ColwiseParallel(), "*.*.o_proj": RowwiseParallel()}, ('"*.*.o_proj": matches no',)),
]  # fmt: skip


def test_bad_plans() -> None:
    """Every problem of a plan is told, on all ranks, and the module is as it was."""

    def worker(rank: int, n: int) -> None:
        model = seeded(Odd)
        structure, values = str(model), {k: v.clone() for k, v in model.state_dict().items()}
        objects = [id(m) for m in model.modules()] + [id(p) for p in model.parameters()]
        numbers = [dict(vars(m)) for m in (model.grouped, model.fused)]
        for plan, words in BAD:
            bad = attempt(functools.partial(tp.parallelize, model, plan), InvalidArgument)
            assert refused([bad], f"rank {rank} of 2", "as it was", *words), (plan, bad)
            assert str(model) == structure
            assert [id(m) for m in model.modules()] + [id(p) for p in model.parameters()] == objects
            assert [dict(vars(m)) for m in (model.grouped, model.fused)] == numbers
        several = attempt(lambda: tp.parallelize(model, {"upp": "row", "memory": "row"}))
        assert refused([several], "upp", "LSTM")
        for name, value in model.state_dict().items():
            assert torch.equal(value, values[name])
        assert refused([attempt(lambda: tp.parallelize(model, "gpt5"))], "gpt5", "gpt2, llama")
        model.up.weight.grad = torch.ones(8, 4)
        lost = attempt(lambda: tp.parallelize(model, {"up": "column", "down": "row"}))
        assert refused([lost], "zero_grad")
        wrapped = pycomm.DistributedDataParallel(nn.Linear(2, 2))
        assert refused([attempt(lambda: tp.parallelize(wrapped, {"module": "row"}))], "first")
        twice = tp.parallelize(seeded(Mlp), PAIR)
        assert refused([attempt(lambda: tp.parallelize(twice, PAIR))], "parallel already")

    run(2, worker)


def test_ranks_that_differ() -> None:
    """In their plans, modules, values or luck: all hear of it, and nothing is changed."""

    def worker(rank: int, n: int) -> Any:
        last = rank == n - 1
        found = []
        cases: list[tuple[Any, Any]] = [
            (lambda: Mlp(), {"a": "column", "b": "row"} if last else {"a": tp.Style("column", gather_output=True)}),
            (lambda: Mlp(out=5 if last else 4), PAIR),
            (lambda: Mlp(), {**PAIR, "c": "row"} if last else PAIR),
        ]  # fmt: skip
        for make, plan in cases:
            model = seeded(make)
            before = str(model)
            found.append(attempt(functools.partial(tp.parallelize, model, plan)))
            assert str(model) == before
        model = seeded(Mlp)
        with torch.no_grad():
            model.b.bias.add_(float(last))
        found.append(attempt(lambda: tp.parallelize(model, PAIR), MismatchError))
        assert isinstance(model.b, nn.Linear)
        tp.parallelize(model, PAIR, check=False)
        return found

    found: Any = zip(*run(3, worker), strict=True)
    plans_differ, modules_differ, one_is_bad, values_differ = found
    assert refused(plans_differ, "rank 2", "not that of rank 0")
    assert refused(modules_differ, "rank 2", "not that of rank 0")
    assert refused(one_is_bad[:2], "rank 2 cannot")
    assert refused(one_is_bad[2:], '"c": matches no module')
    assert refused(values_differ, "b.bias of rank 2", "other values")


# ---- what is named and how ------------------------------------------------------------------------------------------


def test_groups() -> None:
    """A dimension of a mesh, a process group, the default group; a mesh of several dimensions is refused."""

    def worker(rank: int, n: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for group in (mesh["tp"], mesh["tp"].get_group(), None):
            parallel, plain = made(Mlp, PAIR, group)
            assert parallel.a.weight.shape == ((4, 6) if group is not None else (2, 6))
            check_equal(parallel, plain, randn(3, 5, 6))
        bad = attempt(lambda: tp.parallelize(Mlp(), PAIR, mesh), InvalidArgument)
        assert refused([bad], "2 dimensions", 'mesh["tp"]')

    run(4, worker)


def test_modules_used_twice_and_the_module_itself() -> None:
    """A layer under two names is one afterwards, too; "" is the module itself."""

    def worker(rank: int, n: int) -> None:
        def twice() -> nn.Module:
            first, second = nn.Linear(4, 6), nn.Linear(6, 4)
            return nn.Sequential(first, nn.Tanh(), second, first, nn.Tanh(), second)

        parallel, plain = made(twice, {"0": "column", "5": "row"})
        assert parallel[0] is parallel[3]
        assert isinstance(parallel[2], tp.RowParallelLinear)
        check_equal(parallel, plain, randn(1, 3, 4))
        alone, plain = made(lambda: nn.Linear(4, 5), tp.Style("column", gather_output=True))
        assert isinstance(alone, tp.ColumnParallelLinear)
        check_equal(alone, plain, randn(1, 3, 4))
        unnamed, plain = made(Nameless, {"q_proj": tp.Style("column", unit=2), "o_proj": "row"})
        assert unnamed.q_proj.weight.shape == (2, 4)

    run(2, worker)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_plans(n: int) -> None:
    """Column, row, sequence parallel and prepared inputs, as torch's tensor parallel tutorial has them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 6)
            self.norm = nn.LayerNorm(6)
            self.mlp = GatedMlp(6, 8)
            self.last = nn.RMSNorm(6)
            self.head = nn.Linear(6, 9)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            x = x + self.mlp(self.norm(x))
            return self.head(self.last(x))

    def worker(rank: int, n: int) -> None:
        gathered = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan = {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "mlp": gathered,
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.u*_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            "last": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        ids = torch.randint(0, 9, (2, 2 * n), generator=G(5))
        check_equal(*made(Block, plan), ids)
        longer = torch.randint(0, 9, (2, 2 * n + 1), generator=G(5))
        check_equal(*made(Block, plan, uneven_sequence=True), longer)
        uneven = attempt(lambda: made(Block, plan)[0](longer), InvalidArgument)
        assert refused([uneven], "not divisible", "uneven_sequence")
        plain_plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1)),
        }
        out = PrepareModuleOutput(output_layouts=Shard(2), desired_output_layouts=Replicate())
        if 9 % n == 0:
            check_equal(*made(Block, {**plain_plan, "": out}), ids)
        forgotten = {
            **plan,
            "mlp.gate_proj": ColwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        bad = attempt(lambda: made(Block, forgotten)[0](ids), InvalidArgument)
        assert refused([bad], "part of the data", "input_layouts=Shard(dim)")

    run(n, worker)


# ---- between a column and a row layer -------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout between the layers, and behind them."""

    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.a = nn.Linear(8, 64)
        self.inner = nn.Dropout(inner)
        self.b = nn.Linear(64, 8)
        self.outer = nn.Dropout(outer)
        self.seen: list[torch.Tensor] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(torch.ones_like(self.a(x)))
        self.seen.append(y.detach())
        if self.fails:
            raise KeyError("within")
        return self.outer(self.b(y))


def test_dropout() -> None:
    """Differs between ranks within, is the same outside, and the plain model's if there is none within."""

    def worker(rank: int, n: int) -> tuple[Any, ...]:
        parallel: Any = tp.parallelize(seeded(lambda: Dropping(0.5, 0.5)), PAIR)
        torch.manual_seed(1)
        y = parallel(torch.ones(4, 8))
        z = parallel(torch.ones(4, 8))
        assert not torch.equal(parallel.seen[0], parallel.seen[1])
        parallel.fails = True
        assert refused([attempt(lambda: parallel(torch.ones(4, 8)), KeyError)], "within")
        outside = torch.rand(3)
        with_none, plain = made(lambda: Dropping(0.0, 0.5), PAIR)
        torch.manual_seed(2)
        ours = with_none(randn(1, 4, 8))
        torch.manual_seed(2)
        assert near(ours, plain(randn(1, 4, 8)), 1e-9)
        tp.check_random_states()
        twin = copy.deepcopy(parallel)
        twin.fails = False
        twin(torch.ones(4, 8))
        parallel.eval()
        parallel.fails = False
        state = torch.get_rng_state()
        parallel(torch.ones(4, 8))
        assert torch.equal(torch.get_rng_state(), state)
        return tuple(t.tolist() for t in (y, z, outside)), parallel.seen[0].tolist()

    found = run(2, worker)
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_parameters_between() -> None:
    """A module computed between the layers is refused until the plan says what it sees; "shared" sums gradients."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 6)
            self.slope = nn.PReLU()
            self.b = nn.Linear(6, 4)
            self.last = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.b(self.slope(self.a(x))))

    class Tempered(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.slope = nn.Tanh()  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.b(self.slope(self.a(x) * self.temperature)))

    def worker(rank: int, n: int) -> None:
        silent, _ = made(Scaled, PAIR)
        bad = attempt(lambda: silent(randn(1, 3, 4)), InvalidArgument)
        assert refused([bad], "slope (PReLU)", '"shared"', '"whole"')
        parallel, plain = made(Scaled, {**PAIR, "slope": "shared"})
        assert isinstance(parallel.slope, nn.PReLU)
        check_equal(parallel, plain, randn(1, 3, 4))
        check_equal(copy.deepcopy(parallel), plain, randn(1, 3, 4))
        part, _ = made(Scaled, {**PAIR, "slope": "whole"})
        part(randn(1, 3, 4)).sum().backward()
        bad = attempt(lambda: made(Tempered, PAIR), InvalidArgument)
        assert refused([bad], "parameters of its own", '"shared"', '"whole"')
        check_equal(*made(Tempered, {**PAIR, "": "shared"}), randn(1, 3, 4))

    run(3, worker)


def test_communication() -> None:
    """Layers that take one input have its gradients summed once: one all_reduce forward, one backward."""

    def worker(rank: int, n: int) -> None:
        def count(action: Any) -> dict[str, int]:
            before = {k: v["operations"] for k, v in pycomm.stats()["kinds"].items()}
            action()
            after = {k: v["operations"] for k, v in pycomm.stats()["kinds"].items()}
            return {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}

        state: dict[str, torch.Tensor] = {}
        for make, plan in (
            (lambda: GroupedAttention(8, 4, 2), {"[qkv]_proj": "column", "o_proj": "row"}),
            (lambda: GatedMlp(8, 6), {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}),
        ):  # fmt: skip
            parallel, _ = made(make, plan)
            x = randn(1, 2, 3, 8).requires_grad_()
            assert count(lambda m=parallel, x=x: state.update(y=m(x))) == {"all_reduce": 1}
            assert count(lambda: state["y"].sum().backward()) == {"all_reduce": 1}
            assert count(lambda m=parallel, x=x: state.update(y=m(x.detach()))) == {"all_reduce": 1}
            assert count(lambda: state["y"].sum().backward()) == {}
        layer, plain = made(lambda: Llama(layers=1), plans.llama(sequence_parallel=True))
        block, reference = layer.layers[0], plain.layers[0]
        x = randn(1, 2, 4, 12).requires_grad_()
        pair = {"all_gather": 2, "reduce_scatter": 2}  # of attention and MLP, forward and backward
        assert count(lambda: state.update(y=block(x))) == pair
        total = tp.gather(state["y"], dim=1).sum()
        # Besides, what was split before the block is gathered, and the gradients of the norms' weights are summed.
        assert count(total.backward) == {**pair, "all_gather": 3, "all_reduce": 2}
        reference(x).sum().backward()
        check_same_gradients(layer.layers, plain.layers, 1e-9)

    run(2, worker)


def test_bad_labels() -> None:
    """A label of 9 in a vocabulary of 8 is refused on all ranks, where logits stay split; ids are, too."""

    def worker(rank: int, n: int) -> None:
        plan = plans.gpt2(gather_logits=False)
        model = tp.parallelize(seeded(lambda: Gpt(words=8)), plan)
        ids = torch.arange(6).view(1, 6)
        logits = model(ids)
        assert logits.shape == (1, 6, 4)
        good = tp.vocab_parallel_cross_entropy(logits, ids)
        plain = nn.functional.cross_entropy(seeded(lambda: Gpt(words=8))(ids)[0], ids[0])
        assert near(good, plain, 1e-5)
        labels = ids.clone()
        labels[0, 3] = 9
        bad = attempt(lambda: tp.vocab_parallel_cross_entropy(logits, labels), InvalidArgument)
        assert refused([bad], "9", "0 to 7")
        bad = attempt(lambda: model(labels), InvalidArgument)
        assert refused([bad], "9", "0 to 7")

    run(2, worker)


def test_conv1d_has_no_initial_values() -> None:
    """A layer of a transposed weight says so when asked to draw them."""

    def worker(rank: int, n: int) -> None:
        layer = tp.parallelize(seeded(lambda: Conv1D(6, 6)), tp.Style("column", gather_output=True))
        assert refused([attempt(layer.reset_parameters, InvalidArgument)], "transposed")  # type: ignore[arg-type]

    run(2, worker)
