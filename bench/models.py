"""The tensors of ResNet-50, without its forward, to measure averages of a large model with."""

from __future__ import annotations

from torch import nn


def resnet50_tensors() -> nn.Module:
    """ResNet-50's 161 parameters and its BatchNorm buffers, in order; it has no forward.

    >>> sum(p.numel() for p in resnet50_tensors().parameters())
    25557032
    """
    parts: list[nn.Module] = []

    def conv(channels_in: int, channels: int, size: int) -> None:
        parts.extend((nn.Conv2d(channels_in, channels, size, bias=False), nn.BatchNorm2d(channels)))

    conv(3, 64, 7)
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            conv(before, width, 1)
            conv(width, width, 3)
            conv(width, 4 * width, 1)
            if block == 0:
                conv(before, 4 * width, 1)
            before = 4 * width
    return nn.ModuleList([*parts, nn.Linear(before, 1000)])
