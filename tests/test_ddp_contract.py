"""What a drop-in replacement of torch's DistributedDataParallel must honour, line by line.

The number in a test's name is the line of the contract that it checks. Convention: 2 ranks, a 1x1
linear layer with weight 1 and no bias, rank r's input is r + 1, the loss is the sum of the outputs;
so the local gradients are 1 and 2 and the right average is 1.5.

`same` runs a scenario with pycomm's class and, on a Gloo group of the same processes, with torch's
class, and the two must agree; `ours` runs it with pycomm's class only. The environment variable
PYCOMM_TEST_DDP=torch puts torch's class on Gloo in pycomm's place; the lines where torch is
silently wrong are then skipped.
"""

import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from harness import (
    BACKEND,
    IMPLEMENTATION,
    P,
    Refused,
    attempt,
    ddp_class,
    lin,
    near,
    refused,
    right_or_refused,
    run,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

MIB = 1024 * 1024

TorchDDP = torch.nn.parallel.DistributedDataParallel
T = TypeVar("T")
Wrap = Callable[..., Any]  # a DistributedDataParallel class, or one with some arguments bound
Scenario = Callable[[Wrap, int], T]  # called with (class, rank)

torch_is_wrong = pytest.mark.skipif(
    IMPLEMENTATION == "torch", reason="torch's class is silently wrong here"
)
with_each_flag = pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="default"),
        pytest.param({"find_unused_parameters": True}, id="find_unused"),
        pytest.param({"gradient_as_bucket_view": True}, id="bucket_view"),
        pytest.param({"static_graph": True}, id="static"),
    ],
)


def ours(scenario: Scenario[T], n: int = 2, **options: Any) -> list[T]:
    """The scenario's results on n ranks, with the class under test."""
    return run(n, lambda rank, _: scenario(ddp_class(), rank), backend=BACKEND, **options)


def same(scenario: Scenario[T], n: int = 2, **options: Any) -> list[T]:
    """The same, after checking that torch's class on Gloo gives the same results."""

    def worker(rank: int, _: int) -> T:
        result = scenario(ddp_class(), rank)
        if IMPLEMENTATION != "torch":
            gloo = dist.new_group(backend="gloo")
            assert scenario(functools.partial(TorchDDP, process_group=gloo), rank) == result
        return result

    return run(n, worker, backend=BACKEND, **options)


def unit(value: float = 1.0) -> nn.Module:
    """A 1x1 linear layer without bias, of the given weight."""
    layer = lin(1, 1)
    nn.init.constant_(layer.weight, value)
    return layer


def x(rank: int, scale: float = 1.0) -> torch.Tensor:
    """Rank's input: a 1x1 tensor of scale * (rank + 1)."""
    return torch.full((1, 1), scale * (rank + 1.0))


def grads(model: nn.Module) -> list[float | None]:
    """The gradients of a model whose parameters have one element each."""
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def step(model: nn.Module, *inputs: Any) -> list[float | None]:
    """One forward and backward; the gradients after it."""
    return after_backward(model(*inputs), model)


def after_backward(output: torch.Tensor, model: nn.Module) -> list[float | None]:
    """The gradients after a backward from the sum of an output."""
    torch.autograd.backward(output.sum())
    return grads(model)


def weight_after(model: nn.Module, *inputs: Any) -> float | None:
    """One forward and backward of a model with one parameter; its gradient after it."""
    (grad,) = step(model, *inputs)
    return grad


class Two(nn.Module):
    """Two unit layers, `alpha` and `beta`; the caller says in which order they are used."""

    def __init__(self) -> None:
        """Make both."""
        super().__init__()
        self.alpha, self.beta = unit(), unit()

    def forward(self, value: torch.Tensor, order: tuple[str, ...]) -> torch.Tensor:
        """Apply the layers that `order` names, one after the other."""
        for name in order:
            value = self.get_submodule(name)(value)
        return value


