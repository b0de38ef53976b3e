"""A model as a list of layers, each of which takes what the one before returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pycomm.errors import InvalidArgument


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name; raises InvalidArgument for a model that is no list."""
    own = getattr(model, "pipeline_layers", None)
    if own is not None:
        return {_key(name): layer for name, layer in dict(own()).items()}
    if isinstance(model, nn.Sequential):
        # Not named_children(): that leaves out a module that is there again.
        return {name: layer for name, layer in model._modules.items() if layer is not None}
    kind = type(model).__name__
    if kind == "GPT2LMHeadModel":
        return _gpt2(model)
    if kind == "LlamaForCausalLM":
        return _llama(model)
    raise InvalidArgument(
        f"{kind} is no nn.Sequential, nor one of transformers' that split() knows (GPT-2, Llama); give it a "
        "method pipeline_layers() that returns its layers by name"
    )


def _key(name: str) -> str:
    """What nn.ModuleDict takes."""
    return name.replace(".", "_")


# ---- transformers


class _Gpt2Embedding(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.letters, self.places, self.dropout = body.wte, body.wpe, body.drop

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, positions] to [batch, positions, width]."""
        places = self.places.weight[: ids.shape[1]]
        embedded: Tensor = self.dropout(self.letters(ids) + places)
        return embedded


class _Block(nn.Module):
    """One of transformers', whose causal attention needs no mask."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, positions, width] to the same."""
        named = {}
        if self.rotary is not None:
            places = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            named["position_embeddings"] = self.rotary(hidden, position_ids=places)
        found = self.block(hidden, **named)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result


def _check_attention(model: Any) -> None:
    """Without a mask, only torch's attention is causal."""
    kind = model.config._attn_implementation
    if kind != "sdpa":
        raise InvalidArgument(
            f"a split model needs attn_implementation='sdpa', whose attention is causal without a mask; not {kind!r}"
        )


def _gpt2(model: Any) -> dict[str, nn.Module]:
    _check_attention(model)
    body = model.transformer
    blocks = {f"h_{index}": _Block(block) for index, block in enumerate(body.h)}
    return {
        "embedding": _Gpt2Embedding(body),
        **blocks,
        "ln_f": body.ln_f,
        "lm_head": model.lm_head,
    }


def _llama(model: Any) -> dict[str, nn.Module]:
    _check_attention(model)
    body = model.model
    blocks = {
        f"layers_{index}": _Block(block, body.rotary_emb) for index, block in enumerate(body.layers)
    }
    ends = {"norm": body.norm, "lm_head": model.lm_head}
    return {"embed_tokens": body.embed_tokens, **blocks, **ends}
