"""Accelerate and Hugging Face's Trainer on two processes: compressed, and resumed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adaptive import AdaptiveCompressor
from tests.distributed.frameworks import TrainerModel, launched, needs, net, optimizer_of, rows
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, listen

pytestmark = [pytest.mark.long, needs("accelerate", "transformers")]

STOP, STEPS = 4, 9
EVERY = 2
"""Backward passes of a step that is accumulated."""


class Accelerated:
    """A script with Accelerate: accumulation and clipping as its documentation has them."""

    def __init__(self, optimizer: str, clip: float | None = None, scales: bool = False) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EVERY)
        if scales:  # as with mixed_precision="fp16", which a CPU has not
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.model, self.optimizer = self.accelerator.prepare(
            bare := net(), optimizer_of(optimizer, bare.parameters())
        )
        self.compressor = AdaptiveCompressor(
            "topk+fp32", (10, 10), policy="fixed", granularity="layer"
        )
        self.compressor.attach(self.model, optimizer=self.optimizer)
        self.accelerator.register_for_checkpointing(self.compressor)
        self.clip = clip

    def train(self, rank: int, start: int, stop: int) -> Tensor:
        data = rows()
        for step in range(EVERY * start, EVERY * stop):
            with self.accelerator.accumulate(self.model):
                batch = data[(2 * step + rank) % len(data)]
                loss = ((self.model(batch["x"]) - batch["y"]) ** 2).mean()
                self.accelerator.backward(loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return flat_parameters(self.model)


def _accelerated(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warnings.simplefilter("ignore")
    from adaptive.integrations import metrics

    told = listen()
    found: dict[str, Any] = {}
    for which, clip in (("sgd", None), ("adamw", 0.1), ("sgd, scaled", None)):
        made = which.partition(",")[0], clip, "scaled" in which
        run = Accelerated(*made)
        run.train(rank, 0, STOP)
        run.accelerator.save_state(f"{folder}/{which}")
        straight = run.train(rank, STOP, STEPS)
        resumed = Accelerated(*made)
        resumed.accelerator.load_state(f"{folder}/{which}")
        found[which] = {
            "straight": straight,
            "resumed": resumed.train(rank, STOP, STEPS),
            "steps": run.compressor.summary().steps,
            "memory": run.compressor.memory,
            "metrics": metrics(run.compressor),
        }
        found[which]["told"], told[:] = list(told), []
    clipped = Accelerated("sgd", 1e-3)
    clipped.train(rank, 0, 4)
    found["clipped"] = clipped.compressor.memory, [line for line in told if "clip" in line]
    return found


def test_accelerate_compresses_and_resumes(both: list[Any]) -> None:
    first, second = (of_rank["accelerate"] for of_rank in both)
    for which, memory in (("sgd", "momentum"), ("adamw", "updates"), ("sgd, scaled", "momentum")):
        a, b = first[which], second[which]
        assert torch.equal(a["straight"], b["straight"])
        assert torch.equal(a["resumed"], b["resumed"])
        torch.testing.assert_close(a["resumed"], a["straight"], rtol=1e-3, atol=1e-4)
        assert a["steps"] == STEPS  # not of every backward
        assert a["memory"] == memory
        assert a["metrics"]["compression/cf"] == 10
        assert a["metrics"]["compression/wire_factor"] > 3
        assert a["told"] == []
    same = first["sgd"]["straight"], first["sgd, scaled"]["straight"]
    torch.testing.assert_close(*same, rtol=1e-3, atol=1e-4)
    # Clipping velocities is found out, said, and given up.
    assert first["clipped"][0] == second["clipped"][0] == "residual"


def _train(
    folder: str,
    optimizer: str,
    resume: bool | str = False,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    from adaptive.integrations.hf import AdaptiveCompressionCallback

    callback = AdaptiveCompressionCallback(
        base="topk+fp32", policy="fixed", cf_range=(10, 10), granularity="layer", **options
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=STOP,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        optim="sgd" if optimizer == "sgd" else "adamw_torch",
        optim_args="momentum=0.9" if optimizer == "sgd" else None,
        max_grad_norm=0.0 if optimizer == "sgd" else 1.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        # The default is True, with which buckets never change.
        ddp_find_unused_parameters=False if optimizer == "sgd" else None,
    )
    model = TrainerModel() if model is None else model
    optimizers: tuple[Any, Any] = (None, None)
    if optimizer == "sgd":
        optimizers = (optimizer_of("sgd", model.parameters()), None)
    trainer = Trainer(
        model, arguments, train_dataset=rows(), callbacks=[callback], optimizers=optimizers
    )
    resume = f"{folder}/checkpoint-{STOP}" if resume is True else resume
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, callback


def _trained(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warnings.simplefilter("ignore")
    from adaptive.integrations.hf import FILE

    found: dict[str, Any] = {}
    for optimizer in ("sgd", "adamw"):
        own = f"{folder}/{optimizer}"
        trainer, callback = _train(own, optimizer)
        resumed = _train(own, optimizer, resume=True)
        logged = [line for line in trainer.state.log_history if "loss" in line]
        found[optimizer] = {
            "straight": flat_parameters(trainer.model),
            "resumed": flat_parameters(resumed[0].model),
            "steps": resumed[1].compressor.summary().steps,
            "memory": callback.compressor.memory,
            "wire": callback.compressor.summary().wire_factor,
            "logged": logged[-1],
        }
        first = callback.compressor
        # With the same DDP and optimizer, into which the checkpoint is loaded before it attaches.
        trainer.train(resume_from_checkpoint=f"{own}/checkpoint-{STOP}")
        found[optimizer]["resumed here"] = flat_parameters(trainer.model)
        trainer.train()
        again = callback.compressor
        found[optimizer]["again"] = again is not first and again.summary().steps
        # Another trainer, with another DDP of the same parameters and a callback of its own.
        other = _train(f"{own}/other", optimizer, model=trainer.model)
        found[optimizer]["other"] = other[1].compressor.summary().steps
    told = listen()
    _train(own, optimizer, resume=True, resume_from=f"{folder}/elsewhere")
    found["told"] = [line for line in told if "resume_from" in line]
    told.clear()
    # Another run has left a checkpoint of the same step in the output folder.
    model = TrainerModel()
    nn.init.ones_(model.net[0].bias)
    _train(f"{folder}/used", "adamw", model=model)
    _, callback = _train(f"{folder}/used", "adamw", resume=f"{own}/checkpoint-{STOP}")
    found["used"] = callback.compressor.summary().steps, told
    # Training has raised before the first forward; then another trainer trains the same model.
    model = TrainerModel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "train", Mock(side_effect=OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            _train(f"{folder}/raised", "adamw", model=model)
    found["raised"] = _train(f"{folder}/raised", "adamw", model=model)[1].compressor.summary().steps
    if rank == 0:
        Path(own, f"checkpoint-{STOP}", FILE).write_bytes(b"damaged")
    dist.barrier()
    with pytest.raises(ValueError, match=rf"checkpoint-{STOP}/{FILE} cannot be read: "):
        _train(own, "adamw", resume=True)
    return found


def _both(rank: int, folder: str) -> dict[str, Any]:
    return {
        "accelerate": _accelerated(rank, f"{folder}/accelerate"),
        "trainer": _trained(rank, f"{folder}/trainer"),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of the same processes: imports alone take many seconds."""
    return run_ranks(2, _both, str(tmp_path_factory.mktemp("both")), limit=170)