class Buffered(nn.Module):
    """A unit layer with a buffer that the forward does not use, and one that is not persistent."""

    def __init__(self, value: float) -> None:
        """Fill both buffers with `value`."""
        super().__init__()
        self.layer: nn.Module = unit()
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("passing", torch.full((2,), value), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.layer(value)

    def levels(self) -> list[float]:
        """The value of each buffer."""
        return [buffer[0].item() for buffer in self.buffers()]


class Heads(Two):
    """Both layers beside each other: two outputs, each of one parameter."""

    def forward(self, value: torch.Tensor) -> Any:  # type: ignore[override]
        """The outputs of both."""
        return self.alpha(value), self.beta(value)


class HiddenHead(Two):
    """As Heads, but the second output is not returned: it is an attribute."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The output of the first layer."""
        self.hidden = self.beta(value)
        return self.alpha(value)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One that changes weights by their gradients."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def named(results: list[Any], *words: str, by: int | None = None) -> bool:
    """Whether every rank refused with these words, by GradientError or, told so by rank `by`, AbortedError."""
    kinds = ("AbortedError", "GradientError")
    ranks = [r for r in results if isinstance(r, Refused)]
    told = [r for r in ranks if r.kinds[0] == "AbortedError"]
    return (
        refused(results, *words)
        and all(r.kinds[0] in kinds for r in ranks)
        and len(told) < len(ranks)
        and all(by is None or f"rank {by} aborted" in r.message for r in told)
    )


ALL = ("alpha", "beta")


# 2a. Constructor arguments


def test_01_to_20_the_arguments_are_torchs() -> None:
    """The twenty arguments can be given by position or by name, with torch's defaults."""
    theirs = list(inspect.signature(TorchDDP).parameters.values())
    assert len(theirs) == 20
    mine = inspect.signature(ddp_class())
    mine.bind(*[p.default for p in theirs])
    mine.bind(**{p.name: p.default for p in theirs})
    known = [p for p in theirs if p.name in mine.parameters]
    assert [mine.parameters[p.name].default for p in known] == [p.default for p in known]


def test_01_to_20_positions() -> None:
    """Each argument that is stored arrives at its position."""
    none = None
    arguments = (
        *(none, none, 1, none, True, none, 7, True, False, True),  # device_ids ... bucket view
        *(False, none, none, none, none, True, none, True, False),  # static_graph ... the last
    )

    def scenario(wrap: Wrap, _: int) -> None:
        model = wrap(unit(), *arguments)
        assert (model.dim, model.bucket_bytes_cap) == (1, 7 * MIB)
        assert model.find_unused_parameters
        assert model.gradient_as_bucket_view
        assert not model.static_graph
        assert model.skip_all_reduce_unused_params
        assert model.batched_grad_copy
        assert not model.forward_sync_buffers

    ours(scenario)


def test_01_module_is_a_registered_child() -> None:
    """The module is kept as `.module`, a child of the wrapper."""

    def scenario(wrap: Wrap, _: int) -> None:
        layer = unit()
        model = wrap(layer)
        assert model.module is layer
        assert dict(model.named_children()) == {"module": layer}

    ours(scenario)


def test_02_03_device_ids_and_output_device() -> None:
    """None and [] mean CPU; more than one id, or any for a CPU module, is refused in words."""

    def scenario(wrap: Wrap, _: int) -> None:
        accepted: list[tuple[Any, Any]] = [(None, None), ([], None), (None, 0)]
        for arguments in accepted:
            model = wrap(unit(), *arguments)
            assert model.device_ids is None
            assert model.output_device is None
        with pytest.raises(ValueError, match=r"can only be None or contain a single element"):
            wrap(unit(), [0, 1])
        rejected: list[tuple[Any, Any]] = [([0], 0), ([0], None), (None, 1)]
        for arguments in rejected:
            with pytest.raises(ValueError, match=r"device_ids.*output_device.*cpu"):
                wrap(unit(), *arguments)

    ours(scenario)


def test_04_dim_is_stored() -> None:
    """`dim` is the fourth positional argument, stored for scatter and gather; 0 by default."""

    def scenario(wrap: Wrap, _: int) -> list[int]:
        return [wrap(unit()).dim, wrap(unit(), None, None, 1).dim]

    assert ours(scenario) == [[0, 1]] * 2


def _buffers_after(wrap: Wrap, rank: int, **arguments: Any) -> list[list[float]]:
    """A buffer's value after construction, and after a forward that follows a local change."""
    model = wrap(Buffered(float(rank)), **arguments)
    built = model.module.levels()
    for buffer in model.module.buffers():
        buffer.fill_(rank + 10)
    step(model, x(rank))
    return [built, model.module.levels()]


def test_05_broadcast_buffers() -> None:
    """False warns and leaves buffers alone for good; None acts as True and does not warn."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            default = _buffers_after(wrap, rank)
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            yes = _buffers_after(wrap, rank, broadcast_buffers=True)
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            no = _buffers_after(wrap, rank, broadcast_buffers=False)
        return default, yes, no

    synced = [[0.0, 0.0], [10.0, 10.0]]
    assert same(scenario) == [(synced, synced, [[float(r)] * 2, [10.0 + r] * 2]) for r in range(2)]


def test_06_init_sync_off_skips_check_and_broadcast() -> None:
    """With init_sync=False each rank keeps its values, and gradients are averaged all the same."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit(rank + 1.0), init_sync=False)
        return model.module.weight.item(), weight_after(model, x(rank))

    assert same(scenario) == [(1.0, 1.5), (2.0, 1.5)]


def test_07_process_group_defaults_to_the_default_group() -> None:
    """No group means the default one; a given group is kept and used."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        mine = dist.new_group([0, 1])
        default = wrap(unit())
        given = wrap(unit(), process_group=mine)
        assert default.process_group is dist.group.WORLD
        assert given.process_group is mine
        return [weight_after(default, x(rank)), weight_after(given, x(rank))]

    assert ours(scenario) == [[1.5, 1.5]] * 2


def _bucket_bytes(wrap: Wrap, **arguments: Any) -> str:
    """The bucket sizes after the rebuild, of three layers of 256 KiB each."""
    model = wrap(nn.Sequential(lin(256, 256), lin(256, 256), lin(256, 256)), **arguments)
    for _ in range(3):  # the logger learns of a rebuild one forward later
        torch.autograd.backward(model(torch.ones(1, 256)).sum())
    return model._get_ddp_logging_data()["rebuilt_bucket_sizes"]


def test_08_bucket_cap_mb() -> None:
    """None is 25 MiB, 0 gives a bucket per parameter, and a float counts."""

    def scenario(wrap: Wrap, _: int) -> list[str]:
        caps = [wrap(unit(), bucket_cap_mb=cap).bucket_bytes_cap for cap in (None, 2, 0.5)]
        assert caps == [25 * MIB, 2 * MIB, MIB // 2]
        assert [wrap(unit(), bucket_cap_mb=c).bucket_bytes_cap_default for c in (None, 2)] == [
            True,
            False,
        ]
        return [_bucket_bytes(wrap, bucket_cap_mb=cap) for cap in (None, 0, 0.4)]

    one, two = str(MIB // 4), str(MIB // 2)
    assert same(scenario) == [[str(3 * MIB // 4), f"{one}, {one}, {one}", f"{two}, {one}"]] * 2


def test_08_negative_bucket_cap() -> None:
    """A negative cap gives right gradients, or a ValueError on all ranks."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        return attempt(lambda: step(wrap(Two(), bucket_cap_mb=-1), x(rank), ALL), ValueError)

    assert right_or_refused(ours(scenario), [1.5, 1.5])


def test_09_find_unused_parameters() -> None:
    """A parameter that no rank uses keeps its gradient None and training goes on."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), find_unused_parameters=True)
        assert model.find_unused_parameters
        return [step(model, x(rank), ("alpha",)) for _ in range(2)]

    assert same(scenario) == [[[1.5, None], [3.0, None]]] * 2


def test_10_check_reduction_only_warns() -> None:
    """check_reduction is ignored, with a FutureWarning."""

    def scenario(wrap: Wrap, rank: int) -> float | None:
        with pytest.warns(FutureWarning, match="check_reduction"):
            model = wrap(unit(), check_reduction=True)
        return weight_after(model, x(rank))

    assert same(scenario) == [1.5, 1.5]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"gradient_as_bucket_view": True}, id="11_bucket_view"),
        pytest.param({"static_graph": True}, id="12_static_graph"),
        pytest.param({"batched_grad_copy": True}, id="19_batched_grad_copy"),
        pytest.param({"skip_all_reduce_unused_params": True}, id="17_skip_unused"),
    ],
)
def test_11_12_17_19_flags_change_no_value(arguments: dict[str, bool]) -> None:
    """Bucket views, static graph, batched copies and skipping give the same gradients."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), bucket_cap_mb=0, **arguments)
        assert [getattr(model, name) for name in arguments] == [True]
        first = [step(model, x(rank), ALL) for _ in range(2)]
        model.zero_grad()
        return [*first, step(model, x(rank, 10), ALL)]

    assert same(scenario) == [[[1.5, 1.5], [3.0, 3.0], [15.0, 15.0]]] * 2


def test_13_14_delay_arguments_come_together() -> None:
    """One of the two delay arguments without the other is a ValueError."""

    def scenario(wrap: Wrap, _: int) -> None:
        layer = unit()
        with pytest.raises(ValueError, match="need to be set at the same time"):
            wrap(layer, delay_all_reduce_named_params=[("weight", layer.weight)])
        with pytest.raises(ValueError, match="need to be set at the same time"):
            wrap(layer, param_to_hook_all_reduce=layer.weight)

    ours(scenario)


def test_15_mixed_precision_is_right_or_refused() -> None:
    """Mixed precision needs an accelerator: on a CPU it is refused, or done right."""
    from torch.nn.parallel.distributed import _MixedPrecision

    def scenario(wrap: Wrap, rank: int) -> float | Refused | None:
        config = _MixedPrecision(param_dtype=torch.float16)
        return attempt(lambda: weight_after(wrap(unit(), mixed_precision=config), x(rank)))

    assert right_or_refused(ours(scenario), 1.5)


def test_16_device_mesh() -> None:
    """A mesh excludes a group and must have one dimension; then it is used, also a slice."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        line = init_device_mesh("cpu", (2,))
        square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
            wrap(unit(), process_group=dist.group.WORLD, device_mesh=line)
        with pytest.raises(RuntimeError, match="1D device mesh"):
            wrap(unit(), device_mesh=square)
        meshes = (line, square["dp"])
        return [weight_after(wrap(unit(), device_mesh=mesh), x(rank)) for mesh in meshes]

    assert ours(scenario) == [[1.5, 1.5]] * 2


def test_17_skip_all_reduce_unused_params() -> None:
    """Used gradients are averaged, and those that no rank uses stay as they were."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        arguments = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        model = wrap(Two(), bucket_cap_mb=0, **arguments)
        model.module.beta.weight.grad = x(rank, 7)
        return [step(model, x(rank), ("alpha",)) for _ in range(2)]

    assert same(scenario) == [[[1.5, 7.0 * (r + 1)], [3.0, 7.0 * (r + 1)]] for r in range(2)]


def test_18_bucket_cap_mb_list() -> None:
    """One cap per bucket, the last repeated; the Python reducer cannot do it and says so."""

    def scenario(wrap: Wrap, _: int) -> str:
        sizes = _bucket_bytes(wrap, bucket_cap_mb_list=[0.2, 0.5])
        # By name: cloudpickle would take along a module that the worker names and some test has imported.
        config: Any = importlib.import_module("torch._dynamo.config")
        config.optimize_ddp = "python_reducer"
        with pytest.raises((AssertionError, RuntimeError)):
            wrap(unit(), bucket_cap_mb_list=[1, 2])
        config.optimize_ddp = True
        return sizes

    assert same(scenario) == [f"{MIB // 4}, {MIB // 2}"] * 2


def test_20_forward_sync_buffers() -> None:
    """False still syncs at construction, then no more; it wins over broadcast_buffers."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        off = _buffers_after(wrap, rank, forward_sync_buffers=False)
        with pytest.warns(FutureWarning, match="forward_sync_buffers"):
            both = _buffers_after(wrap, rank, broadcast_buffers=True, forward_sync_buffers=False)
        return off, both

    assert same(scenario) == [([[0.0] * 2, [10.0 + r] * 2],) * 2 for r in range(2)]


# 2b. Public and widely used private surface


def test_21_forward_takes_inputs_and_keywords() -> None:
    """Positional and keyword inputs reach the module as they are."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two())
        return model(x(rank), order=ALL).item(), model(value=x(rank), order=ALL).item()

    assert same(scenario) == [(1.0, 1.0), (2.0, 2.0)]


def test_22_no_sync_restores_the_flag() -> None:
    """no_sync turns synchronisation off within, and back to what it was, also after an error."""

    def scenario(wrap: Wrap, _: int) -> None:
        model = wrap(unit())
        with model.no_sync():
            assert not model.require_backward_grad_sync
            with pytest.raises(KeyError), model.no_sync():
                raise KeyError
            assert not model.require_backward_grad_sync
        assert model.require_backward_grad_sync

    ours(scenario)


def test_23_24_join() -> None:
    """With 1 and 3 batches, the rank that has joined supplies zeros and gets the final model."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        with model.join(True, enable=True, throw_on_early_termination=False):
            for _ in range(1 + 2 * rank):
                optimizer.zero_grad()
                seen.append(weight_after(model, torch.ones(1, 1)))
                optimizer.step()
        return seen, model.module.weight.item()

    assert same(scenario) == [([1.0], -1.0), ([1.0, 0.5, 0.5], -1.0)]


def test_24_joinable_protocol() -> None:
    """The wrapper is a Joinable with a device, a group and a hook."""

    def scenario(wrap: Wrap, _: int) -> None:
        model = wrap(unit())
        assert model.join_device == torch.device("cpu")
        assert model.join_process_group is model.process_group
        assert isinstance(model, dist.algorithms.Joinable)
        hook = model.join_hook(divide_by_initial_world_size=False)
        assert isinstance(hook, dist.algorithms.JoinHook)

    ours(scenario)


def test_25_register_comm_hook() -> None:
    """A user's hook gets each undivided bucket and its result becomes the gradient."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), bucket_cap_mb=0)
        indices: list[int] = []

        def total(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            state.append(bucket.index())
            group = model.process_group
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(indices, total)
        first = step(model, x(rank), ALL)
        return first, len(indices) > 0

    assert same(scenario) == [([3.0, 3.0], True)] * 2


def test_26_scatter_gather_to_kwargs_exist() -> None:
    """The three old methods are there; to_kwargs wraps inputs for one device."""

    def scenario(wrap: Wrap, _: int) -> None:
        model = wrap(unit())
        assert callable(model.scatter)
        assert callable(model.gather)
        assert model.to_kwargs((1,), {"a": 2}, 0) == (((1,),), ({"a": 2},))

    ours(scenario)


def test_27_28_29_train_and_buffer_properties() -> None:
    """train returns the wrapper; will_sync_module_buffers and broadcast_buffers tell the truth."""

    def scenario(wrap: Wrap, rank: int) -> None:
        model = wrap(Buffered(1.0))
        assert model.train(False) is model
        assert not model.module.layer.training
        assert model.train() is model
        assert model.will_sync_module_buffers()
        assert model.broadcast_buffers
        model.broadcast_buffers = False
        assert not model.forward_sync_buffers
        assert not model.will_sync_module_buffers()
        assert not wrap(unit()).will_sync_module_buffers()

    ours(scenario)


PRIVATE = """_register_builtin_comm_hook _register_buffer_comm_hook _register_fused_optim
_get_ddp_logging_data _set_ddp_runtime_logging_sample_rate _set_static_graph
_set_params_and_buffers_to_ignore_for_model _get_data_parallel_params _remove_autograd_hooks
_check_reducer_finalized _set_sparse_metadata _update_process_group _set_ddp_sink_clone
_get_active_ddp_module _inside_ddp_forward"""


def test_30_private_names_used_downstream() -> None:
    """The private methods that other packages call exist, and the simple ones work."""

    def scenario(wrap: Wrap, rank: int) -> None:
        model = wrap(unit())
        assert [name for name in PRIVATE.split() if not callable(getattr(model, name, None))] == []
        with pytest.raises(ValueError, match="sample rate"):
            model._set_ddp_runtime_logging_sample_rate(0)
        step(model, x(rank))
        model._check_reducer_finalized()
        data = model._get_ddp_logging_data()
        assert (data["world_size"], data["rank"], data["module_name"]) == (2, rank, "Linear")
        assert wrap._get_active_ddp_module() is None  # type: ignore[attr-defined]
        with model._inside_ddp_forward():
            assert TorchDDP._get_active_ddp_module() is model

    ours(scenario)


def test_30_ignored_and_data_parallel_parameters() -> None:
    """Ignored parameters are marked, and left out of the data parallel ones."""

    def scenario(wrap: Any, _: int) -> None:
        module: Any = Two()
        wrap._set_params_and_buffers_to_ignore_for_model(module, ["alpha.weight"])
        assert module.alpha.weight._ddp_ignored
        (managed,) = wrap._get_data_parallel_params(module)
        assert managed is module.beta.weight

    ours(scenario)


def test_30_update_process_group_and_remove_hooks() -> None:
    """After a change of group gradients are averaged over it; without hooks they stay local."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit())
        step(model, x(rank))
        model._update_process_group(dist.new_group([0, 1]))
        model.zero_grad()
        moved = weight_after(model, x(rank))
        model._remove_autograd_hooks()
        model.zero_grad()
        return moved, weight_after(model, x(rank))

    assert ours(scenario) == [(1.5, 1.0), (1.5, 2.0)]


ATTRIBUTES = """module process_group device device_type device_ids output_device dim
is_multi_device_module parameters_to_ignore static_graph find_unused_parameters
forward_sync_buffers gradient_as_bucket_view batched_grad_copy mixed_precision
require_backward_grad_sync require_forward_param_sync broadcast_bucket_size bucket_bytes_cap
bucket_bytes_cap_list bucket_bytes_cap_default skip_all_reduce_unused_params
use_side_stream_for_tensor_copies modules_buffers named_module_buffers reducer logger"""


def test_31_attributes() -> None:
    """The attributes exist and have the defaults of a CPU module."""

    def scenario(wrap: Wrap, _: int) -> None:
        model = wrap(Buffered(1.0))
        assert [name for name in ATTRIBUTES.split() if not hasattr(model, name)] == []
        assert isinstance(model._comm_hooks, list)
        assert model.broadcast_bucket_size == 250 * MIB
        assert (model.device, model.device_type) == (torch.device("cpu"), "cpu")
        assert list(model.named_module_buffers) == ["kept", "passing"]
        assert len(model.modules_buffers) == 2
        assert model.parameters_to_ignore == set()
        assert not model.is_multi_device_module

    ours(scenario)


def test_32_is_an_instance_of_torchs_class() -> None:
    """The class is a subclass, so that checkpoint keys lose their `module.` prefix."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    def scenario(wrap: Wrap, _: int) -> list[str]:
        model = wrap(Two())
        assert isinstance(model, TorchDDP)
        return list(get_model_state_dict(model))

    assert ours(scenario) == [["alpha.weight", "beta.weight"]] * 2


# 2c. Construction


def test_33_needs_a_process_group() -> None:
    """Without a default group the ValueError tells to call init_process_group."""

    def worker(rank: int, n: int) -> None:
        with pytest.raises(ValueError, match="init_process_group"):
            ddp_class()(unit())

    run(1, worker, init=False)


def test_34_to_37_modules_that_cannot_be_wrapped() -> None:
    """Nothing to train, devices of two types, lazy parameters, SyncBatchNorm on a CPU."""

    def scenario(wrap: Wrap, _: int) -> None:
        with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
            wrap(unit().requires_grad_(False))
        with pytest.raises(ValueError, match=r"same type of devices.*(cpu.*meta|meta.*cpu)"):
            wrap(nn.Sequential(unit(), nn.Linear(1, 1, device="meta")))
        with pytest.raises(RuntimeError, match="dummy forward"):
            wrap(nn.LazyLinear(1))
        with pytest.raises(ValueError, match="SyncBatchNorm"):
            wrap(nn.Sequential(unit(), nn.SyncBatchNorm(1)))

    ours(scenario)


def test_35_parameters_on_the_meta_device() -> None:
    """A module without data cannot be synchronised: RuntimeError on all ranks."""

    def scenario(wrap: Wrap, _: int) -> Any:
        return attempt(lambda: grads(wrap(nn.Linear(1, 1, device="meta"))))

    assert refused(ours(scenario))


def _refusal_of(make: Callable[[int], nn.Module]) -> list[Any]:
    """What each rank gets from wrapping its `make(rank)`: the refusal, or the gradients."""
    return ours(lambda wrap, rank: attempt(lambda: grads(wrap(make(rank)))))


def _without_beta(rank: int) -> nn.Module:
    module = Two()
    if rank == 1:
        del module.beta
    return module


def _beta_frozen(rank: int) -> nn.Module:
    module = Two()
    module.beta.requires_grad_(rank == 0)
    return module


@pytest.mark.parametrize("make", [_without_beta, _beta_frozen])
def test_38_different_parameter_counts(make: Callable[[int], nn.Module]) -> None:
    """One parameter more, or one frozen, on one rank: all ranks refuse and say which."""
    words = ("1", "2") if IMPLEMENTATION == "torch" else ("beta.weight",)
    assert refused(_refusal_of(make), *words)


def _wider_beta(rank: int) -> nn.Module:
    module = Two()
    module.beta = lin(1, 1 + rank)
    return module


def _other_strides(rank: int) -> nn.Module:
    module = Two()
    module.beta = nn.Conv2d(3, 2, 2, bias=False)
    return module.to(memory_format=torch.channels_last) if rank == 1 else module


@torch_is_wrong
@pytest.mark.parametrize("make", [_wider_beta, _other_strides])
def test_39_different_shapes_or_strides(make: Callable[[int], nn.Module]) -> None:
    """A shape or memory format that differs: all ranks refuse, rank 0 too, and name it."""
    assert refused(_refusal_of(make), "beta.weight")


def _shifted_buffers(rank: int) -> nn.Module:
    module = Two()
    module.register_buffer("first", torch.ones(2 + rank))
    module.register_buffer("second", torch.ones(3 - rank))
    return module


@torch_is_wrong
def test_39_buffers_of_different_shapes() -> None:
    """Buffers of as many elements in all, but other shapes: refused, though a broadcast would do."""
    assert refused(_refusal_of(_shifted_buffers), "first (shape [2]", "first (shape [3]")


@torch_is_wrong
@pytest.mark.parametrize("wide", [torch.float64, torch.float16])
def test_40_different_dtypes(wide: torch.dtype) -> None:
    """A dtype that differs is refused on all ranks, by the parameter's name."""

    def make(rank: int) -> nn.Module:
        module = Two()
        module.beta.to(wide if rank == 1 else torch.float32)
        return module

    assert refused(_refusal_of(make), "beta.weight")


@torch_is_wrong
def test_41_rank_outside_the_group() -> None:
    """A rank that is not in the group gets a ValueError."""

    def scenario(wrap: Wrap, rank: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match="group"):
                wrap(unit(), process_group=group)

    ours(scenario)


class Mixed(nn.Module):
    """Parameters of several kinds and two buffers, all filled with one value."""

    def __init__(self, value: float) -> None:
        """Make and fill them."""
        super().__init__()
        self.trained = nn.Parameter(torch.full((2,), value))
        self.frozen = nn.Parameter(torch.full((2, 3), value), requires_grad=False)
        self.integer = nn.Parameter(torch.full((2,), int(value)), requires_grad=False)
        self.inner = Buffered(value)

    def values(self) -> list[float]:
        """The first element of each parameter and buffer but the inner layer's weight."""
        state = [self.trained, self.frozen, self.integer, *self.inner.buffers()]
        return [t.flatten()[0].item() for t in state]


def test_42_construction_broadcasts_everything() -> None:
    """All parameters, frozen and integer ones too, and all buffers come from rank 0."""

    def scenario(wrap: Wrap, rank: int) -> list[float]:
        module = Mixed(10.0 + rank)
        wrap(module)
        return module.values()

    assert same(scenario) == [[10.0] * 5] * 2


def test_43_ignored_names() -> None:
    """Ignored parameters and buffers are neither broadcast nor reduced."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        inner = Buffered(float(rank))
        weight = inner.layer.get_parameter("weight")
        nn.init.constant_(weight, rank + 1.0)
        module = nn.Sequential(inner, unit())
        names = ["0.layer.weight", "0.kept"]
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, names)
        model = wrap(module)
        built = weight.item(), inner.levels()
        return built, step(model, torch.ones(1, 1))

    assert same(scenario) == [
        ((1.0, [0.0, 0.0]), [1.0, 1.5]),
        ((2.0, [1.0, 0.0]), [1.0, 1.5]),
    ]


@torch_is_wrong
def test_43_ignored_name_on_the_root() -> None:
    """An ignored parameter of the root module itself is not reduced either."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = P(1), P(1)
            self._ddp_params_and_buffers_to_ignore = ["w"]

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * (self.w + self.v)

    assert ours(lambda wrap, rank: step(wrap(Root()), x(rank))) == [[1.0, 1.5], [2.0, 1.5]]


@torch_is_wrong
@pytest.mark.parametrize(
    ("delayed", "hooked"),
    [(ALL, "beta"), (("beta",), "alpha"), (("alpha",), "beta")],
    ids=["all", "in_order", "out_of_order"],
)
def test_44_delayed_reduction(delayed: tuple[str, ...], hooked: str) -> None:
    """Delayed parameters are averaged whichever gradient comes last, or refused."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        module = Two()
        names = [f"{name}.weight" for name in delayed]
        arguments = {
            "delay_all_reduce_named_params": [(n, module.get_parameter(n)) for n in names],
            "param_to_hook_all_reduce": module.get_submodule(hooked).weight,
        }
        return attempt(lambda: step(wrap(module, **arguments), x(rank), ALL), ValueError)

    assert right_or_refused(ours(scenario), [1.5, 1.5])


def test_45_expanded_parameter() -> None:
    """A parameter whose elements share memory is refused on all ranks."""

    def make(_: int) -> nn.Module:
        module = Two()
        module.beta.weight = nn.Parameter(torch.ones(1, 1).expand(3, 1))
        return module

    assert refused(_refusal_of(make))


def test_46_unusual_parameters() -> None:
    """Empty, scalar, transposed and channels-last parameters: right, and strides are kept."""

    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.ones(0, 3))
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.transposed = nn.Parameter(torch.ones(2, 3).t())
            image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
            self.image = nn.Parameter(image)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            parts = [self.empty, self.scalar, self.transposed, self.image]
            return sum((p * value).sum() for p in parts)  # type: ignore[return-value]

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Unusual())
        for _ in range(2):
            torch.autograd.backward(model(torch.tensor(rank + 1.0)))
        found = [p.grad for p in model.parameters()]
        assert all(bool((g == 3.0).all()) for g in found)
        return [(g.shape, g.stride()) for g in found]

    assert same(scenario)[0][1:] == [
        ((), ()),
        ((3, 2), (1, 3)),
        ((2, 3, 4, 5), (60, 1, 15, 3)),
    ]


def test_47_wrapping_again() -> None:
    """The same module can be wrapped twice, wrapped anew, and nested."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        module = unit()
        first = wrap(module)
        second = wrap(module)
        results = [weight_after(second, x(rank))]
        del first, second
        gc.collect()
        module.zero_grad()
        results.append(weight_after(module, x(rank)))  # no wrapper, no reduction
        module.zero_grad()
        third = wrap(module)
        results.append(weight_after(third, x(rank)))
        nested = wrap(wrap(unit()))
        assert list(nested.state_dict()) == ["module.module.weight"]
        return [*results, weight_after(nested, x(rank))]

    assert same(scenario) == [[1.5, r + 1.0, 1.5, 1.5] for r in range(2)]


def test_48_names() -> None:
    """Keys have the prefix `module.`, and attributes of the module are not forwarded."""

    def scenario(wrap: Wrap, _: int) -> None:
        model = wrap(Two())
        expected = ["module.alpha.weight", "module.beta.weight"]
        assert list(model.state_dict()) == expected
        assert [name for name, _ in model.named_parameters()] == expected
        with pytest.raises(AttributeError):
            _ = model.alpha

    ours(scenario)


def test_49_pickle_and_deepcopy() -> None:
    """Both work with the default group and keep averaging; another group is refused."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(unit(3.0))
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        assert [c.module.weight.item() for c in copies] == [3.0, 3.0]
        assert all(c.process_group is dist.group.WORLD for c in copies)
        other = wrap(unit(), process_group=dist.new_group([0, 1]))
        with pytest.raises(RuntimeError, match="default process group"):
            pickle.dumps(other)
        return [weight_after(c, x(rank)) for c in copies]

    assert ours(scenario) == [[1.5, 1.5]] * 2


def test_50_loading_on_one_rank_only() -> None:
    """Loading a state on one rank changes that rank only, and disturbs no reduction."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit())
        if rank == 0:
            model.load_state_dict({"module.weight": torch.full((1, 1), 9.0)})
        return weight_after(model, x(rank)), model.module.weight.item()

    assert same(scenario) == [(1.5, 9.0), (1.5, 1.0)]


# 2d. Forward


def test_51_buffers_are_broadcast_before_the_forward() -> None:
    """BatchNorm statistics differ after a forward, and start from rank 0's at the next one."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(nn.BatchNorm1d(1))
        means = []
        for _ in range(2):
            step(model, x(rank).expand(2, 1))
            means.append(round(model.module.running_mean.item(), 6))
        return means

    assert same(scenario) == [[0.1, 0.19], [0.2, 0.29]]


def _levels_after(model: nn.Module, rank: int, buffer: torch.Tensor) -> list[float]:
    """The buffers after this rank has replaced one and run a forward."""
    module = model.get_submodule("module")
    assert isinstance(module, Buffered)
    module.kept = buffer
    model(x(rank))
    return module.levels()


def test_52_reassigned_buffers_and_eval_mode() -> None:
    """Buffers are looked up afresh at each forward, also of a model in eval mode."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Buffered(0.0))
        training = _levels_after(model, rank, torch.full((2,), rank + 1.0))
        return training, _levels_after(model.eval(), rank, torch.full((2,), rank + 3.0))

    assert same(scenario) == [([1.0, 0.0], [3.0, 0.0])] * 2


def test_52_buffers_without_gradients() -> None:
    """Under no_grad torch still broadcasts at the first forward, pycomm (case DDP-05) never."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Buffered(0.0))
        step(model, x(rank))
        with torch.no_grad():
            first, second = (_levels_after(model, rank, torch.full((2,), rank + k)) for k in (1, 3))
        after = _levels_after(model, rank, torch.full((2,), rank + 5.0))
        return first[0], second[0], weight_after(model, x(rank)), after[0]

    torch_broadcasts = IMPLEMENTATION == "torch"
    first = [1.0, 1.0] if torch_broadcasts else [1.0, 2.0]
    after = [5.0, 6.0] if torch_broadcasts else [5.0, 5.0]
    results = ours(scenario)
    assert [r[:3] for r in results] == [(first[k], 3.0 + k, 3.0) for k in range(2)]
    assert [r[3] for r in results] == after


@torch_is_wrong
def test_52_one_rank_may_evaluate_alone() -> None:
    """A forward without gradients starts no communication, so it needs no peer."""

    def scenario(wrap: Wrap, rank: int) -> float | None:
        model = wrap(Buffered(0.0))
        step(model, x(rank))
        if rank == 0:
            with torch.no_grad():
                model(x(rank))
        dist.barrier()
        return weight_after(model, x(rank))

    assert ours(scenario) == [3.0, 3.0]


def test_53_version_counters_survive_the_broadcast() -> None:
    """Two forwards of a BatchNorm, then one backward: no in-place error, right gradients."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        torch.manual_seed(rank)
        data = torch.randn(2, 3, 1)
        model = wrap(nn.Sequential(unit(), nn.BatchNorm1d(1)))
        loss = model(data[0]).pow(2).sum() + model(data[1]).pow(3).sum()
        torch.autograd.backward(loss)
        return [round(p.grad.item(), 5) for p in model.parameters()]

    results = same(scenario)
    assert results[0] == results[1]


class Pair(NamedTuple):
    """A named tuple of outputs."""

    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Record:
    """A data class of outputs."""

    first: torch.Tensor
    second: torch.Tensor


class Opaque:
    """An output whose tensors torch does not find."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Keep both."""
        self.first, self.second = first, second


class Packing(Two):
    """Returns the outputs of both layers, packed by the caller's function."""

    def forward(self, value: Any, pack: Callable[..., Any]) -> Any:  # type: ignore[override]
        """Apply both layers and pack."""
        return pack(self.alpha(value), self.beta(value))


def _as_list(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    return [first, second]


def _as_dict(first: torch.Tensor, second: torch.Tensor) -> dict[int, torch.Tensor]:
    return {0: first, 1: second}


def test_54_inputs_are_left_alone() -> None:
    """Without device_ids the very objects that the caller passes reach the module."""

    def scenario(wrap: Wrap, rank: int) -> None:
        class Keep(Two):
            def forward(self, value: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                self.kept = [value, *kwargs.values()]
                return value["a"][0]

        model = wrap(Keep())
        given = [{"a": [x(rank)]}, Pair(x(rank), x(rank)), (1, None)]
        model(given[0], b=given[1], c=given[2])
        assert all(a is b for a, b in zip(model.module.kept, given, strict=True))

    ours(scenario)


def test_55_outputs_are_returned_as_they_are() -> None:
    """The output object is the module's own one, whatever its class."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Packing())
        made = []

        def pack(first: torch.Tensor, second: torch.Tensor) -> Opaque:
            made.append(Opaque(first, second))
            return made[-1]

        output = model(x(rank), pack)
        assert output is made[0]
        torch.autograd.backward((output.first + output.second).sum())
        return grads(model)

    assert same(scenario) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("pack", [_as_list, _as_dict, Pair])
def test_55_unused_outputs_in_known_containers(pack: Callable[..., Any]) -> None:
    """Tensors are found in containers: an output outside the loss leaves its gradient None."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Packing(), find_unused_parameters=True)
        torch.autograd.backward(model(x(rank), pack)[0].sum())
        return grads(model)

    assert same(scenario) == [[1.5, None]] * 2


def test_55_tensors_in_a_dataclass() -> None:
    """Tensors are found in a dataclass, so its parameters do not count as unused."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Packing(), find_unused_parameters=True)
        output = model(x(rank), Record)
        torch.autograd.backward((output.first + output.second).sum())
        return grads(model)

    assert same(scenario) == [[1.5, 1.5]] * 2


@torch_is_wrong
def test_55_unused_output_in_a_dataclass() -> None:
    """Torch leaves all gradients local when one field is not in the loss: right or refused."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Packing(), find_unused_parameters=True)
        output = model(x(rank), Record)
        return attempt(lambda: after_backward(output.first, model))

    assert right_or_refused(ours(scenario), [1.5, None])


def test_55_opaque_output_with_find_unused() -> None:
    """Tensors in an object of an unknown class: right values, or RuntimeError on all ranks."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Packing(), find_unused_parameters=True)
        output = model(x(rank), Opaque)
        return attempt(lambda: after_backward(output.first + output.second, model))

    assert right_or_refused(ours(scenario), [1.5, 1.5])


@torch_is_wrong
@with_each_flag
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_55_opaque_output(flags: dict[str, bool], again: bool) -> None:
    """Tensors in an object of an unknown class, one or two backwards: right, or refused by name."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Packing(), **flags)
        output = model(x(rank), Opaque)
        loss = (output.first + output.second).sum()
        if again:
            torch.autograd.backward(loss, retain_graph=True)
        return after_backward(loss, model)

    results = ours(lambda wrap, rank: attempt(lambda: scenario(wrap, rank)))
    assert named(results, "weight") if again else right_or_refused(results, [1.5, 1.5], "weight")


def test_56_no_graph_is_kept() -> None:
    """What a forward's graph holds is free as soon as nobody else holds it, with no help of gc."""

    class Held(torch.autograd.Function):
        made: list[weakref.ref[Any]]

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.held = Opaque(value, value)
            Held.made.append(weakref.ref(ctx.held))
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    class Holding(Two):
        def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            output: torch.Tensor = Held.apply(super().forward(value, ALL))
            return output

    def scenario(wrap: Wrap, rank: int) -> list[int]:
        Held.made = []
        model = wrap(Holding())
        gc.collect()
        gc.disable()
        for _ in range(3):
            model(x(rank))
        without_backward = sum(held() is not None for held in Held.made)
        for _ in range(3):
            step(model, x(rank))
        return [without_backward, sum(held() is not None for held in Held.made)]

    assert ours(scenario) == [[0, 0]] * 2


def test_56_forward_without_backward() -> None:
    """Forwards that no backward follows, with and without gradients, disturb nothing."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit())
        model(x(rank))
        first = weight_after(model, x(rank))
        with torch.no_grad():
            model(x(rank))
        model(x(rank))
        return first, weight_after(model, x(rank))

    assert same(scenario) == [(1.5, 3.0)] * 2


def test_57_calling_the_module_directly_is_local() -> None:
    """The wrapper's forward arms the reduction; the module's own does not."""
    scenario: Scenario[float | None] = lambda wrap, rank: weight_after(  # noqa: E731
        wrap(unit()).module, x(rank)
    )
    assert same(scenario) == [1.0, 2.0]


def test_58_buckets_are_rebuilt_once() -> None:
    """At the start of the second forward, not with find_unused_parameters."""

    def rebuilt(model: Any, rank: int) -> list[bool]:
        flags = []
        for _ in range(3):
            output = model(x(rank))
            flags.append(model._has_rebuilt_buckets)
            torch.autograd.backward(output.sum())
        return flags

    def scenario(wrap: Wrap, rank: int) -> Any:
        searching = wrap(unit(), find_unused_parameters=True)
        return rebuilt(wrap(unit()), rank), rebuilt(searching, rank)

    assert same(scenario) == [([False, True, True], [False] * 3)] * 2


# 2e. Gradients


class Weighted(nn.Module):
    """A parameter of three ones; the output is their product with the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Make the parameter."""
        super().__init__()
        self.weight = P(3, dtype)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return self.weight * value


def _mean_of(wrap: Wrap, value: float, dtype: torch.dtype) -> list[float]:
    """The gradient, when this rank's local gradient is `value` in each of three elements."""
    model = wrap(Weighted(dtype))
    torch.autograd.backward(model(torch.tensor(value, dtype=dtype)).sum())
    return model.module.weight.grad.tolist()


def test_59_mean_over_group() -> None:
    """Means are exact in fp64, do not overflow in fp16, and are the same bits on all ranks."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        double = _mean_of(wrap, [0.1, 0.3][rank], torch.float64)
        half = _mean_of(wrap, 60000.0, torch.float16)
        brain = _mean_of(wrap, [1.0, 3.0][rank], torch.bfloat16)
        return double, half, brain

    exact = 0.1 * 0.5 + 0.3 * 0.5
    assert same(scenario) == [([exact] * 3, [60000.0] * 3, [2.0] * 3)] * 2


@torch_is_wrong
def test_59_mean_of_small_halves() -> None:
    """The mean of equal fp16 values is that value, also where half of it is not representable."""
    smallest = 2.0**-24
    scenario: Scenario[list[float]] = lambda wrap, _: _mean_of(  # noqa: E731
        wrap, smallest, torch.float16
    )
    assert ours(scenario) == [[smallest] * 3] * 2


def test_59_mean_of_three_ranks() -> None:
    """Three ranks: within one rounding of the mean, and the same bits on all."""
    scenario: Scenario[list[float]] = lambda wrap, rank: _mean_of(  # noqa: E731
        wrap, [0.1, 0.2, 0.3][rank], torch.float32
    )
    results = ours(scenario, n=3)
    assert results[0] == results[1] == results[2]
    assert near(torch.tensor(results[0]), torch.full((3,), 0.2), tol=2e-7)


def test_60_nan_and_inf_reach_all_ranks() -> None:
    """A NaN or an infinity on one rank is seen by all."""

    def scenario(wrap: Wrap, rank: int) -> list[str]:
        values = (float("nan"), float("inf"), float("-inf"))
        bad = [value if rank == 1 else 1.0 for value in values]
        return [str(weight_after(wrap(unit()), torch.full((1, 1), value))) for value in bad]

    assert same(scenario) == [["nan", "inf", "-inf"]] * 2


@pytest.mark.parametrize("view", [False, True])
def test_61_gradients_accumulate(view: bool) -> None:
    """Without zeroing, each backward adds the new average to `.grad`."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit(), gradient_as_bucket_view=view)
        return [weight_after(model, x(rank)) for _ in range(3)]

    assert same(scenario) == [[1.5, 3.0, 4.5]] * 2


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_62_no_sync(view: bool, earlier: int) -> None:
    """Gradients stay local within no_sync; the next synced backward averages the total."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit(), gradient_as_bucket_view=view)
        for _ in range(earlier):  # the buckets are rebuilt after the first
            step(model, x(rank))
        model.zero_grad()
        with model.no_sync():
            local = weight_after(model, x(rank))
        return local, weight_after(model, x(rank, 10))

    assert same(scenario) == [(1.0, 16.5), (2.0, 16.5)]


def test_63_the_mode_at_forward_counts() -> None:
    """A backward follows its forward: inside or outside of no_sync does not matter to it."""

    def mixed(wrap: Wrap, rank: int, inside: bool) -> float | None:
        model = wrap(unit())
        with model.no_sync() if inside else nullcontext():
            loss = model(x(rank)).sum()
        with nullcontext() if inside else model.no_sync():
            torch.autograd.backward(loss)
        return grads(model)[0]

    def scenario(wrap: Wrap, rank: int) -> Any:
        return mixed(wrap, rank, inside=False), mixed(wrap, rank, inside=True)

    assert same(scenario) == [(1.5, 1.0), (1.5, 2.0)]


@torch_is_wrong
@with_each_flag
def test_63_backwards_of_both_modes_after_both_forwards(flags: dict[str, bool]) -> None:
    """A local backward that comes between a synced forward and its backward: right, or refused."""

    def mixed(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), **flags)
        with model.no_sync():
            local = model(x(rank, 10), ALL).sum()
        synced = model(x(rank), ALL).sum()
        torch.autograd.backward(local)
        return after_backward(synced, model)

    results = ours(lambda wrap, rank: attempt(lambda: mixed(wrap, rank)))
    assert right_or_refused(results, [16.5, 16.5], "weight")


def test_64_higher_order_gradients() -> None:
    """Gradients that have a graph of their own cannot be averaged: refused on all ranks."""

    def curvature(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle
            loss = model(x(rank), ALL).pow(2).sum()
            torch.autograd.backward(loss, create_graph=True)
        return after_backward(model.module.alpha.weight.grad, model)

    assert refused(ours(lambda wrap, rank: attempt(lambda: curvature(wrap, rank))))


def test_64_create_graph_and_gradient_penalty() -> None:
    """First-order gradients are averaged with create_graph, and a penalty's gradient is too."""

    def penalty(wrap: Wrap, rank: int) -> float | None:
        model = wrap(unit())
        data = x(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(data).pow(2).sum(), data, create_graph=True)
        torch.autograd.backward(slope.sum())  # slope = 2 w^2 x, its derivative by w is 4 w x
        return grads(model)[0]

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle
            torch.autograd.backward(model(x(rank)).sum(), create_graph=True)
        return grads(model)[0], penalty(wrap, rank)

    assert same(scenario) == [(1.5, 6.0)] * 2


def test_65_autograd_grad_is_local() -> None:
    """torch.autograd.grad bypasses the reduction."""

    def scenario(wrap: Wrap, rank: int) -> float:
        model = wrap(unit())
        return torch.autograd.grad(model(x(rank)).sum(), model.module.weight)[0].item()

    assert same(scenario) == [1.0, 2.0]


@torch_is_wrong
@with_each_flag
@pytest.mark.parametrize("earlier", [0, 1], ids=["first", "later"])
def test_66_second_backward_of_a_kept_graph(flags: dict[str, bool], earlier: int) -> None:
    """A second backward with retain_graph: reduced, or refused by name on all ranks."""

    def twice(wrap: Wrap, rank: int) -> float | None:
        model = wrap(unit(), **flags)
        for _ in range(earlier):
            step(model, x(rank))
            model.zero_grad()
        loss = model(x(rank)).sum()
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)
        return grads(model)[0]

    results = ours(lambda wrap, rank: attempt(lambda: twice(wrap, rank)))
    assert right_or_refused(results, 3.0, "weight")


@torch_is_wrong
@with_each_flag
def test_66_second_backward_through_a_hidden_output(flags: dict[str, bool]) -> None:
    """A loss of an attribute, with a backward of its own: right, or refused by name."""

    def twice(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(HiddenHead(), **flags)
        step(model, x(rank))
        return after_backward(model.module.hidden, model)

    results = ours(lambda wrap, rank: attempt(lambda: twice(wrap, rank)))
    if flags.keys() <= {"gradient_as_bucket_view"}:
        assert results == [[1.5, 1.5]] * 2
    else:
        assert named(results, "beta.weight")


@with_each_flag
def test_67_two_forwards_one_backward(flags: dict[str, bool]) -> None:
    """Two forwards and one backward over the sum of their losses: right."""

    def scenario(wrap: Wrap, rank: int) -> float | None:
        model = wrap(unit(), **flags)
        torch.autograd.backward((model(x(rank)) + model(x(rank, 10))).sum())
        return grads(model)[0]

    assert same(scenario) == [16.5, 16.5]


@torch_is_wrong
@with_each_flag
def test_67_two_forwards_two_backwards(flags: dict[str, bool]) -> None:
    """Two forwards, then two backwards: both reduced, or refused by name on all ranks."""

    def twice(wrap: Wrap, rank: int) -> float | None:
        model = wrap(unit(), **flags)
        losses = [model(x(rank)).sum(), model(x(rank, 10)).sum()]
        for loss in losses:
            torch.autograd.backward(loss)
        return grads(model)[0]

    results = ours(lambda wrap, rank: attempt(lambda: twice(wrap, rank)))
    assert right_or_refused(results, 16.5, "weight")


def test_67_two_forwards_of_different_parameters() -> None:
    """Two forwards, then two backwards, of which each brings other parameters: right."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two())
        losses = [model(x(rank), (name,)) for name in ALL]
        return [after_backward(loss, model) for loss in losses][-1]

    assert same(scenario) == [[1.5, 1.5]] * 2


def _backward_into(
    wrap: Wrap, rank: int, names: tuple[str, ...], **flags: bool
) -> list[float | None]:
    """The gradients of the named layers after a backward that asks for just these."""
    model = wrap(Two(), **flags)
    weights = [model.module.get_submodule(name).weight for name in names]
    torch.autograd.backward(model(x(rank), ALL).sum(), inputs=weights)
    return grads(model)[: len(names)]


@with_each_flag
def test_68_backward_with_all_parameters_as_inputs(flags: dict[str, bool]) -> None:
    """backward(inputs=...) with all parameters reduces as usual."""
    assert same(lambda wrap, rank: _backward_into(wrap, rank, ALL, **flags)) == [[1.5, 1.5]] * 2


@torch_is_wrong
@with_each_flag
def test_68_backward_with_some_parameters_as_inputs(flags: dict[str, bool]) -> None:
    """With some of them only, these are reduced, or it is refused by name on all ranks."""
    results = ours(
        lambda wrap, rank: attempt(lambda: _backward_into(wrap, rank, ("alpha",), **flags))
    )
    assert right_or_refused(results, [1.5], "beta.weight", "inputs=")


@torch_is_wrong
@pytest.mark.parametrize("view", [False, True])
def test_68_inputs_on_one_rank_only(view: bool) -> None:
    """The rank that leaves parameters out says so, and the other one does not wait for them."""

    def partly(wrap: Wrap, rank: int) -> list[float | None]:
        names = ALL if rank == 0 else ("alpha",)
        return _backward_into(wrap, rank, names, gradient_as_bucket_view=view)

    results = ours(
        lambda wrap, rank: attempt(lambda: partly(wrap, rank)), group_timeout=60, wall=30
    )
    assert named(results, "beta.weight", by=1)


def test_69_shared_parameters() -> None:
    """A parameter used twice, or tied across modules, is reduced once with both uses."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        repeated = step(wrap(Two()), x(rank), ("alpha", "beta", "alpha"))
        tied = Two()
        tied.beta.weight = tied.alpha.weight
        return repeated, step(wrap(tied), x(rank), ALL)

    assert same(scenario) == [([3.0, 1.5], [3.0])] * 2


def test_70_frozen_parameters_are_untouched() -> None:
    """A parameter frozen before wrapping gets no gradient, or keeps the one it has."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        module = Two()
        module.alpha.requires_grad_(False)
        module.alpha.weight.grad = x(rank, 7)
        model = wrap(module)
        return [step(model, x(rank), ALL) for _ in range(2)]

    assert same(scenario) == [[[7.0 * (r + 1), 1.5], [7.0 * (r + 1), 3.0]] for r in range(2)]


@torch_is_wrong
def test_70_unfrozen_after_wrapping() -> None:
    """A parameter unfrozen after wrapping is reduced, or refused by name on all ranks."""

    def unfreeze(wrap: Wrap, rank: int) -> list[float | None]:
        module = Two()
        module.beta.requires_grad_(False)
        model = wrap(module)
        module.beta.requires_grad_(True)
        return step(model, x(rank), ALL)

    results = ours(lambda wrap, rank: attempt(lambda: unfreeze(wrap, rank)))
    assert right_or_refused(results, [1.5, 1.5], "beta.weight")


@torch_is_wrong
@with_each_flag
@pytest.mark.parametrize("frozen", [(0, 1), (1,)], ids=["all_ranks", "one_rank"])
def test_70_frozen_after_wrapping(flags: dict[str, bool], frozen: tuple[int, ...]) -> None:
    """A parameter frozen after wrapping: right, or refused by name at once."""

    def freeze(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), **flags)
        model.module.beta.requires_grad_(rank not in frozen)
        return step(model, x(rank), ALL)

    results = ours(lambda wrap, rank: attempt(lambda: freeze(wrap, rank)), group_timeout=60)
    right = [1.5, None if len(frozen) == 2 else 0.5]
    assert right_or_refused(results, right, "beta.weight")


def _replace(module: Two) -> None:
    module.beta.weight = nn.Parameter(torch.ones(1, 1))


def _replace_layer(module: Two) -> None:
    module.beta = unit()


def _resize(module: Two) -> None:
    module.beta.weight.data = torch.ones(2, 1)


def _recast_data(module: Two) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.double()


@torch_is_wrong
@pytest.mark.parametrize(
    "change", [_replace, _replace_layer, _resize, _recast_data, nn.Module.double, nn.Module.half]
)
def test_71_changed_after_wrapping(change: Callable[[nn.Module], Any]) -> None:
    """A parameter replaced, resized or converted after wrapping is reduced, or refused by name."""

    def changed(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two())
        change(model.module)
        return step(model, x(rank).to(model.module.alpha.weight.dtype), ALL)

    results = ours(lambda wrap, rank: attempt(lambda: changed(wrap, rank)))
    assert right_or_refused(results, [1.5, 1.5], "weight")


@torch_is_wrong
@with_each_flag
def test_71_replaced_layer(flags: dict[str, bool]) -> None:
    """A whole layer replaced after a first step: refused by name, whatever the flags."""

    def changed(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), **flags)
        step(model, x(rank), ALL)
        _replace_layer(model.module)
        return step(model, x(rank), ALL)

    assert named(ours(lambda wrap, rank: attempt(lambda: changed(wrap, rank))), "beta.weight")


@torch_is_wrong
@pytest.mark.parametrize("frozen", [False, True], ids=["at_once", "unfrozen_later"])
def test_71_added_after_wrapping(frozen: bool) -> None:
    """A layer added after wrapping: no harm while frozen, refused by name when it would train."""

    def added(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two())
        model.module.gamma = unit().requires_grad_(not frozen)
        if frozen:
            assert step(model, x(rank), (*ALL, "gamma")) == [1.5, 1.5, None]
            model.module.gamma.requires_grad_(True)
        return step(model, x(rank), (*ALL, "gamma"))

    results = ours(lambda wrap, rank: attempt(lambda: added(wrap, rank)))
    assert named(results, "gamma.weight", "added")


@torch_is_wrong
def test_71_changed_on_one_rank_only() -> None:
    """The other rank does not wait for it, and is told the parameter."""

    def changed(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two())
        if rank == 1:
            _replace(model.module)
        return step(model, x(rank), ALL)

    results = ours(lambda wrap, rank: attempt(lambda: changed(wrap, rank)), group_timeout=60)
    assert named(results, "beta.weight", "replaced", by=1)


def test_71_moving_to_the_same_device_is_harmless() -> None:
    """.cpu() and .float() of a module that is there already change nothing."""

    def scenario(wrap: Wrap, rank: int) -> float | None:
        model = wrap(unit())
        model.cpu().float()
        return weight_after(model, x(rank))

    assert same(scenario) == [1.5, 1.5]


def test_72_73_mixed_dtypes_and_complex() -> None:
    """Dtypes go to separate buckets; complex64 keeps its imaginary part; integers are left."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.float32, torch.complex64, torch.bfloat16, torch.float64)
            self.trained = nn.ParameterList([P(2, kind) for kind in kinds])
            self.whole = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)

        def forward(self, factor: float) -> torch.Tensor:
            real, turned, brain, double = self.trained
            imaginary = 3 * factor * turned.imag
            return (real * factor + imaginary + brain * factor + double * factor).sum()

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Typed())
        for _ in range(3):
            model.zero_grad()
            torch.autograd.backward(model(rank + 1.0))
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
        return [p.grad[1].item() for p in model.module.trained], sorted(map(int, sizes))

    assert same(scenario) == [([1.5, 4.5j, 1.5, 1.5], [4, 8, 16, 16])] * 2


def test_74_other_order_on_each_rank() -> None:
    """Ranks that use the same parameters in another order still reduce the right pairs."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), bucket_cap_mb=0)
        nn.init.constant_(model.module.beta.weight, 2.0)
        order = ALL if rank == 0 else ALL[::-1]
        return [step(model, x(rank), order) for _ in range(3)]

    assert same(scenario) == [[[3.0 * k, 1.5 * k] for k in (1, 2, 3)]] * 2


class _Boom(torch.autograd.Function):
    """Passes a tensor on; fails in backward while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if _Boom.armed:
            raise KeyError("boom")
        return grad


class Failing(Two):
    """Both layers, with a point of failure between them."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Apply them."""
        output: torch.Tensor = self.beta(_Boom.apply(self.alpha(value)))
        return output


def _fail(wrap: Wrap, rank: int, ranks: tuple[int, ...], **flags: bool) -> Any:
    """A model that has made a right step, and then one that failed between its layers on some ranks."""
    model = wrap(Failing(), bucket_cap_mb=0, **flags)
    assert step(model, x(rank)) == [1.5, 1.5]
    model.zero_grad()
    _Boom.armed = rank in ranks
    if rank in ranks:
        with pytest.raises(KeyError, match="boom"):
            step(model, x(rank))
    else:
        step(model, x(rank))
    _Boom.armed = False
    model.zero_grad()
    if len(ranks) == dist.get_world_size():
        dist.barrier()  # nobody goes on, and ends the group, while others are in that backward
    return model


@with_each_flag
def test_75_error_within_a_backward(flags: dict[str, bool]) -> None:
    """After a backward that failed half-way the next step is right, or refused on all ranks."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = _fail(wrap, rank, (0, 1), **flags)
        return attempt(lambda: step(model, x(rank)))

    words = () if IMPLEMENTATION == "torch" else ("alpha.weight", "an error ended")
    assert right_or_refused(ours(scenario), [1.5, 1.5], *words)


@torch_is_wrong
@with_each_flag
def test_75_error_on_one_rank(flags: dict[str, bool]) -> None:
    """The other ranks wait no longer than until the next forward of the one that failed."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        return step(_fail(wrap, rank, (1,), **flags), x(rank))

    results = ours(
        lambda wrap, rank: attempt(lambda: scenario(wrap, rank)), group_timeout=60, wall=30
    )
    assert named(results, "alpha.weight", "an error ended", by=1)


@torch_is_wrong
def test_75_no_step_after_an_error() -> None:
    """An optimizer does not take the gradients of a backward that failed."""

    def scenario(wrap: Wrap, rank: int) -> tuple[bool, list[float]]:
        model = _fail(wrap, rank, (0, 1))
        with pytest.raises(RuntimeError, match=r"alpha\.weight"):
            optimizer_of(model).step()
        return True, [p.item() for p in model.parameters()]

    assert ours(scenario) == [(True, [1.0, 1.0])] * 2


@torch_is_wrong
@with_each_flag
@pytest.mark.parametrize("noticed", [False, True], ids=["at_once", "at_the_next_forward"])
def test_75_recovery(flags: dict[str, bool], noticed: bool) -> None:
    """With a new group the model goes on, before or after the error of the next forward."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        model = _fail(wrap, rank, (0, 1), **flags)
        if noticed:
            with pytest.raises(RuntimeError, match=r"_update_process_group"):
                model(x(rank))
        model._update_process_group(dist.new_group())
        first = step(model, x(rank))
        model.zero_grad()
        assert step(model, x(rank)) == first
        return first

    assert ours(scenario) == [[1.5, 1.5]] * 2


def test_76_user_hooks_see_the_local_gradient() -> None:
    """Tensor hooks and post-accumulate hooks see the local value, `.grad` ends as the mean."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit())
        weight = model.module.weight
        seen: list[float] = []
        weight.register_hook(lambda grad: seen.append(grad.item()))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        return weight_after(model, x(rank)), seen

    assert same(scenario) == [(1.5, [1.0, 1.0]), (1.5, [2.0, 2.0])]


@pytest.mark.parametrize("find_unused", [False, True])
def test_77_parameter_used_outside_the_forward(find_unused: bool) -> None:
    """A regulariser on an otherwise unused parameter: right; with find_unused right or refused."""

    def regularised(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), find_unused_parameters=find_unused)
        loss = model(x(rank), ("alpha",)) + model.module.beta.weight * x(rank, 2)
        torch.autograd.backward(loss.sum())
        return grads(model)

    results = ours(lambda wrap, rank: attempt(lambda: regularised(wrap, rank)))
    assert right_or_refused(results, [1.5, 3.0]) if find_unused else results == [[1.5, 3.0]] * 2


@torch_is_wrong
@with_each_flag
def test_77_own_backward_of_a_regulariser(flags: dict[str, bool]) -> None:
    """A regulariser with a backward of its own, between forward and backward: right or refused."""

    def regularised(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), **flags)
        output = model(x(rank), ALL)
        torch.autograd.backward((model.module.alpha.weight + model.module.beta.weight).sum())
        return after_backward(output, model)

    results = ours(lambda wrap, rank: attempt(lambda: regularised(wrap, rank)))
    assert right_or_refused(results, [2.5, 2.5], "weight")


