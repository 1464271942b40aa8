"""A tiny GPT-2 of one's own in Hugging Face's Trainer, with compressed gradients.

    pip install '.[hf]'
    torchrun --nproc-per-node 2 examples/trainer_tiny.py

Nothing is downloaded: tokens are bytes, and the text is the source code of Python's standard
library.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from adaptive.integrations.hf import AdaptiveCompressionCallback


def text(length: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of `length` bytes; the model itself shifts labels by one."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"".join(file.read_bytes() for file in files)
    tokens = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in tokens.split(length)[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="logs/trainer_tiny")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=128,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    compression = AdaptiveCompressionCallback(base="topk", cf_range=(10, 1000))
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            arguments.folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=10,
            save_steps=max(1, arguments.steps // 2),  # the compressor's state is beside the model's
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
        ),
        train_dataset=text(128),
        callbacks=[compression],
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    if trainer.is_world_process_zero() and trainer.args.world_size > 1:
        print(compression.compressor.summary())


if __name__ == "__main__":
    main()
