"""Training recipes for `runs bench quality`: they differ in architecture, loss, optimizer, schedule
and normalisation. The development half was used to find the default's rule. The held-out half was
written before that rule and was not looked at until the rule was fixed. Then the LSTM had missed
the promise, and moved to the development half, since mending that looked at it. Later recipes were
written when both halves held the promise: other losses, data and optimizers. Two of them showed
that the steps of RMSprop and Adagrad were too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, exp, pi
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from runs.bench.command import Half
from runs.models.gpt import ByteGPT
from runs.models.lstm import ByteLSTM
from runs.papers.images import Cifar10Task
from runs.papers.resnet import ResNet
from runs.papers.vgg import VGG, VGG11
from runs.tasks import Task, TextTask
from runs.tasks.base import Batch
from runs.tasks.corpus import windows

Measure = Literal["accuracy %", "perplexity", "loss"]


HELD_OUT_BYTES = 128 * 1024


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run as a user would write it.

    model: makes the model. optimizer: makes its optimizer. schedule: factor of the learning rate by
    the share of the steps that is done, in [0, 1). task: gives the data, "cifar10" or "text". loss:
    of the model and a batch, a scalar. batch: items a rank and step. clip: limit of the gradient's
    norm. measure: quality on held-out data; "loss" is `loss` there.
    """

    name: str
    half: Half
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], optim.Optimizer]
    schedule: Callable[[float], float]
    task: Literal["cifar10", "text"]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    measure: Measure
    batch: int = 16
    steps: int = 300
    clip: float | None = None

    def quality(self, model: nn.Module, task: Task) -> float:
        """The measure, on all test images or 128 kB of held-out text; the model is then in eval
        mode."""
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for inputs, targets in held_out(task):
                if self.measure == "accuracy %":
                    total += 100 * float((model(inputs).argmax(1) == targets).sum())
                else:
                    total += float(self.loss(model, inputs, targets)) * len(targets)
                count += len(targets)
        mean = total / count
        return exp(min(mean, 100.0)) if self.measure == "perplexity" else mean


