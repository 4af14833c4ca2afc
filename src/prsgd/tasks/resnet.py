"""ResNets for small images (He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, section 4.2)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A)."""

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
        if self.missing:  # every second pixel, and zeros for the channels that are new
            before = self.missing // 2
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.missing - before))
        return functional.relu(x + y)


def resnet(depth: int = 20, num_classes: int = 10, width: int = 16) -> nn.Sequential:
    """A ResNet of 6n + 2 layers: three stages of n blocks with ``width``, twice and four times as many channels.

    >>> sum(p.numel() for p in resnet(20).parameters())
    269722
    >>> sum(p.numel() for p in resnet(8, width=8).parameters())
    19218
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6 n + 2 with n >= 1 (8, 14, 20, 32, 44, 56, 110), got {depth}")
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for channels in (width, 2 * width, 4 * width):
        for _ in range(depth // 6):
            layers.append(Block(before, channels, stride=1 if channels == before else 2))
            before = channels
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes))
    for module in model.modules():  # He et al. 2015, as the paper's ResNets
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model
