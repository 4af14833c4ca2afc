"""A small GPT: blocks with their norms in front, weights of the first and last layer tied, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Attention = Callable[..., Tensor]
"""What ``functional.scaled_dot_product_attention`` can be called like."""


class Block(nn.Module):
    """Attention to what came before, then two layers for each place."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(x)
        changed: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return changed

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = self.attention(query, key, value, is_causal=True)
        found: Tensor = self.attended(seen.transpose(1, 2).reshape(batch, length, width))
        return found


class GPT(nn.Module):
    """Tokens (batch, length) to what comes next, (batch, length, tokens), as logits.

    >>> sum(p.numel() for p in GPT(layers=6, width=384, heads=6, context=128).parameters())
    10795008
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        tokens: int = 256,
        attention: Attention = functional.scaled_dot_product_attention,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.context = context
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.attended, block.narrow):  # what is added up layer by layer stays of one size
                nn.init.normal_(layer.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if length > self.context:
            raise ValueError(f"at most {self.context} tokens at a time, got {length}")
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
