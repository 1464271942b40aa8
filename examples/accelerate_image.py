"""An image model with SGD in Accelerate, with compressed gradients, accumulation and checkpoints.

    pip install '.[hf]'
    torchrun --nproc-per-node 2 examples/accelerate_image.py      (or: accelerate launch ...)

The images are drawn here: discs, squares and crosses in noise.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from adaptive import AdaptiveCompressor
from adaptive.integrations import metrics

SIZE = 16


def draw(count: int) -> TensorDataset:
    """Images (count, 1, SIZE, SIZE) and which of three shapes each shows."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(3, (count,), generator=generator)
    middle = 5 + 6 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 2 + 2 * torch.rand(count, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    down, right = (rows - middle[:, 0]).abs(), (columns - middle[:, 1]).abs()
    disc = down**2 + right**2 < radius**2
    square = torch.maximum(down, right) < radius
    cross = (torch.minimum(down, right) < 1) & square
    drawn = torch.stack([disc, square, cross])[shapes, torch.arange(count)].float()
    noise = 0.3 * torch.randn(drawn.shape, generator=generator)
    return TensorDataset((drawn + noise)[:, None], shapes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="so many more, with --resume")
    parser.add_argument("--folder", default="logs/accelerate_image")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(  # and mixed_precision="fp16", log_with="tensorboard", ...
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2
    )
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (SIZE // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, 3)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(draw(4096), batch_size=16, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    # These two lines compress, and save with accelerator.save_state().
    compressor = AdaptiveCompressor(base="topk", cf_range=(10, 1000)).attach(
        model, optimizer=optimizer
    )
    accelerator.register_for_checkpointing(compressor)
    if arguments.resume:
        accelerator.load_state(arguments.folder)

    step = 0
    while step < arguments.steps:
        for images, shapes in data:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), shapes)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % 10 == 0:
                    accelerator.log({"loss": loss.item(), **metrics(compressor)}, step=step)
            if step == arguments.steps:
                break

    accelerator.save_state(arguments.folder)
    accelerator.print(f"loss {loss.item():.3f}")
    accelerator.print(compressor.summary())
    compressor.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
