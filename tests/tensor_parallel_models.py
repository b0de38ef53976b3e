"""Models as others write them, which know nothing of ranks: named and shaped like transformers' GPT-2 and Llama."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Conv1D(nn.Module):
    """A linear layer with a weight of [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class FusedAttention(nn.Module):
    """Queries, keys and values in one layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = width, heads, width // heads
        self.split_size = width
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = Conv1D(width, width)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (p.view(*p.shape[:-1], -1, self.head_dim).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = self.attn_dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        return self.resid_dropout(self.c_proj((weights @ v).transpose(1, 2).flatten(2)))


class FusedMlp(nn.Module):
    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = Conv1D(inner, width)
        self.c_proj = Conv1D(width, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(functional.gelu(self.c_fc(x))))


class FusedBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = FusedAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = FusedMlp(width, 2 * width + 1, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Its output layer's weight is that of its embedding."""

    def __init__(
        self, words: int = 13, width: int = 8, heads: int = 4, blocks: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.wpe = nn.Embedding(16, width)
        self.h = nn.ModuleList(FusedBlock(width, heads, dropout) for _ in range(blocks))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[-1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class GroupedAttention(nn.Module):
    """Fewer heads of keys than of queries, and numbers of everything as attributes."""

    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = width, heads, width // heads
        self.num_key_value_heads, self.num_key_value_groups = kv, heads // kv
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv * self.head_dim)
        self.v_proj = nn.Linear(width, kv * self.head_dim)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.hidden_size))


class GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        self.self_attn = GroupedAttention(width, heads, kv)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.mlp = GatedMlp(width, 2 * width + 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(
        self, words: int = 13, width: int = 12, heads: int = 6, kv: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width, padding_idx=0)
        self.layers = nn.ModuleList(GroupedLayer(width, heads, kv) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Mlp(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self, width: int = 6, inner: int = 8, out: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(width, inner)
        self.b = nn.Linear(inner, out)
        self.ln = nn.LayerNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(self.b(functional.relu(self.a(x))))
