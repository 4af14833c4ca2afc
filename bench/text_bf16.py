"""The text task with its matrix products in bfloat16, which processors with AVX-512 BF16 do in less than half the time:

    prsgd compare --task bench/text_bf16.py --model small --methods minibatch-sgd local-adamw --period 32

Weights, gradients, AdamW's state, what is averaged and what is sent are float32, as with ``torch.autocast`` on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prsgd.tasks import text
from prsgd.tasks.gpt import GPT


def attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """In float32, whose gradient torch has in half the time on a CPU."""
    with torch.autocast(query.device.type, enabled=False):
        return functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), **how)


class HalfGPT(GPT):
    """A GPT that computes under autocast; its logits are float32."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().forward(tokens).float()


def made_of(model: Any) -> Any:
    """What makes the same model of this kind."""
    return partial(HalfGPT, **model.keywords, attention=attention)


task = replace(text.TASK, models={name: made_of(model) for name, model in text.TASK.models.items()})