def test_77_backward_of_a_regulariser_at_the_end() -> None:
    """After the gradients are averaged, one of weights alone is the same on all ranks."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two())
        step(model, x(rank), ALL)
        return after_backward(model.module.alpha.weight.pow(2), model)

    assert same(scenario) == [[3.5, 1.5]] * 2


@pytest.mark.parametrize("view", [False, True])
def test_78_zeroing_and_replacing_gradients(view: bool) -> None:
    """zero_grad works both ways, and a gradient that was replaced is accumulated into."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(unit(), gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for to_none in (True, False, True, False):
            optimizer.zero_grad(set_to_none=to_none)
            seen.append(weight_after(model, x(rank)))
        model.module.weight.grad = torch.full((1, 1), 100.0)
        return [*seen, weight_after(model, x(rank)), weight_after(model, x(rank))]

    assert same(scenario) == [[1.5, 1.5, 1.5, 1.5, 101.5, 103.0]] * 2


def test_78_bucket_views_cannot_be_detached() -> None:
    """detach_ on a gradient that is a bucket view raises."""

    def scenario(wrap: Wrap, rank: int) -> None:
        model = wrap(unit(), gradient_as_bucket_view=True)
        for _ in range(2):
            step(model, x(rank))
        with pytest.raises(RuntimeError, match="detach"):
            model.module.weight.grad.detach_()

    ours(scenario)


