"""VGG networks with batch norm for small images (Simonyan & Zisserman 2014, one linear layer)."""

from __future__ import annotations

from torch import Tensor, nn

# channels of the 3 x 3 convolutions between one halving of the resolution and the next,
# in units of the first stage's width
VGG11 = ((1,), (2,), (4, 4), (8, 8), (8, 8))
VGG16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class VGG(nn.Module):
    """Five stages of convolution, batch norm and ReLU, each halving the resolution.

    `forward` maps images (batch, in_channels, height, width) to logits (batch, classes). Halving
    rounds up, so that 28 x 28 images go through as well as 32 x 32 ones.
    """

    def __init__(
        self,
        plan: tuple[tuple[int, ...], ...],
        width: int = 64,
        in_channels: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in plan:
            for factor in stage:
                layers += [
                    nn.Conv2d(channels, factor * width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(factor * width),
                    nn.ReLU(inplace=True),
                ]
                channels = factor * width
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits
