"""Every parallel layer against the unsharded one: initial weights, outputs, all gradients, uneven sizes, dtypes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import G, attempt, near, refused, run, seeded
from torch import nn
from torch.nn import functional
from whole_modules import check_equal, check_same_parameters, randn, whole, whole_grad

import pycomm
from pycomm import tensor_parallel as tp
from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.layout import layout_of

WORLDS = [1, 2, 3, 4]
F64 = torch.float64


def double(make: Any) -> Any:
    """A module in float64, made from seed 0."""
    return seeded(make).double()


# ---- linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
def test_linear_alone(n: int) -> None:
    """Each is nn.Linear by default: input and output whole, any sizes."""

    def worker(rank: int, n: int) -> None:
        for inputs, outputs in ((8, 12), (7, 5), (3, 1)):
            for bias in (True, False):
                plain = double(lambda i=inputs, o=outputs, b=bias: nn.Linear(i, o, b))
                for kind in (tp.ColumnParallelLinear, tp.RowParallelLinear):
                    parallel = double(lambda k=kind, i=inputs, o=outputs, b=bias: k(i, o, b))
                    check_same_parameters(parallel, plain)
                    for shape in ((inputs,), (4, inputs), (2, 3, inputs)):
                        check_equal(parallel, plain, randn(1, *shape))
                        check_equal(kind.from_linear(plain), plain, randn(1, *shape))
                    transposed = randn(2, inputs, 4).t()
                    check_equal(parallel, plain, transposed)

    run(n, worker)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pair_in_other_dtypes(n: int, dtype: torch.dtype) -> None:
    """A column layer into a row layer, overlapped or in chunks; the reference computes in float64."""
    tol = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]

    def worker(rank: int, n: int) -> None:
        layers = lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))  # noqa: E731
        plain: Any = seeded(layers).to(dtype)
        for overlap, chunks in ((False, 1), (True, 1), (False, 3)):
            options = {"overlap": overlap, "overlap_chunks": chunks}
            pair: Any = nn.Sequential(
                tp.ColumnParallelLinear.from_linear(plain[0], gather_output=False, **options),
                nn.ReLU(),
                tp.RowParallelLinear.from_linear(plain[2], input_is_parallel=True, **options),
            )
            check_equal(pair, plain, randn(3, 5, 6, dtype=dtype), tol=tol)

    run(n, worker)


@pytest.mark.parametrize("n", [2, 4])
def test_bias_is_added_once(n: int) -> None:
    """Case TP-01: contiguous and transposed inputs, all gradients, the bias's the same on all ranks."""

    def worker(rank: int, n: int) -> None:
        plain: Any = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
        pair: Any = nn.Sequential(
            tp.ColumnParallelLinear.from_linear(plain[0], gather_output=False),
            nn.ReLU(),
            tp.RowParallelLinear.from_linear(plain[2], input_is_parallel=True),
        )
        for x0 in (torch.randn(5, 6, generator=G(3)), torch.randn(6, 5, generator=G(4)).t()):
            x = x0.clone(memory_format=torch.preserve_format).requires_grad_()
            q = x0.clone().requires_grad_()
            pair.zero_grad()
            plain.zero_grad()
            a, b = pair(x), plain(q)
            a.pow(2).sum().backward()
            b.pow(2).sum().backward()
            assert near(a, b, 1e-5)
            assert x.grad is not None
            assert q.grad is not None
            assert near(x.grad, q.grad, 1e-5)
            bias_grad = whole_grad(pair[2].bias)
            assert bias_grad is not None
            assert near(bias_grad, plain[2].bias.grad, 1e-5)
            everyone = [torch.empty_like(bias_grad) for _ in range(n)]
            dist.all_gather(everyone, bias_grad)
            assert all(torch.equal(other, bias_grad) for other in everyone)
            for layer, reference in ((pair[0], plain[0]), (pair[2], plain[2])):
                grad = whole_grad(layer.weight)
                assert grad is not None
                assert near(grad, reference.weight.grad, 1e-5)

    run(n, worker)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_initial_weights(n: int) -> None:
    """Case TP-03: those of the whole layer bit for bit, also of reset_parameters; random states stay the same."""

    def worker(rank: int, n: int) -> bytes:
        makes: list[tuple[Any, Any]] = [
            (nn.Linear, tp.ColumnParallelLinear),
            (nn.Linear, tp.RowParallelLinear),
            (nn.Embedding, tp.VocabParallelEmbedding),
            (lambda a, b: nn.Conv2d(a, b, 3), lambda a, b: tp.ParallelConv2d(a, b, 3)),
            (lambda a, b: nn.Conv2d(a, b, 3), lambda a, b: tp.ParallelConv2d(a, b, 3, split="input")),
            (lambda a, b: nn.MultiheadAttention(a, 8), lambda a, b: tp.ParallelMultiheadAttention(a, 8)),
        ]  # fmt: skip
        for whole_kind, parallel_kind in makes:
            torch.manual_seed(42)
            plain = whole_kind(64, 32)
            state = torch.get_rng_state()
            torch.manual_seed(42)
            parallel = parallel_kind(64, 32)
            assert torch.equal(torch.get_rng_state(), state)
            check_same_parameters(parallel, plain)
            with torch.no_grad():
                for parameter in parallel.parameters():
                    parameter.zero_()
            torch.manual_seed(42)
            parallel.reset_parameters()
            check_same_parameters(parallel, plain)
        return torch.get_rng_state().numpy().tobytes()

    assert len(set(run(n, worker))) == 1