def test_79_subgroups() -> None:
    """In a subgroup the values come from its first rank and the divisor is its size."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
        results = []
        for members, group in zip(([0, 2], [1, 2]), groups, strict=True):
            if rank in members:
                model = wrap(Buffered(rank + 1.0), process_group=group)
                built = model.module.levels()[0]
                results.append((built, weight_after(model, x(rank))))
        return results

    assert ours(scenario, n=3) == [[(1.0, 2.0)], [(2.0, 2.5)], [(1.0, 2.0), (2.0, 2.5)]]


# 2f. Unused parameters


@torch_is_wrong
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("earlier", [0, 2])
def test_80_unused_on_all_ranks(view: bool, earlier: int) -> None:
    """A parameter that no graph holds at the end of backward: refused there, by name."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), gradient_as_bucket_view=view)
        for _ in range(earlier):
            step(model, x(rank), ALL)
        return attempt(lambda: step(model, x(rank), ("alpha",)))

    assert named(ours(scenario), "beta.weight", "find_unused_parameters=True")


@with_each_flag
def test_80_unused_on_all_ranks_with_flags(flags: dict[str, bool]) -> None:
    """With find_unused_parameters or static_graph it is right, else refused by name."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), **flags)
        return attempt(lambda: [step(model, x(rank), ("alpha",)) for _ in range(2)])

    words = () if IMPLEMENTATION == "torch" else ("beta.weight",)
    assert right_or_refused(ours(scenario), [[1.5, None], [3.0, None]], *words)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["losses_only", "outputs_too"])
def test_80_two_losses_of_one_forward(view: bool, kept: bool) -> None:
    """Each head's loss with a backward of its own: right, as no parameter is in both."""

    def losses(outputs: Any) -> list[torch.Tensor]:
        return [output.sum() for output in outputs]

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Heads(), gradient_as_bucket_view=view)
        optimizer = optimizer_of(model)
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(x(rank))
            both = losses(outputs)
            if not kept:
                del outputs
            for loss in both:
                torch.autograd.backward(loss)
            optimizer.step()
        return [p.item() for p in model.parameters()]

    assert same(scenario) == [[-3.5, -3.5]] * 2


