"""Models to measure with: ResNet-20 for CIFAR, and the tensors of ResNet-50 without its forward."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (He et al. 2016, option A)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride, self.missing = stride, channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.missing:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))
        return functional.relu(x + y)


def resnet20(num_classes: int = 10) -> nn.Module:
    """ResNet-20 for 32x32 images: 3 stages of 3 blocks with 16, 32 and 64 channels.

    >>> sum(p.numel() for p in resnet20().parameters())
    269722
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for channels in (16, 32, 64):
        for _ in range(3):
            layers.append(Block(before, channels, stride=1 if channels == before else 2))
            before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


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
