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

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        width = channels_out // 4
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
    """Stages of blocks, the first at full resolution, each later one at half the last.

    `forward` maps images (batch, in_channels, height, width) to logits (batch, classes); any
    height and width from 8 up. stem: channels of the first convolution; None: the first stage's.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        in_channels: int,
        classes: int,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        stem: int | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        first = channels = stem or widths[0]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for index in range(count):
                stride = 2 if stage and not index else 1
                layers.append(block(channels, width, stride))
                channels = width
        self.stem = nn.Sequential(_conv3(in_channels, first), nn.BatchNorm2d(first))
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(F.relu(self.stem(images)))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def resnet8(*, in_channels: int = 3, classes: int = 10, width: int = 16) -> nn.Module:
    """One block a stage, `width`, 2 and 4 times `width` channels: 78 thousand parameters."""
    return ResNet((1, 1, 1), (width, 2 * width, 4 * width), in_channels, classes)


def resnet20(*, in_channels: int = 3, classes: int = 10, width: int = 16) -> nn.Module:
    """Three blocks a stage, `width`, 2 and 4 times `width` channels: 0.27 million parameters."""
    return ResNet((3, 3, 3), (width, 2 * width, 4 * width), in_channels, classes)


def resnet18(*, in_channels: int = 3, classes: int = 10, width: int = 64) -> nn.Module:
    """Two blocks in each of four stages, `width` to 8 times `width`: 11.2 million parameters."""
    widths = (width, 2 * width, 4 * width, 8 * width)
    return ResNet((2, 2, 2, 2), widths, in_channels, classes)


def resnet101(*, in_channels: int = 3, classes: int = 10, width: int = 64) -> nn.Module:
    """3, 4, 23 and 3 bottlenecks of 4 to 32 times `width` channels: 42.5 million parameters."""
    widths = (4 * width, 8 * width, 16 * width, 32 * width)
    return ResNet((3, 4, 23, 3), widths, in_channels, classes, Bottleneck, stem=width)