def _one_of_two_heads(wrap: Wrap, rank: int, ranks: tuple[int, ...], **flags: bool) -> Any:
    """The model and its outputs, after a backward that leaves out the second one on some ranks."""
    model = wrap(Heads(), **flags)
    outputs = model(x(rank))
    torch.autograd.backward((outputs[0] if rank in ranks else sum(outputs)).sum())
    return model, outputs


@torch_is_wrong
@pytest.mark.parametrize("view", [False, True])
def test_80_step_without_the_second_loss(view: bool) -> None:
    """While another backward could follow nothing is wrong; the optimizer's step is refused."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model, _outputs = _one_of_two_heads(wrap, rank, (0, 1), gradient_as_bucket_view=view)
        refusal = attempt(optimizer_of(model).step)
        assert [p.item() for p in model.parameters()] == [1.0, 1.0]
        return refusal

    assert named(ours(scenario), "beta.weight")


@torch_is_wrong
def test_80_forward_without_the_second_loss() -> None:
    """Without an optimizer of torch's it is the next forward."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model, _outputs = _one_of_two_heads(wrap, rank, (0, 1))
        return attempt(lambda: model(x(rank)))

    assert named(ours(scenario), "beta.weight", "Expected to have finished reduction")


@torch_is_wrong
def test_80_the_second_output_is_dropped() -> None:
    """If the other output is gone, the backward itself is refused."""

    def dropped(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Heads())
        output = model(x(rank))[0]
        return after_backward(output, model)

    assert named(ours(lambda wrap, rank: attempt(lambda: dropped(wrap, rank))), "beta.weight")


