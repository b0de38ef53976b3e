"""Which layers of a plan belong together: a row layer to the columns before it, projections to their attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.forms import Place, is_linear, widths
from pycomm.tensor_parallel.heads import Heads, heads_of

# What layers are called whose outputs are heads.
_NAMES: Final = {
    *("q", "k", "v", "wq", "wk", "wv", "w_q", "w_k", "w_v", "to_q", "to_k", "to_v"),
    *("query", "key", "value", "queries", "keys", "values", "query_proj", "key_proj", "value_proj"),
    *("q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin", "q_linear", "k_linear", "v_linear"),
    *("linear_q", "linear_k", "linear_v", "q_attn", "c_attn", "kv", "kv_proj", "to_kv"),
    *("qkv", "qkv_proj", "wqkv", "w_qkv", "to_qkv", "attn_qkv", "in_proj", "query_key_value"),
}


@dataclass
class Block:
    """The smallest module that has a row layer and the column layers before it."""

    name: str
    module: nn.Module
    columns: list[Place] = field(default_factory=list)
    rows: list[Place] = field(default_factory=list)


@dataclass
class Problem:
    """What is wrong with the plan at a module."""

    name: str
    words: str


def ancestors(name: str) -> Iterator[str]:
    """Names of the modules that contain one, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _leaves_split(place: Place) -> bool:
    if place.style.kind in ("column", "qkv"):
        return not place.style.options.get("gather_output", False)
    return False


def _takes_split(place: Place) -> bool:
    return place.style.kind == "row" and bool(place.style.options.get("input_is_parallel", True))


def blocks_of(
    places: Mapping[str, Place], modules: Mapping[str, nn.Module]
) -> tuple[list[Block], list[Problem]]:
    """The blocks, and layers whose partners are missing; those whose plan says so itself are left alone."""
    columns = {name: place for name, place in places.items() if _leaves_split(place)}
    rows = {name: place for name, place in places.items() if _takes_split(place)}
    above = {ancestor for name in columns for ancestor in ancestors(name)}
    blocks: dict[str, Block] = {}
    problems = []
    for name, place in rows.items():
        owner = next((a for a in ancestors(name) if a in above), None)
        if owner is not None:
            blocks.setdefault(owner, Block(owner, modules[owner])).rows.append(place)
        elif "input_is_parallel" not in place.style.options:
            problems.append(Problem(name, _ROW_ALONE))
    for name, place in columns.items():
        owner = next((a for a in ancestors(name) if a in blocks), None)
        if owner is not None:
            blocks[owner].columns.append(place)
        elif "gather_output" not in place.style.options:
            problems.append(Problem(name, _COLUMN_ALONE))
    for block in list(blocks.values()):
        if not block.columns:
            del blocks[block.name]
            said = [p for p in block.rows if "input_is_parallel" not in p.style.options]
            problems += [Problem(place.name, _ROW_ALONE) for place in said]
    return list(blocks.values()), problems


_ROW_ALONE = (
    "takes each rank's part of the inputs, but the plan has no column layer before it; say "
    'Style("row", input_is_parallel=False), or True if it gets its part from elsewhere'
)
_COLUMN_ALONE = (
    "leaves its outputs split, but the plan has no row layer that takes them; say "
    'Style("column", gather_output=True), or False if what follows wants its part'
)


def own_parameters(
    blocks: list[Block], places: Mapping[str, Place], modules: Mapping[str, nn.Module]
) -> list[Problem]:
    """Modules around split layers whose own parameters may be used between these."""
    planned = {id(place.module) for place in places.values()}
    around: dict[str, nn.Module] = {}
    for block in blocks:
        for place in block.columns + block.rows:
            for name in ancestors(place.name):
                around[name] = modules[name]
                if name == block.name:
                    break
    words = (
        "has parameters of its own besides its layers, of whose gradients each rank would find a part if they are used "
        'between a column and a row layer; plan "shared" for it if so, "whole" if not'
    )
    return [
        Problem(name, words)
        for name, module in around.items()
        if id(module) not in planned
        and any(p.requires_grad for p in module.parameters(recurse=False))
    ]


# ---- attention ------------------------------------------------------------------------------------------------------


