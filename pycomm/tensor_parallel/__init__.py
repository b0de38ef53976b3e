"""Layers of one model split over the ranks of a group, and equal to the whole ones.

:class:`ColumnParallelLinear` and its fellows take torch's arguments, or a layer that exists, the same on all ranks:

    torch.manual_seed(0)
    up = ColumnParallelLinear(512, 2048, gather_output=False)
    down = RowParallelLinear.from_linear(linear, input_is_parallel=True)

:func:`parallelize` puts them into a model that knows nothing of this:

    model = parallelize(model, {"*.q_proj": "column", "*.o_proj": "row", "lm_head": "vocab"})

Initial weights, outputs and gradients are those of the unsharded layers, for any sizes and numbers of ranks;
:mod:`regions` says what travels.
"""

from pycomm.tensor_parallel.attention import ParallelMultiheadAttention
from pycomm.tensor_parallel.batch_norm import ParallelBatchNorm2d
from pycomm.tensor_parallel.conv import ParallelConv2d
from pycomm.tensor_parallel.embedding import VocabParallelEmbedding
from pycomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pycomm.tensor_parallel.loss import CausalLmLoss, vocab_parallel_cross_entropy
from pycomm.tensor_parallel.norm import LayerNorm, RMSNorm
from pycomm.tensor_parallel.parallelize import parallelize
from pycomm.tensor_parallel.random import (
    RandomState,
    check_random_states,
    common_random_numbers,
    own_random_numbers,
)
from pycomm.tensor_parallel.regions import (
    all_gather,
    copy,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from pycomm.tensor_parallel.state import gather_state_dict, load_full_state_dict
from pycomm.tensor_parallel.style import Style

__all__ = [
    "CausalLmLoss",
    "ColumnParallelLinear",
    "LayerNorm",
    "ParallelBatchNorm2d",
    "ParallelConv2d",
    "ParallelMultiheadAttention",
    "RMSNorm",
    "RandomState",
    "RowParallelLinear",
    "Style",
    "VocabParallelEmbedding",
    "all_gather",
    "check_random_states",
    "common_random_numbers",
    "copy",
    "gather",
    "gather_state_dict",
    "load_full_state_dict",
    "own_random_numbers",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "scatter",
    "vocab_parallel_cross_entropy",
]