@torch_is_wrong
def test_80_steps_of_other_optimizers() -> None:
    """Another model's optimizer may step meanwhile, as in the training of two models in turn."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model, (_, other) = _one_of_two_heads(wrap, rank, (0, 1))
        second = wrap(unit())
        step(second, x(rank))
        optimizer_of(second).step()
        return after_backward(other, model), second.module.weight.item()

    assert ours(scenario) == [([1.5, 1.5], -0.5)] * 2


@torch_is_wrong
def test_80_refused_at_the_step_if_wanted() -> None:
    """PYCOMM_DDP_MISSING=step: the backward is silent as torch's, the step and the forward are not."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two())
        local = step(model, x(rank), ("alpha",))
        forward = attempt(lambda: model(x(rank), ALL))
        dist.barrier()  # the group lives on
        return local, forward, attempt(optimizer_of(model).step)

    results = ours(scenario, env={"PYCOMM_DDP_MISSING": "step"})
    assert [r[0] for r in results] == [[1.0, None], [2.0, None]]
    assert named([r[1] for r in results], "beta.weight", "Expected to have finished reduction")
    assert named([r[2] for r in results], "beta.weight")


@torch_is_wrong
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_81_unused_on_one_rank(view: bool, overlap: bool) -> None:
    """The rank says which parameter; the others wait no longer, and are told rank and parameter."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        arguments = {"gradient_as_bucket_view": view, "overlap": overlap, "bucket_cap_mb": 0}
        model = wrap(Two(), **arguments)
        order = ("alpha",) if rank == 1 else ALL
        return attempt(lambda: step(model, x(rank), order))

    results = ours(scenario, n=3, group_timeout=60, wall=30)
    assert named(results, "beta.weight", by=1)
    assert results[1].kinds[0] == "GradientError"


@torch_is_wrong
def test_81_one_loss_less_on_one_rank() -> None:
    """If a second loss could follow, the rank's optimizer ends the others' wait."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model, _outputs = _one_of_two_heads(wrap, rank, (1,))
        optimizer_of(model).step()

    results = ours(
        lambda wrap, rank: attempt(lambda: scenario(wrap, rank)), group_timeout=60, wall=30
    )
    assert named(results, "beta.weight", by=1)