def test_the_trainer_compresses_and_resumes(both: list[Any]) -> None:
    first, second = (of_rank["trainer"] for of_rank in both)
    for optimizer, memory in (("sgd", "momentum"), ("adamw", "updates")):
        a, b = first[optimizer], second[optimizer]
        assert a["again"] == b["again"] == a["other"] == b["other"] == STEPS
        torch.testing.assert_close(a["resumed here"], a["resumed"], rtol=1e-5, atol=1e-6)
        assert torch.equal(a["straight"], b["straight"])
        assert torch.equal(a["resumed"], b["resumed"])
        torch.testing.assert_close(a["resumed"], a["straight"], rtol=1e-3, atol=1e-4)
        assert a["steps"] == STEPS
        assert a["memory"] == memory
        assert a["wire"] > 3
        assert a["logged"]["compression/cf"] == 10
        assert 0 < a["logged"]["compression/gain"] < 1
    assert len(first["told"]) == 1
    assert first["raised"] == STEPS
    steps, told = first["used"]
    assert steps == STEPS - STOP  # the compressor has begun anew
    assert len(told) == 1
    assert "of another run" in told[0]


def test_what_accelerate_makes_in_a_single_process_is_refused() -> None:
    from accelerate import Accelerator

    bare = net()
    prepared = Accelerator(cpu=True).prepare(bare, optimizer_of("sgd", bare.parameters()))
    with pytest.raises(TypeError, match=r"got Sequential: .*single process.* leave attach\(\) out"):
        AdaptiveCompressor().attach(prepared[0], optimizer=prepared[1])


def test_what_the_callback_does_not_take_is_refused() -> None:
    from adaptive.integrations.hf import AdaptiveCompressionCallback

    with pytest.raises(TypeError, match="not both"):
        AdaptiveCompressionCallback(AdaptiveCompressor(), policy="fixed")
    with pytest.raises(TypeError, match=r"compressor must be an Adap.*base=.*, got 'topk'"):
        AdaptiveCompressionCallback("topk")  # type: ignore[arg-type]


def test_the_folder_of_a_trials_checkpoint_is_found(tmp_path: Path) -> None:
    from transformers import TrainerState, TrainingArguments

    from adaptive.integrations.hf import _checkpoint

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    state = TrainerState(global_step=STOP, is_hyper_param_search=True)
    assert _checkpoint(arguments, state) == tmp_path / f"checkpoint-{STOP}"  # none is there
    for number in (1, 0):
        made = tmp_path / f"run-{number}" / f"checkpoint-{STOP}"
        made.mkdir(parents=True)
        os.utime(made, (100 + number, 100 + number))
    assert _checkpoint(arguments, state) == tmp_path / "run-1" / f"checkpoint-{STOP}"


def test_one_process_is_told_what_it_leaves_out_of_a_checkpoint(tmp_path: Path) -> None:
    from adaptive.integrations.hf import FILE, AdaptiveCompressionCallback

    args = SimpleNamespace(world_size=1, output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=3, is_hyper_param_search=False)
    told = listen()
    (tmp_path / "checkpoint-3").mkdir()
    AdaptiveCompressionCallback().on_train_begin(args, state, None)  # type: ignore[arg-type]
    assert "momentum of SGD" not in told[-1]
    (tmp_path / "checkpoint-3" / FILE).touch()
    AdaptiveCompressionCallback().on_train_begin(args, state, None)  # type: ignore[arg-type]
    assert "momentum of SGD" in told[-1]
