"""A small byte-level GPT in Lightning, with compressed gradients.

    pip install '.[lightning]'
    python examples/lightning_gpt.py --devices 2

The text is the source code of Python's standard library. On several nodes start it as Lightning
says (`torchrun`, SLURM); it pays where the network is slow.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from adaptive.integrations.lightning import AdaptiveCompressionCallback


class Text(Dataset):
    """Pieces of `length` bytes, and the bytes that follow each of theirs."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.bytes[i * self.length : (i + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


class GPT(LightningModule):
    def __init__(self, length: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        places = torch.arange(length, device=x.device)
        return self.head(self.blocks(self.token(x) + self.place(places), mask=mask, is_causal=True))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="logs/lightning_gpt")
    parser.add_argument("--resume", help="a checkpoint of this script")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    compression = AdaptiveCompressionCallback(base="topk", cf_range=(10, 1000))
    saving = ModelCheckpoint(arguments.folder, save_last=True)  # the compressor's state is in it
    trainer = Trainer(
        strategy="ddp",
        devices=arguments.devices,
        max_steps=arguments.steps,
        gradient_clip_val=1.0,
        callbacks=[compression, saving],
        default_root_dir=arguments.folder,
        logger=False,
        log_every_n_steps=10,
    )
    data = DataLoader(Text(128), batch_size=8, shuffle=True)
    trainer.fit(GPT(128), data, ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.3f}")
        print(compression.compressor.summary())


if __name__ == "__main__":
    main()