@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph"])
def test_81_82_unused_on_one_rank_with_flags(flag: str) -> None:
    """A rank that does not use a parameter counts as a zero; what no rank uses is left alone."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        module = Two()
        module.gamma = unit()
        module.gamma.weight.grad = torch.full((1, 1), 99.0)
        model = wrap(module, **{flag: True})
        order = ("alpha",) if rank == 1 else ALL
        return [step(model, x(rank), order) for _ in range(2)]

    assert same(scenario) == [[[1.5, 0.5, 99.0], [3.0, 1.0, 99.0]]] * 2


def test_83_warning_and_unused_outputs() -> None:
    """One warning if all parameters are used; an output that is not in the loss is no error."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Heads(), find_unused_parameters=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.autograd.backward(sum(model(x(rank))))
        model.zero_grad()
        return len(caught), after_backward(model(x(rank))[0], model)

    assert [r[1] for r in same(scenario)] == [[1.5, None]] * 2


# 2g. Static graph


def test_86_first_iteration_and_later_ones() -> None:
    """The delayed reduction of the first iteration gives the same as that of the others."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two(), static_graph=True)
        return [step(model, x(rank), ("alpha", "beta", "alpha")) for _ in range(3)]

    assert same(scenario) == [[[3.0 * k, 1.5 * k] for k in (1, 2, 3)]] * 2


class Checkpointed(nn.Module):
    """A layer applied several times, each under a checkpoint that runs a backward within backward."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = unit()

    def forward(self, value: torch.Tensor, times: int) -> torch.Tensor:
        """Apply it."""
        for _ in range(times):
            value = checkpoint(self.layer, value, use_reentrant=True)
        return value


