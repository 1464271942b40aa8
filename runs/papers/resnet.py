"""Residual networks for small images (He et al. 2015, section 4.2), 3 x 3 stem."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


def _conv3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """A 1 x 1 projection where the shape changes."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
    )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (1 x 1 projection where the shape changes)."""

    expansion = 1

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(channels_in, channels_out, stride)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv3(channels_out, channels_out)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = _shortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a 1 x 1 convolution, the last to four times as many channels (He et al.
    2015, section 4.1), and a shortcut; the 3 x 3 one has the stride.
    """

    expansion = 4

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        width = channels_out // self.expansion
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3(width, width, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.shortcut = _shortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stages of `blocks`, the first at full resolution, each later one at half the last and with
    twice the channels; `width`: of the first convolution.

    `forward` maps images (batch, in_channels, height, width) to logits (batch, classes); any
    height and width from 8 up.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        width: int,
        in_channels: int = 3,
        classes: int = 10,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride, wide = 2 if stage and not index else 1, block.expansion * width << stage
                layers.append(block(channels, wide, stride))
                channels = wide
        self.stem = nn.Sequential(_conv3(in_channels, width), nn.BatchNorm2d(width))
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(F.relu(self.stem(images)))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