def find_heads(
    places: Mapping[str, Place], blocks: list[Block]
) -> tuple[list[tuple[nn.Module, Heads]], list[Problem]]:
    """Tells layers of attentions which heads they have; returns these attentions, and layers that are unclear."""
    found: list[tuple[nn.Module, Heads]] = []
    problems: list[Problem] = []
    for block in blocks:
        parents = {place.name.rpartition(".")[0] for place in block.columns}
        for parent in sorted(parents):
            columns = [p for p in block.columns if p.name.rpartition(".")[0] == parent]
            module = block.module.get_submodule(_below(parent, block.name))
            heads, more = _heads_of_parent(parent, module, columns, block.rows, places)
            problems += more
            if heads is not None:
                found.append((module, heads))
    return found, problems


def _below(name: str, ancestor: str) -> str:
    return name[len(ancestor) :].lstrip(".")


def _last(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _heads_of_parent(
    name: str,
    parent: nn.Module,
    columns: list[Place],
    rows: list[Place],
    places: Mapping[str, Place],
) -> tuple[Heads | None, list[Problem]]:
    columns = [place for place in columns if is_linear(place.module)]
    rows = [place for place in rows if is_linear(place.module)]
    named = [p for p in columns if _last(p.name) in _NAMES or p.style.kind == "qkv"]
    if not named and columns:
        named = _unnamed_heads(parent, columns, rows)
    if not named:
        return None, []
    try:
        heads = heads_of(parent, widths(rows[0].module)[0] if len(rows) == 1 else None)
        if heads is None:
            unclear = [p for p in named if "unit" not in p.style.options]
            return None, [Problem(p.name, _no_heads(p, parent)) for p in unclear]
    except InvalidArgument as error:
        return None, [Problem(name or type(parent).__name__, str(error))]
    if heads.queries < named[0].group.world_size:
        words = f"has {heads.queries} heads, fewer than {named[0].group.world_size} ranks; leave it whole"
        return None, [Problem(name or type(parent).__name__, words)]
    unclear = [place for place in named if not _knows_outputs(place, heads)]
    if unclear:
        return None, [Problem(place.name, _unclear(place, heads)) for place in unclear]
    for row in rows:
        if widths(row.module)[0] == heads.width and "unit" not in row.style.options:
            row.heads = heads
    return heads, _left_out(name, parent, places)


def _unnamed_heads(parent: nn.Module, columns: list[Place], rows: list[Place]) -> list[Place]:
    """Of an attention whose layers have other names: those as wide as its heads."""
    if any(child.lower() in _NAMES for child, _ in parent.named_children()):
        return []
    heads = heads_of(parent, widths(rows[0].module)[0] if len(rows) == 1 else None)
    if heads is None:
        return []
    return [p for p in columns if widths(p.module)[1] in (heads.width, heads.kv_width)]


def _no_heads(place: Place, parent: nn.Module) -> str:
    return (
        f"has the name of an attention's layer, but {type(parent).__name__} has no num_heads or head_dim to split it "
        f'by; say Style("{place.style.kind}", unit=<width of a head>), or unit=1 if there are none'
    )


def _knows_outputs(place: Place, heads: Heads) -> bool:
    """Notes what the outputs of a layer of heads are; False if it is unclear."""
    options: dict[str, Any] = place.style.options
    if "unit" in options or "parts" in options:
        return True
    q, kv = heads.width, heads.kv_width
    known: dict[int, tuple[int, ...]] = {q: (q,), kv: (kv,)}
    if place.style.kind == "qkv":
        known = {2 * kv: (kv, kv), q + 2 * kv: (q, kv, kv)}
    outputs = known.get(widths(place.module)[1])
    if outputs is not None:
        place.heads, place.outputs = heads, outputs
    return outputs is not None


def _unclear(place: Place, heads: Heads) -> str:
    q, kv = heads.width, heads.kv_width
    return (
        f"has {widths(place.module)[1]} outputs, but {heads.queries} heads of queries and {heads.kv} of keys, each of "
        f'{heads.dim}, have {q} and {kv}; if it is queries, keys and values one after the other, say "qkv" (then '
        f'{q + 2 * kv}), if head by head Style("column", unit=...), else Style("column", parts=[...], unit=...)'
    )


def _left_out(name: str, parent: nn.Module, places: Mapping[str, Place]) -> list[Problem]:
    """Linear layers of a split attention that the plan does not name."""
    prefix = f"{name}." if name else ""
    planned = {id(place.module) for place in places.values()}
    left = [
        prefix + child
        for child, module in parent.named_children()
        if is_linear(module) and id(module) not in planned
    ]
    words = 'is left out, while other layers of its attention are split; plan it, "whole" if it is none of it'
    return [Problem(child, words) for child in left]