@torch_is_wrong
@pytest.mark.parametrize(("first", "later"), [(1, 2), (2, 1)], ids=["more", "fewer"])
def test_87_other_number_of_uses_with_static_graph(first: int, later: int) -> None:
    """A model of one parameter that is used more or less often than at first: refused by name."""

    def changing(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Checkpointed(), static_graph=True)
        right = step(model, x(rank).requires_grad_(), first)
        assert right == [1.5 * first]
        step(model, x(rank).requires_grad_(), later)
        optimizer_of(model).step()
        return right

    assert named(ours(lambda wrap, rank: attempt(lambda: changing(wrap, rank))), "layer.weight")


@torch_is_wrong
@pytest.mark.parametrize("changed", [(0, 1), (1,)], ids=["all_ranks", "one_rank"])
@pytest.mark.parametrize("first", [("alpha",), ALL], ids=["more", "fewer"])
def test_88_changed_graph(first: tuple[str, ...], changed: tuple[int, ...]) -> None:
    """A later iteration that uses other parameters is refused at once, on all ranks, by name."""
    second = ALL if first != ALL else ("alpha",)

    def changing(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), static_graph=True)
        assert step(model, x(rank), first)[0] == 1.5
        model.zero_grad()
        return step(model, x(rank), second if rank in changed else first)

    results = ours(
        lambda wrap, rank: attempt(lambda: changing(wrap, rank)), group_timeout=60, wall=30
    )
    assert results == [[1.5, None]] * 2 or named(results, "beta.weight", "graph has changed")


def test_89_static_graph_and_other_settings() -> None:
    """With find_unused_parameters it warns; after an iteration it is too late to set it."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        with pytest.warns(UserWarning, match="find_unused_parameters"):
            model = wrap(Two(), static_graph=True, find_unused_parameters=True)
        late = wrap(unit())
        step(late, x(rank))
        with pytest.raises(RuntimeError, match="static"):
            late._set_static_graph()
        return step(model, x(rank), ("alpha",))

    assert same(scenario) == [[1.5, None]] * 2


def test_90_static_graph_begins_in_no_sync() -> None:
    """A first iteration within no_sync: right, or refused on all ranks."""

    def scenario(wrap: Wrap, rank: int) -> list[float | None]:
        model = wrap(Two(), static_graph=True)
        with model.no_sync():
            step(model, x(rank), ALL)
        return step(model, x(rank), ALL)

    results = ours(lambda wrap, rank: attempt(lambda: scenario(wrap, rank)))
    assert right_or_refused(results, [3.0, 3.0])


@torch_is_wrong
def test_90_static_graph_and_an_unused_output() -> None:
    """The first iteration is right; a later one is, or the optimizer's step is refused by name."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Heads(), static_graph=True)
        optimizer = optimizer_of(model)
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(x(rank))
            torch.autograd.backward(outputs[0].sum())
            optimizer.step()
        return [p.item() for p in model.parameters()]

    results = ours(lambda wrap, rank: attempt(lambda: scenario(wrap, rank)))
    assert right_or_refused(results, [-2.0, 1.0], "beta.weight")


# 2l. Composition


def test_112_compiled_model_and_optimizer() -> None:
    """torch.compile of the wrapper and of the optimizer's step change nothing."""

    def scenario(wrap: Wrap, rank: int) -> Any:
        model = wrap(Two())
        optimizer = optimizer_of(model)
        compiled: Any = torch.compile(model, backend="aot_eager")
        step_of = torch.compile(optimizer.step, backend="eager")
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(compiled(x(rank), ALL).sum())
            seen.append(grads(model))
            step_of()
        return seen, [p.item() for p in model.parameters()]

    assert ours(scenario, wall=120) == [([[1.5, 1.5], [-0.75, -0.75]], [0.25, 0.25])] * 2
