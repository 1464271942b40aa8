"""The models of papers, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from runs.papers.resnet import Bottleneck, ResNet
from runs.papers.vgg import VGG, VGG11, VGG16
from runs.papers.word_lstm import WordLSTM

MODELS: dict[str, Callable[..., nn.Module]] = {
    # Of images, with 10 classes.
    "resnet8": partial(ResNet, (1, 1, 1), width=16),  # 78 thousand
    "resnet20": partial(ResNet, (3, 3, 3), width=16),  # 0.27 million
    "resnet18": partial(ResNet, (2, 2, 2, 2), width=64),  # 11.2 million
    "vgg11": partial(VGG, VGG11),  # 9.2 million
    "vgg16": partial(VGG, VGG16),  # 14.7 million
    "resnet50": partial(ResNet, (3, 4, 6, 3), width=64, block=Bottleneck),  # 23.5 million
    "resnet101": partial(ResNet, (3, 4, 23, 3), width=64, block=Bottleneck),  # 42.5 million
    # Of 10,000 words; the second as Harris's medium model, the last as the large one of Zaremba and
    # others (2014), which is the LSTM of the GraVAC paper (252 MiB in fp32).
    "lstm-small": partial(WordLSTM, hidden=128, dropout=0.2),  # 1.5 million
    "lstm-medium": partial(WordLSTM, hidden=300, dropout=0.35),  # 4.4 million
    "lstm-large": partial(WordLSTM, hidden=650, dropout=0.5),  # 13.3 million
    "lstm-2x1500": partial(WordLSTM, hidden=1500, dropout=0.65, tied=False),  # 66.0 million
}