def test_fused_and_padded_columns() -> None:
    """Queries, keys and values in one layer are split by heads; padded outputs never come out."""

    def worker(rank: int, n: int) -> None:
        plain = double(lambda: nn.Linear(5, 3 * 12))
        fused = tp.ColumnParallelLinear.from_linear(
            plain, gather_output=False, parts=[12] * 3, unit=4
        )
        x = randn(1, 2, 5)
        q, k, v = (t.split([8, 4], -1)[rank] for t in plain(x).chunk(3, -1))
        assert near(fused(x), torch.cat([q, k, v], -1))
        assert torch.equal(whole(fused.weight), plain.weight)
        padded = tp.ColumnParallelLinear.from_linear(double(lambda: nn.Linear(5, 9)), pad_to=4)
        assert padded.weight.shape == ((8, 5), (4, 5))[rank]
        check_equal(padded, double(lambda: nn.Linear(5, 9)), x)
        grad = padded.weight.grad
        assert grad is not None
        assert not grad[padded.output_counts[rank] :].any()
        bad = attempt(lambda: tp.ColumnParallelLinear(5, 36, parts=[12] * 3), InvalidArgument)
        assert refused([bad], "gather_output=False")

    run(2, worker)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_sequence_parallel(n: int, backend: str) -> None:
    """A norm, a column and a row layer on parts of the sequence, even and uneven, whole or in chunks, by either dim."""

    def block() -> nn.Sequential:
        layers = nn.LayerNorm(6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.RMSNorm(6)
        return nn.Sequential(*layers)

    def worker(rank: int, n: int) -> None:
        plain = double(block)
        for length, dim, chunks, regather in (
            *((6, -2, 1, False), (6, 0, 1, True), (7, -2, 1, True), (1, 0, 1, False)),
            *((12, -2, 2, True), (7, 0, 3, False)),
        ):
            options: Any = {
                "sequence_parallel": True,
                "sequence_dim": dim,
                "uneven_sequence": length % n != 0,
                "overlap_chunks": chunks,
            }
            norms: Any = [tp.norm.norm_from(copy.deepcopy(plain[i]), None) for i in (0, 4)]
            parallel = nn.Sequential(
                norms[0],
                tp.ColumnParallelLinear.from_linear(
                    plain[1], gather_output=False, regather=regather, **options
                ),
                nn.Tanh(),
                tp.RowParallelLinear.from_linear(plain[3], input_is_parallel=True, **options),
                norms[1],
            )
            x = randn(2, 2, length, 6) if dim == -2 else randn(2, length, 2, 6)
            check_equal(
                *(parallel, plain, x),
                enter=functools.partial(tp.scatter, dim=dim),
                leave=functools.partial(tp.gather, dim=dim),
            )

    run(n, worker, backend=backend)


def test_layers_differentiated_twice() -> None:
    """The gradient of a gradient's square is that of the whole layers."""

    def twice(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (first,) = torch.autograd.grad((model(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), (x, *model.parameters()))

    def worker(rank: int, n: int) -> None:
        plain = double(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
        parallel = nn.Sequential(
            tp.ColumnParallelLinear.from_linear(plain[0], gather_output=False),
            nn.Tanh(),
            tp.RowParallelLinear.from_linear(plain[2], input_is_parallel=True),
        )
        x = randn(1, 3, 4)
        ours = twice(parallel, x.clone().requires_grad_())
        theirs = twice(plain, x.clone().requires_grad_())
        assert near(ours[0], theirs[0], 1e-9)
        for own, parameter, wanted in zip(ours[1:], parallel.parameters(), theirs[1:], strict=True):
            layout = layout_of(parameter)
            assert near(own if layout is None else layout.gather(own), wanted, 1e-9)

    run(2, worker)


def test_autocast() -> None:
    """In bfloat16, with gradients in float32."""

    def worker(rank: int, n: int) -> None:
        plain: Any = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
        parallel: Any = nn.Sequential(
            tp.ColumnParallelLinear.from_linear(plain[0], gather_output=False),
            tp.RowParallelLinear.from_linear(plain[1], input_is_parallel=True),
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert parallel(torch.ones(2, 6)).dtype == torch.bfloat16
            check_equal(parallel, plain, randn(1, 5, 6, dtype=torch.float32), tol=0.1)
        assert parallel[0].weight.grad.dtype == torch.float32

    run(2, worker)


def test_inputs_of_the_wrong_width() -> None:
    """Are refused in words, before anything travels."""

    def worker(rank: int, n: int) -> None:
        row = tp.RowParallelLinear(8, 4, input_is_parallel=True)
        bad = attempt(lambda: row(torch.ones(2, 8)), InvalidArgument)
        assert refused([bad], f"rank {rank} of 2", "RowParallelLinear", "must be 4")
        column = tp.ColumnParallelLinear(8, 4, sequence_parallel=True)
        assert refused([attempt(lambda: column(torch.ones(2, 4)), InvalidArgument)], "must be 8")
        row = tp.RowParallelLinear(8, 4, sequence_parallel=True)
        bad = attempt(lambda: row(torch.ones(3, 8)), InvalidArgument)
        assert refused([bad], "not divisible by 2", "uneven_sequence")

    run(2, worker)


def test_copies_and_conversions_stay_parallel() -> None:
    """deepcopy, to(), half() keep what a parameter is a part of; a pickle is refused in words."""

    def worker(rank: int, n: int) -> None:
        layer = tp.ColumnParallelLinear(4, 6)
        for made in (
            copy.deepcopy(layer),
            copy.deepcopy(layer).double(),
            copy.deepcopy(layer).half(),
        ):
            assert layout_of(made.weight) == layout_of(layer.weight) is not None
            assert near(whole(made.weight), whole(layer.weight), 1e-3)
        assert refused(
            [attempt(lambda: copy.copy(layer.group).__reduce__(), TypeError)], "cannot be pickled"
        )

    run(2, worker)


# ---- embedding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
def test_embedding(n: int) -> None:
    """padding_idx, max_norm, frequencies, sparse gradients, padding; vocabularies smaller than the group, too."""

    def worker(rank: int, n: int) -> None:
        options: list[dict[str, Any]] = [
            *({}, {"padding_idx": 1}, {"padding_idx": -1}, {"max_norm": 1.0}),
            *({"max_norm": 0.5, "norm_type": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}),
        ]
        for words in (10, 8, 3):
            for chosen in options:
                for pad_to in (1, 4):
                    plain = double(lambda w=words, o=chosen: nn.Embedding(w, 5, **o))
                    parallel = double(
                        lambda w=words, o=chosen, p=pad_to: tp.VocabParallelEmbedding(w, 5, **o, pad_to=p)
                    )  # fmt: skip
                    check_same_parameters(parallel, plain)
                    again = tp.VocabParallelEmbedding.from_embedding(plain, pad_to=pad_to)
                    for module in (parallel, again):
                        for shape in ((7,), (2, 3), (), (0,)):
                            ids = torch.randint(0, words, shape, generator=G(5))
                            check_equal(module, copy.deepcopy(plain), ids)
                    check_equal(parallel, plain, torch.arange(words))
                    check_same_parameters(parallel, plain)  # max_norm has changed both
        bad = attempt(lambda: parallel(torch.tensor([0, 3])), InvalidArgument)
        assert refused([bad], f"rank {rank}", "0 to 3", "vocabulary is 0 to 2")

    run(n, worker, wall=60)


def test_embedding_into_a_sequence() -> None:
    """Each rank gets its part of the sequence."""

    def worker(rank: int, n: int) -> None:
        plain = double(lambda: nn.Embedding(9, 4))
        parallel = tp.VocabParallelEmbedding.from_embedding(
            plain, sequence_parallel=True, uneven_sequence=True
        )
        ids = torch.randint(0, 9, (2, 5), generator=G(5))
        check_equal(parallel, plain, ids, leave=lambda y: tp.gather(y, dim=-2))

    run(3, worker)


# ---- convolution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
def test_convolution(n: int) -> None:
    """Split by output, input and groups; strides, dilation, padding modes, uneven channels, no batch."""

    def worker(rank: int, n: int) -> None:
        cases: list[tuple[str, dict[str, Any]]] = [
            ("output", {}),
            ("input", {"bias": False, "stride": 2}),
            ("output", {"padding": "same", "dilation": 2}),
            ("input", {"padding": 1, "padding_mode": "circular"}),
            ("output", {"padding": 1, "padding_mode": "reflect"}),
            ("groups", {"groups": 5}),
            ("groups", {"groups": 5, "padding": 1, "bias": False}),
        ]
        for split, options in cases:
            plain = double(lambda o=options: nn.Conv2d(5, 10, 3, **o))
            parallel = double(lambda o=options, s=split: tp.ParallelConv2d(5, 10, 3, **o, split=s))
            check_same_parameters(parallel, plain)
            for module in (parallel, tp.ParallelConv2d.from_conv(plain, split=split)):
                check_equal(module, plain, randn(1, 2, 5, 6, 7))
                check_equal(module, plain, randn(2, 5, 6, 7))
        torch.manual_seed(0)
        depthwise = nn.Conv2d(8, 8, 3, groups=8)
        chain: Any = nn.Sequential(nn.Conv2d(4, 8, 3), depthwise, nn.Conv2d(8, 4, 3)).double()
        pieces = nn.Sequential(
            tp.ParallelConv2d.from_conv(chain[0], gather_output=False),
            tp.ParallelConv2d.from_conv(chain[1], split="groups", input_is_parallel=True, gather_output=False),
            tp.ParallelConv2d.from_conv(chain[2], split="input", input_is_parallel=True),
        )  # fmt: skip
        check_equal(pieces, chain, randn(1, 2, 4, 8, 8))
        bad = [
            attempt(lambda: tp.ParallelConv2d(4, 8, 3, groups=2), InvalidArgument),
            attempt(lambda: tp.ParallelConv2d(4, 8, 3, split="groups"), InvalidArgument),
        ]
        assert refused(bad, "groups")
        small = attempt(lambda: tp.ParallelConv2d(1, 1, 3), InvalidArgument)
        assert n == 1 or refused([small], "too small", f"{n} ranks")

    run(n, worker, wall=60)


@pytest.mark.parametrize("n", WORLDS)
def test_batch_norm(n: int) -> None:
    """Between convolutions: outputs, gradients, running statistics, in training and in eval(); whole states."""

    def worker(rank: int, n: int) -> None:
        def make(**options: Any) -> nn.Sequential:
            norm = nn.BatchNorm2d(7, **options)
            return nn.Sequential(nn.Conv2d(3, 7, 3), norm, nn.ReLU(), nn.Conv2d(7, 4, 1))

        plan = {"0": "column", "1": "groups", "3": "row"}
        for options in ({}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}):
            plain = double(lambda o=options: make(**o))
            parallel = tp.parallelize(copy.deepcopy(plain), plan)
            for seed in (1, 2):
                check_equal(parallel, plain, randn(seed, 2, 3, 5, 5))
            parallel.eval()
            plain.eval()
            check_equal(parallel, plain, randn(3, 2, 3, 5, 5))
            gathered = tp.gather_state_dict(parallel)
            assert gathered.keys() == plain.state_dict().keys()
            for name, value in plain.state_dict().items():
                assert near(gathered[name], value, 1e-12), name
            other = tp.parallelize(double(lambda o=options: make(**o)), plan)
            tp.load_full_state_dict(other, gathered)
            for name, value in tp.gather_state_dict(other).items():
                assert torch.equal(value, gathered[name]), name

    run(n, worker)


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
def test_attention(n: int) -> None:
    """torch's module: layouts, masks, weights, no batch, uneven heads; also inside TransformerEncoderLayer."""

    def worker(rank: int, n: int) -> None:
        for batch_first in (False, True):
            plain = double(lambda b=batch_first: nn.MultiheadAttention(12, 6, batch_first=b))
            parallel = double(lambda b=batch_first: tp.ParallelMultiheadAttention(12, 6, batch_first=b))  # fmt: skip
            check_same_parameters(parallel, plain)
            lengths = ((2, 4, 12), (2, 4, 12)) if batch_first else ((4, 2, 12), (4, 2, 12))
            q, k = randn(1, *lengths[0]), randn(2, *lengths[1])
            causal = torch.ones(4, 4).triu(1).bool()
            padding = torch.tensor([[False] * 4, [False, False, True, True]])
            per_head = randn(4, 12, 4, 4)
            for options in (
                *(
                    {},
                    {"need_weights": False},
                    {"attn_mask": causal},
                    {"key_padding_mask": padding},
                ),
                *({"attn_mask": per_head}, {"average_attn_weights": False}),
                {"attn_mask": causal, "need_weights": False, "is_causal": True},
            ):
                ours, our_weights = parallel(q, k, k, **options)
                theirs, their_weights = plain(q, k, k, **options)
                assert near(ours, theirs, 1e-9), options
                assert (our_weights is None) == (their_weights is None)
                assert our_weights is None or near(our_weights, their_weights, 1e-9)
            first = [lambda x, m=m: m(x, x, x)[0] for m in (parallel, plain)]
            for module, call in zip((parallel, plain), first, strict=True):
                module.zero_grad()
                call(q).pow(2).sum().backward()
            from whole_modules import check_same_gradients

            check_same_gradients(parallel, plain, 1e-9)
            alone = randn(5, 4, 12)
            assert near(parallel(alone, alone, alone)[0], plain(alone, alone, alone)[0], 1e-9)
        layer = double(lambda: nn.TransformerEncoderLayer(12, 6, 16, 0.0, batch_first=True))
        parallel = copy.deepcopy(layer)
        parallel.self_attn = tp.ParallelMultiheadAttention.from_attention(layer.self_attn)
        check_equal(parallel, layer, randn(1, 2, 4, 12))
        with torch.no_grad():
            assert near(parallel.eval()(q), layer.eval()(q), 1e-9)

    run(n, worker, wall=60)


def grouped(x: torch.Tensor, plain: nn.MultiheadAttention, heads: int, kv: int) -> torch.Tensor:
    """Grouped-query attention by the book."""
    assert plain.in_proj_weight is not None
    d = x.shape[-1] // heads
    q, k, v = functional.linear(x, plain.in_proj_weight, plain.in_proj_bias).split(
        [heads * d, kv * d, kv * d], -1
    )
    q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
    y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return plain.out_proj(y)


@pytest.mark.parametrize("n", WORLDS)
def test_grouped_query_attention(n: int) -> None:
    """More and fewer heads of keys than ranks; some ranks may have no head at all."""

    def worker(rank: int, n: int) -> None:
        from whole_modules import check_same_gradients

        from pycomm.tensor_parallel.attention import _whole

        for heads, kv in ((6, 3), (6, 2), (6, 1), (4, 4), (2, 1)):
            plain = double(lambda h=heads, k=kv: _whole(12, h, k, True, {}))
            parallel = double(
                lambda h=heads, k=kv: tp.ParallelMultiheadAttention(12, h, num_kv_heads=k, batch_first=True)
            )  # fmt: skip
            check_same_parameters(parallel, plain)
            x, q = randn(1, 2, 4, 12).requires_grad_(), randn(1, 2, 4, 12).requires_grad_()
            ours, theirs = parallel(x, x, x)[0], grouped(q, plain, heads, kv)
            assert near(ours, theirs, 1e-9), (heads, kv)
            ours.pow(2).sum().backward()
            theirs.pow(2).sum().backward()
            assert x.grad is not None
            assert q.grad is not None
            assert near(x.grad, q.grad, 1e-9)
            check_same_gradients(parallel, plain, 1e-9)

    run(n, worker)


# ---- random numbers -------------------------------------------------------------------------------------------------


def test_random_numbers() -> None:
    """Different inside, same outside, the same again when a checkpointed region is run again, and after a restart."""

    def worker(rank: int, n: int) -> tuple[list[float], ...]:
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(5)
        tp.check_random_states()
        before = torch.rand(3).tolist()
        with tp.own_random_numbers():
            inside = torch.rand(3).tolist()
            with tp.common_random_numbers():
                common = torch.rand(3).tolist()
            inside += torch.rand(3).tolist()
        after = torch.rand(3).tolist()
        saved = {k: v.clone() for k, v in tp.RandomState().state_dict().items()}
        with tp.own_random_numbers():
            again = torch.rand(3).tolist()
        tp.RandomState().load_state_dict(saved)
        with tp.own_random_numbers():
            assert torch.rand(3).tolist() == again

        def region(x: torch.Tensor) -> torch.Tensor:
            with tp.own_random_numbers():
                return functional.dropout(x * x, 0.5)

        x = torch.ones(64, requires_grad=True)
        y = checkpoint(region, x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.ne(0), y.ne(0))
        tp.check_random_states()
        assert len({*before, *inside, *common, *after, *again}) == 18
        return before, inside, common, after, again, y.tolist()

    found = run(3, worker)
    for same in (0, 2, 3):
        assert all(of_rank[same] == found[0][same] for of_rank in found)
    for different in (1, 4, 5):
        assert len({tuple(of_rank[different]) for of_rank in found}) == 3

    def differently_seeded(rank: int, n: int) -> Any:
        torch.manual_seed(rank)
        return attempt(tp.check_random_states, pycomm.MismatchError)

    assert refused(run(2, differently_seeded), "rank 1", "manual_seed")


def test_dropout_of_attention_differs() -> None:
    """Between ranks, with both ways to compute it; the random state outside stays the same."""

    def worker(rank: int, n: int) -> tuple[Any, ...]:
        torch.manual_seed(1)
        attention = tp.ParallelMultiheadAttention(8, 2, dropout=0.5, bias=False)
        x = torch.randn(16, 1, 8)
        _, weights = attention(x, x, x, average_attn_weights=False)
        masks = (weights == 0)[0]
        assert not torch.equal(masks[0], masks[1])
        attention(x, x, x, need_weights=False)
        return tuple(torch.rand(3).tolist())

    assert len(set(run(2, worker))) == 1