def held_out(task: Task) -> Iterator[Batch]:
    """Inputs and targets that no rank trains on."""
    if isinstance(task, TextTask):
        text = task.corpus.held_out[:HELD_OUT_BYTES]
        starts = np.arange((len(text) - 1) // task.length) * task.length
        for at in range(0, len(starts), 64):
            yield tuple(windows(text, starts[at : at + 64], task.length))
    elif isinstance(task, Cifar10Task):
        images, labels = task.images.test_images, torch.from_numpy(task.images.test_labels)
        for at in range(0, len(labels), 250):
            yield task.normalised(images[at : at + 250]), labels[at : at + 250]


# -- schedules -------------------------------------------------------------------------------------


def cosine(share: float) -> float:
    """From 1 to 0."""
    return 0.5 * (1 + cos(pi * share))


def warm_cosine(share: float) -> float:
    """From 0 to 1 in a tenth of the steps, then to 0 by a cosine."""
    return share / 0.1 + 0.01 if share < 0.1 else cosine((share - 0.1) / 0.9)


def warm_constant(share: float) -> float:
    """From 0 to 1 in a tenth of the steps, then constant."""
    return min(1.0, share / 0.1 + 0.01)


def warm_linear(share: float) -> float:
    """From 0 to 1 in a fifth of the steps, then to 0 in a line."""
    return share / 0.2 + 0.01 if share < 0.2 else (1 - share) / 0.8


def drops(share: float) -> float:
    """A tenth from 60% of the steps on, a hundredth from 85%."""
    return 1.0 if share < 0.6 else 0.1 if share < 0.85 else 0.01


def restarts(share: float) -> float:
    """Three times from 1 to 0."""
    return cosine(3 * share % 1)


def constant(share: float) -> float:
    """1."""
    return 1.0


# -- losses ----------------------------------------------------------------------------------------


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def smoothed(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy with label smoothing 0.1."""
    return F.cross_entropy(model(inputs), targets, label_smoothing=0.1)


def reconstruction(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of the inputs."""
    return F.mse_loss(model(inputs), inputs)


def negative_bound(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error plus the divergence from the prior, a thousandth of it (a beta-VAE's)."""
    out, mean, log_variance = model(inputs)
    divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(1).mean()
    return F.mse_loss(out, inputs) + 1e-3 * divergence


def of_hidden(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of bytes that the model does not see, 15% of all."""
    hidden = torch.rand(inputs.shape) < 0.15
    return F.cross_entropy(model(inputs.masked_fill(hidden, 256))[hidden], inputs[hidden].long())


def contrastive(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Two noisy, shifted views of an image are to be told from all other views (SimCLR: Chen and
    others 2020; temperature 0.2)."""
    views = []
    for _ in range(2):
        shift = torch.randint(-4, 5, (2,)).tolist()
        views.append(torch.roll(inputs, shift, (2, 3)) + 0.2 * torch.randn_like(inputs))
    codes = F.normalize(model(torch.cat(views)), dim=1)
    alike = (codes @ codes.T / 0.2).fill_diagonal_(-1e9)
    return F.cross_entropy(alike, torch.arange(2 * len(inputs)).roll(len(inputs)))


def denoising(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of the noise in images with any share of it (a diffusion model's loss)."""
    time, noise = torch.rand(len(inputs)), torch.randn_like(inputs)
    signal = torch.cos(pi / 2 * time)[:, None, None, None]
    return F.mse_loss(model(signal * inputs + (1 - signal**2).sqrt() * noise, time), noise)


# -- models ----------------------------------------------------------------------------------------


class ViT(nn.Module):
    """A transformer over the 64 patches of 4 x 4 pixels of an image; its norms are LayerNorms."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return logits


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin and others 2021) over the 64 patches of an image."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.tokens = nn.ModuleList(_mlp(64, 64) for _ in range(layers))
        self.channels = nn.ModuleList(_mlp(width, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        logits: Tensor = self.head(self.norms[-1](x).mean(1))
        return logits


def _mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class ConvNet(nn.Module):
    """Three stages of residual 3 x 3 convolutions with a norm of choice, 16 x 16 pixels to 4 x 4.
    depthwise: the second convolution of a block sees one channel at a time."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 16, depthwise: bool = False):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), norm(width), nn.ReLU())
        self.down, self.body = nn.ModuleList(), nn.ModuleList()
        for stage in range(3):
            channels, out = width << max(0, stage - 1), width << stage
            stride = 1 if stage == 0 else 2
            down = [nn.Conv2d(channels, out, 3, stride, 1, bias=False), norm(out), nn.ReLU()]
            groups = out if depthwise else 1
            body = [nn.Conv2d(out, out, 3, 1, 1, groups=groups, bias=False), norm(out), nn.ReLU()]
            body += [nn.Conv2d(out, out, 1, bias=False), norm(out)]
            self.down.append(nn.Sequential(*down))
            self.body.append(nn.Sequential(*body))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for down, body in zip(self.down, self.body, strict=True):
            x = down(x)
            x = F.relu(x + body(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


class Recurrent(nn.Module):
    """A byte model by a gated recurrent unit."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.symbols = nn.Embedding(256, 64)
        self.unit = nn.GRU(64, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.head(self.unit(self.symbols(symbols))[0])
        return logits


class TemporalConv(nn.Module):
    """A byte model by dilated causal convolutions; its only norms are of weights' making."""

    def __init__(self, width: int = 128, layers: int = 5) -> None:
        super().__init__()
        self.symbols = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            value, gate = layer(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + torch.tanh(value) * torch.sigmoid(gate)
        logits: Tensor = self.head(x.transpose(1, 2))
        return logits


class AutoEncoder(nn.Module):
    """Images through 32 numbers and back; without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 32))
        self.outside = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3072))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.outside(self.inside(images.flatten(1)))
        return out.view_as(images)


class Variational(nn.Module):
    """A convolutional autoencoder whose code is drawn at random (Kingma and Welling 2014)."""

    def __init__(self, width: int = 24, code: int = 32) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 64, 2 * code),
        )
        self.outside = nn.Sequential(
            nn.Linear(code, 2 * width * 64),
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.inside(images).chunk(2, 1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.outside(mean + noise * (log_variance / 2).exp()), mean, log_variance


class MaskedBytes(nn.Module):
    """A transformer that sees bytes on both sides; its norms come after (as BERT's)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.symbols = nn.Embedding(257, width)
        self.positions = nn.Parameter(torch.randn(512, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.positions[: symbols.shape[1]]
        logits: Tensor = self.head(self.layers(x))
        return logits


class Denoiser(nn.Module):
    """Images, to half of their size and back, with one connection past it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.down, self.down_norm = nn.Conv2d(width, 2 * width, 3, 2, 1), _groups(2 * width)
        self.body, self.body_norm = nn.Conv2d(2 * width, 2 * width, 3, 1, 1), _groups(2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.last = nn.Conv2d(2 * width, 3, 3, 1, 1)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        x = F.silu(self.first(images))
        small = self.down(x) + self.time(time[:, None])[:, :, None, None]
        small = F.silu(self.down_norm(small))
        small = small + F.silu(self.body_norm(self.body(small)))
        noise: Tensor = self.last(torch.cat([x, F.silu(self.up(small))], 1))
        return noise


class Hashed(nn.Module):
    """A byte model by the pairs of bytes among the last nine, each hashed to a row of a table.
    Most of the table's gradients are zero."""

    def __init__(self, rows: int = 20_000, width: int = 16, pairs: int = 8) -> None:
        super().__init__()
        self.rows, self.pairs = rows, pairs
        self.table = nn.Embedding(rows, width)
        self.head = nn.Sequential(nn.Linear(pairs * width, 128), nn.ReLU(), nn.Linear(128, 256))

    def forward(self, symbols: Tensor) -> Tensor:
        length = symbols.shape[1]
        padded = F.pad(symbols.long(), (self.pairs, 0))
        ats = [
            padded[:, k + 1 : k + 1 + length] * 257 + padded[:, k : k + length] * 31 + 7919 * k
            for k in range(self.pairs)
        ]
        logits: Tensor = self.head(torch.cat([self.table(at % self.rows) for at in ats], 2))
        return logits


class Adapted(nn.Module):
    """Frozen random layers, each with a trained adapter of rank 4 (LoRA: Hu and others 2021)."""

    def __init__(self, width: int = 256, rank: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.first = nn.Linear(3072, width)
        for p in (*self.frozen.parameters(), *self.first.parameters()):
            p.requires_grad_(False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(layers))
        for each in self.up.parameters():
            nn.init.zeros_(each)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        layers = zip(self.norms, self.frozen, self.down, self.up, strict=True)
        for norm, frozen, down, up in layers:
            inside = norm(x)
            x = x + F.gelu(frozen(inside) + 4 * up(down(inside)))
        logits: Tensor = self.head(x)
        return logits


def _embedder() -> nn.Module:
    net = ConvNet(nn.BatchNorm2d)
    net.head = nn.Linear(64, 64)
    return nn.Sequential(net, nn.ReLU(), nn.Linear(64, 32))


def _perceptron() -> nn.Module:
    layers = [nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


# -- the recipes -----------------------------------------------------------------------------------


def _with(kind: Callable[..., optim.Optimizer], **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **settings)


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="GPT, AdamW",
        half="development",
        model=ByteGPT,
        optimizer=_with(optim.AdamW, lr=3e-3, weight_decay=0.01),
        schedule=warm_constant,
        task="text",
        loss=cross_entropy,
        measure="perplexity",
        batch=8,
        clip=1.0,
    ),
    Recipe(
        name="thin ResNet-8, SGD, drops",
        half="development",
        model=lambda: ResNet((1, 1, 1), 8),
        optimizer=_with(optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4),
        schedule=drops,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="thin VGG-11, SGD",
        half="development",
        model=lambda: VGG(VGG11, width=16),
        optimizer=_with(optim.SGD, lr=0.02, momentum=0.9, weight_decay=5e-4),
        schedule=constant,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="transformer on images, AdamW",
        half="development",
        model=ViT,
        optimizer=_with(optim.AdamW, lr=1e-3, weight_decay=0.05),
        schedule=warm_cosine,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="convolutions, batch norm, Nesterov",
        half="development",
        model=lambda: ConvNet(nn.BatchNorm2d),
        optimizer=_with(optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
        schedule=cosine,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="recurrent, Adam",
        half="development",
        model=Recurrent,
        optimizer=_with(optim.Adam, lr=3e-3),
        schedule=constant,
        task="text",
        loss=cross_entropy,
        measure="perplexity",
    ),
    Recipe(
        name="autoencoder, Adam",
        half="development",
        model=AutoEncoder,
        optimizer=_with(optim.Adam, lr=1e-3),
        schedule=constant,
        task="cifar10",
        loss=reconstruction,
        measure="loss",
    ),
    Recipe(
        name="mixer, smoothed labels, AdamW",
        half="held-out",
        model=Mixer,
        optimizer=_with(optim.AdamW, lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95)),
        schedule=warm_linear,
        task="cifar10",
        loss=smoothed,
        measure="accuracy %",
        clip=1.0,
    ),
    Recipe(
        name="convolutions, group norm, SGD, drops",
        half="held-out",
        model=lambda: ConvNet(_groups),
        optimizer=_with(optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
        schedule=drops,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="depthwise convolutions, batch norm, NAdam",
        half="held-out",
        model=lambda: ConvNet(nn.BatchNorm2d, width=24, depthwise=True),
        optimizer=_with(optim.NAdam, lr=2e-3),
        schedule=cosine,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="LSTM, SGD, clipped",
        half="development",
        model=ByteLSTM,
        optimizer=_with(optim.SGD, lr=1.0, momentum=0.9),
        schedule=warm_cosine,
        task="text",
        loss=cross_entropy,
        measure="perplexity",
        batch=8,
        clip=0.25,
    ),
    Recipe(
        name="temporal convolutions, AdamW",
        half="held-out",
        model=TemporalConv,
        optimizer=_with(optim.AdamW, lr=2e-3, weight_decay=0.01),
        schedule=cosine,
        task="text",
        loss=cross_entropy,
        measure="perplexity",
    ),
    Recipe(
        name="variational autoencoder, Adam",
        half="held-out",
        model=Variational,
        optimizer=_with(optim.Adam, lr=1e-3),
        schedule=warm_linear,
        task="cifar10",
        loss=negative_bound,
        measure="loss",
    ),
    Recipe(
        name="masked bytes, AdamW",
        half="later",
        model=MaskedBytes,
        optimizer=_with(optim.AdamW, lr=1e-3, betas=(0.9, 0.98)),
        schedule=warm_linear,
        task="text",
        loss=of_hidden,
        measure="loss",
        clip=1.0,
    ),
    Recipe(
        name="contrastive, batch norm, SGD",
        half="later",
        model=_embedder,
        optimizer=_with(optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
        schedule=warm_cosine,
        task="cifar10",
        loss=contrastive,
        measure="loss",
        batch=32,
    ),
    Recipe(
        name="denoising, AdamW",
        half="later",
        model=Denoiser,
        optimizer=_with(optim.AdamW, lr=2e-3, betas=(0.9, 0.99)),
        schedule=warm_constant,
        task="cifar10",
        loss=denoising,
        measure="loss",
    ),
    Recipe(
        name="hashed pairs, Adagrad",
        half="later",
        model=Hashed,
        optimizer=_with(optim.Adagrad, lr=0.03),
        schedule=constant,
        task="text",
        loss=cross_entropy,
        measure="perplexity",
    ),
    Recipe(
        name="convolutions, group norm, RMSprop",
        half="later",
        model=lambda: ConvNet(_groups),
        optimizer=_with(optim.RMSprop, lr=5e-4),
        schedule=constant,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="convolutions, batch norm, RMSprop with momentum",
        half="later",
        model=lambda: ConvNet(nn.BatchNorm2d),
        optimizer=_with(optim.RMSprop, lr=5e-4, alpha=0.9, momentum=0.9),
        schedule=drops,
        task="cifar10",
        loss=smoothed,
        measure="accuracy %",
    ),
    Recipe(
        name="perceptron, plain SGD",
        half="later",
        model=_perceptron,
        optimizer=_with(optim.SGD, lr=0.1),
        schedule=constant,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="convolutions, Nesterov, momentum 0.95, restarts",
        half="later",
        model=lambda: ConvNet(nn.BatchNorm2d),
        optimizer=_with(optim.SGD, lr=0.1, momentum=0.95, weight_decay=5e-4, nesterov=True),
        schedule=restarts,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
    Recipe(
        name="adapters, AdamW",
        half="later",
        model=Adapted,
        optimizer=_with(optim.AdamW, lr=2e-3, weight_decay=0.0),
        schedule=warm_linear,
        task="cifar10",
        loss=cross_entropy,
        measure="accuracy %",
    ),
)
