"""Text, byte by byte: the State of the Union speeches of 1790 to 2026, or a file of the user's own, and small GPTs.

A token is a byte, so there is no vocabulary to agree on, and any file is a text. A sample is a window of 129 bytes: the
model sees 128 of them and is asked for each next one. The windows lie side by side (the last byte of one is the first
of the next), so that an epoch asks once for every byte, and all of them are views of one buffer.

Every tenth speech is held out, the tenth, twentieth, ...; an evaluation looks at ``LOOKS`` windows of them, evenly
spaced. Of a user's own file the last tenth is held out. A window begins with nothing known, so the bits per byte are a
little higher than a model that sees more would have them, for all runs alike.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from prsgd.data import datasets
from prsgd.metrics import BITS_PER_BYTE
from prsgd.tasks.base import Data, Task
from prsgd.tasks.gpt import GPT

CONTEXT = 128
"""Bytes that a model sees at most."""
WINDOW = CONTEXT + 1
HELD_OUT = 10
"""Of so many speeches one is held out, and of so many bytes of a file."""
LOOKS = 1024
"""Windows of either kind that an evaluation looks at, at most."""
PARTS = 10
"""Into which a file of the user's own is cut, where a split or a figure needs groups."""


def load() -> Data:
    """The speeches, fetched on first use: bytes (n, 128), and the bytes that follow each.

    The groups are the decades, in which the training speeches stand in the order of time.
    """
    parts = datasets.load("text")
    speeches = parts["text"].split(parts["lengths"].tolist())
    held = [number % HELD_OUT == HELD_OUT - 1 for number in range(len(speeches))]
    train, test = (_joined([s for s, out in zip(speeches, held) if out == wanted]) for wanted in (False, True))
    years = torch.tensor([year for year, out in zip(parts["years"].tolist(), held) if not out])
    lengths = torch.tensor([len(s) + len(BETWEEN) for s, out in zip(speeches, held) if not out])
    first_bytes = torch.arange(_num_windows(train)) * CONTEXT
    decades = (years // 10)[torch.searchsorted(lengths.cumsum(0), first_bytes, right=True)]
    names, groups = decades.unique(return_inverse=True)
    return _data(train, test, groups, tuple(f"{name}0s" for name in names.tolist()), "decade")


def read(content: bytes) -> Data:
    """The same of any bytes, which need not be UTF-8; the groups are the tenths of what is trained on.

    >>> data = read(b"To be, or not to be? " * 100)
    >>> data.train_x.shape, data.test_x.shape, bytes(data.train_y[0, :6].tolist())
    (torch.Size([14, 128]), torch.Size([1, 128]), b'o be, ')
    """
    if len(content) < 2 * WINDOW:
        raise ValueError(f"must have at least {2 * WINDOW} bytes, half of which are held out then, got {len(content)}")
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    held_out = max(len(text) // HELD_OUT, WINDOW)
    train, test = text[:-held_out], text[-held_out:]
    groups = torch.arange(_num_windows(train)) * PARTS // _num_windows(train)
    return _data(train, test, groups, tuple(str(1 + part) for part in range(PARTS)), "tenth")


BETWEEN = b"\n\n"
"""From one speech to the next."""


def _joined(speeches: list[Tensor]) -> Tensor:
    gap = torch.tensor(list(BETWEEN), dtype=torch.uint8)
    return torch.cat([part for speech in speeches for part in (speech, gap)])


def _num_windows(text: Tensor) -> int:
    return (len(text) - 1) // CONTEXT


def _data(train: Tensor, test: Tensor, groups: Tensor, names: tuple[str, ...], word: str) -> Data:
    windows, held_out = (text.as_strided((_num_windows(text), WINDOW), (CONTEXT, 1)) for text in (train, test))
    held_out = held_out[torch.linspace(0, len(held_out) - 1, min(LOOKS, len(held_out))).long()]
    return Data(
        windows[:, :-1], windows[:, 1:], held_out[:, :-1], held_out[:, 1:],
        groups=groups, group_names=names, group_word=word, in_order=True,
    )  # fmt: skip


def next_byte_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy in nats of logits (..., 256) for the bytes that follow, (...).

    >>> print(f"{next_byte_loss(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.uint8)) / math.log(2):.3f}")
    8.000
    """
    return functional.cross_entropy(logits.flatten(0, -2), following.flatten().long())


def bits_per_byte(logits: Tensor, following: Tensor) -> Tensor:
    """The same in bits, times the number of samples (n, ...)."""
    return next_byte_loss(logits, following) * (len(following) / math.log(2))


TASK = Task(
    name="text",
    summary="State of the Union speeches as bytes, fetched: 11 MB train, 25 speeches held out; or --data FILE",
    models={
        "tiny": partial(GPT, layers=2, width=128, heads=4, context=CONTEXT),
        "small": partial(GPT, layers=4, width=256, heads=8, context=CONTEXT),
        "medium": partial(GPT, layers=6, width=384, heads=6, context=CONTEXT),
    },
    load=load,
    read=read,
    loss_fn=next_byte_loss,
    metric=BITS_PER_BYTE,
    score_fn=bits_per_byte,
    prepare=Tensor.long,
    training_looks=LOOKS,
    defaults={"batch_size": 8, "epochs": 1, "optimizer": "adamw", "look": 100},
)
