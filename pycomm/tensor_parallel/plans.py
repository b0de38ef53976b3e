"""Ready plans for common models, by the names that transformers gives their layers.

    parallelize(model, plans.llama(sequence_parallel=True, gather_logits=False), mesh["tp"])

Their arguments: ``sequence_parallel``, whether what lies between the split layers has a part of the sequence on each
rank, for whole models; ``gather_logits``, whether all ranks get all logits, or each its part, of which transformers'
``labels=`` (CausalLmLoss) or vocab_parallel_cross_entropy compute the loss; ``pad_to``, to a multiple of which a rank's
part of the vocabulary is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.boundary import Move
from pycomm.tensor_parallel.style import Style

Entries = dict[str, str | Style]
_OPTIONS: Final = {"sequence_parallel": True, "sequence_dim": 1}


def gpt2(
    *, sequence_parallel: bool = False, gather_logits: bool = True, pad_to: int = 1
) -> Entries:
    """GPT2Model, GPT2LMHeadModel, or a block of one: heads, MLP and vocabulary are split."""
    options: dict[str, Any] = _OPTIONS if sequence_parallel else {}
    plan: Entries = {
        "*attn.c_attn": Style("qkv", **options),
        "*attn.c_proj": Style("row", **options),
        "*crossattention.c_attn": Style("qkv", optional=True),
        "*crossattention.q_attn": Style("column", optional=True),
        "*crossattention.c_proj": Style("row", optional=True),
        "*mlp.c_fc": Style("column", **options),
        "*mlp.c_proj": Style("row", **options),
        "wte|*.wte": Style("vocab", optional=True, pad_to=pad_to),
        "lm_head": Style("vocab", optional=True, pad_to=pad_to, gather_output=gather_logits),
    }
    if sequence_parallel:
        plan |= _sequence("h.0|*.h.0", "ln_f|*.ln_f")
        plan |= dict.fromkeys(["*.ln_1", "*.ln_2", "*.resid_dropout", "*.mlp.dropout"], "shared")
    return plan


def llama(
    *, sequence_parallel: bool = False, gather_logits: bool = True, pad_to: int = 1
) -> Entries:
    """LlamaModel, LlamaForCausalLM, a layer of one, and what has the same names (Mistral, Qwen2, SmolLM)."""
    options: dict[str, Any] = _OPTIONS if sequence_parallel else {}
    plan: Entries = dict.fromkeys(["*q_proj", "*k_proj", "*v_proj"], "column")
    plan |= {
        "*o_proj": Style("row", **options),
        "*gate_proj": Style("column", **options),
        "*up_proj": Style("column", **options),
        "*down_proj": Style("row", **options),
        "embed_tokens|*.embed_tokens": Style("vocab", optional=True, pad_to=pad_to),
        "lm_head": Style("vocab", optional=True, pad_to=pad_to, gather_output=gather_logits),
    }
    if sequence_parallel:
        plan |= _sequence("layers.0|*.layers.0", "norm|model.norm")
        plan |= dict.fromkeys(["*.input_layernorm", "*.post_attention_layernorm"], "shared")
        # An attention reshapes by the length of its own input, which it gets by position or by name.
        gather = Move(split=False, dim=1, only_columns=True)
        plan["*.self_attn"] = Style("boundary", inputs=[gather], keywords={"hidden_states": gather})
    return plan


def _sequence(first: str, last: str) -> Entries:
    """Split before the first block, gathered again before the last norm."""
    return {
        first: Style("boundary", inputs=[Move(split=True, dim=1)]),
        last: Style("boundary", inputs=[Move(split=False, dim=1)]),
    }


PLANS: Final[dict[str, Callable[[], Entries]]] = {"gpt2": gpt2, "llama": llama}


def plan_named(name: str) -> Entries:
    """A ready plan. Raises InvalidArgument for a name that is none."""
    if name not in PLANS:
        raise InvalidArgument(
            f'there is no plan "{name}", but {", ".join(PLANS)}; or give a dictionary'
        )
    return PLANS[name]()
