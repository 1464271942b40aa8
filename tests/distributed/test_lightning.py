"""Lightning on two processes: the callback compresses, and resumes."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.frameworks import launched, lightning_module, needs, net, optimizer_of, rows
from tests.distributed.processes import run_ranks
from tests.distributed.setting import flat_parameters, listen

pytestmark = [pytest.mark.long, needs("lightning")]

STOP, STEPS = 5, 9  # five steps are an epoch: Lightning resumes at the beginning of one


def _trainer(folder: str, callbacks: list[Any], **options: Any) -> Any:
    from lightning.pytorch import Trainer

    settings = {"strategy": "ddp", "devices": 2, "max_steps": STEPS, **options}
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        logger=False,
        num_nodes=1,
        **settings,
    )


def _averaged(folder: str) -> tuple[torch.Tensor, int]:
    """Of a model with batch norm Lightning takes a last step with old gradients."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    module = lightning_module("adamw")
    module.net = torch.nn.Sequential(torch.nn.BatchNorm1d(12), module.net)
    callback = AdaptiveCompressionCallback(policy="fixed", cf_range=(10, 10))
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    options = {"max_steps": -1, "max_epochs": 2, "enable_checkpointing": False}
    trainer = _trainer(folder, [callback, averaging], **options)
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
    return flat_parameters(module), callback.compressor.summary().steps


def _fit(
    folder: str,
    optimizer: str,
    ckpt_path: str | None = None,
    module: Any = None,
    **options: Any,
) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    saving = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=STOP, save_top_k=-1
    )
    callback = AdaptiveCompressionCallback(
        base="topk+fp32", policy="fixed", cf_range=(10, 10), granularity="layer"
    )
    # Lightning would save the resumed run at its end, and the ranks meet before they are saved.
    saves = ckpt_path is None
    callbacks = [callback, saving] if saves else [callback]
    trainer = _trainer(folder, callbacks, enable_checkpointing=saves, **options)
    module = lightning_module(optimizer) if module is None else module
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer, module, callback


def _trains(rank: int, folder: str) -> dict[str, Any]:
    launched(rank)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for optimizer in ("sgd", "adamw"):
        own = str(Path(folder, optimizer))
        trainer, module, callback = _fit(own, optimizer)
        summary = callback.compressor.summary()
        resumed = _fit(own, optimizer, f"{own}/step={STOP}.ckpt")
        found[optimizer] = {
            "straight": flat_parameters(module),
            "resumed": flat_parameters(resumed[1]),
            "steps": (summary.steps, resumed[2].compressor.summary().steps),
            "wire": summary.wire_factor,
            "memory": callback.compressor.memory,
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "moments": [
                state["exp_avg"].flatten()[:5]
                for state in trainer.optimizers[0].state.values()
                if "exp_avg" in state
            ],
        }
    first = callback.compressor  # which somebody still holds, while the module is fitted again
    again, _, callback = _fit(folder, "adamw", module=module, max_steps=2)
    found["again"] = first.summary().steps, callback.compressor.summary().steps
    copied = pickle.loads(pickle.dumps(callback))
    found["copied"] = copied.compressor.detached, copied.state_dict()
    again.fit_loop.epoch_loop.max_steps = 4
    again.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
    found["again"] += (callback.compressor.summary().steps,)
    found["averaged"] = _averaged(folder)
    told = listen()
    options = {"max_steps": 2, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    _, module, callback = _fit(folder, "sgd", **options)
    found["clipping"] = [line for line in told if "gradient_clip_val" in line]
    found["after fit"] = [bool(callback.state_dict())]
    module.to("meta")  # as a fit on a GPU moves it to the CPU
    found["after fit"] += [bool(callback.state_dict()), "after fit()" in told[-1]]
    return found


def test_lightning_compresses_and_resumes(tmp_path: Path) -> None:
    first, second = run_ranks(2, _trains, str(tmp_path), limit=170)
    for optimizer, memory in (("sgd", "momentum"), ("adamw", "updates")):
        a, b = first[optimizer], second[optimizer]
        assert torch.equal(a["straight"], b["straight"])
        assert torch.equal(a["resumed"], b["resumed"])
        torch.testing.assert_close(a["resumed"], a["straight"], rtol=1e-3, atol=1e-4)
        assert a["steps"] == (STEPS, STEPS)
        assert a["memory"] == memory
        assert a["wire"] > 3
        assert a["logged"]["compression/cf"] == 10
        assert 0 < a["logged"]["compression/gain"] < 1
        assert a["logged"]["compression/wire_factor"] > 3
    assert first["again"] == second["again"] == (STEPS, 2, 2)
    assert first["copied"] == (True, {})
    assert torch.equal(first["averaged"][0], second["averaged"][0])
    assert first["averaged"][1] == 10  # two epochs
    moments = first["adamw"]["moments"], second["adamw"]["moments"]
    assert not torch.equal(moments[0][0], moments[1][0])  # each rank's own, so the test is of that
    assert first["after fit"] == second["after fit"] == [True, False, True]
    assert len(first["clipping"]) == 1
    assert "clip_norm" in first["clipping"][0]


def _trains_after_an_error(rank: int, folder: str) -> tuple[list[str], torch.Tensor, int]:
    from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    class Fails(Callback):
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ValueError("out of memory")

    launched(rank)
    warnings.simplefilter("ignore")
    module, told = lightning_module("adamw"), []
    callbacks = [
        AdaptiveCompressionCallback(base="topk+fp32", policy="fixed", cf_range=(10, 10)),
        OnExceptionCheckpoint(folder),
        Fails(),
    ]
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    try:
        _trainer(folder, callbacks).fit(module, loader)
    except ValueError as error:
        told.append(str(error))
    _, module, again = _fit(folder, "adamw", f"{folder}/on_exception.ckpt", module)
    return told, flat_parameters(module), again.compressor.summary().steps


def test_another_trainer_goes_on_after_an_error(tmp_path: Path) -> None:
    """The callback of the first trainer is still held by its script."""
    first, second = run_ranks(2, _trains_after_an_error, str(tmp_path))
    assert first[0] == second[0] == ["out of memory"]
    assert torch.equal(first[1], second[1])
    assert first[2] == STEPS


def _finds_a_rate(rank: int, folder: str) -> tuple[list[torch.Tensor], int]:
    """With a search for a learning rate before the second epoch, which changes none, and without.
    Each rank has the same rows in both runs, in the same order."""
    from lightning.pytorch.callbacks import LearningRateFinder

    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    class Finder(LearningRateFinder):  # as Lightning's pages show it
        def on_fit_start(self, *_: Any) -> None:
            return

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    launched(rank)
    warnings.simplefilter("ignore")
    loader = torch.utils.data.DataLoader(rows()[20 * rank :][:20], batch_size=4)
    ends = []
    for more in ([], [Finder(num_training_steps=5, update_attr=False)]):
        callback = AdaptiveCompressionCallback(policy="fixed", cf_range=(10, 10))
        options = {"use_distributed_sampler": False, "enable_checkpointing": False}
        module = lightning_module("sgd")
        _trainer(folder, [callback, *more], **options).fit(module, loader)
        ends.append(flat_parameters(module))
    return ends, callback.compressor.summary().steps


def test_it_goes_back_with_a_learning_rate_finder_within_training(tmp_path: Path) -> None:
    for (without, found), steps in run_ranks(2, _finds_a_rate, str(tmp_path)):
        assert torch.equal(without, found)
        assert steps == STEPS


def _makes_its_optimizer(rank: int, folder: str) -> tuple[torch.Tensor, float]:
    launched(rank)
    warnings.simplefilter("ignore")

    class Itself(type(lightning_module("sgd"))):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.sgd.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.sgd.step()

        def configure_optimizers(self) -> None:
            self.sgd = optimizer_of("sgd", self.parameters())

    module = Itself()
    _, module, callback = _fit(folder, "sgd", module=module, max_steps=-1, max_epochs=2)
    return flat_parameters(module), callback.compressor.summary().wire_factor


def test_a_module_may_make_its_optimizers_itself(tmp_path: Path) -> None:
    """For the trainer it then has a stand-in without parameters."""
    (first, wire), (second, _) = run_ranks(2, _makes_its_optimizer, str(tmp_path))
    assert torch.equal(first, second)
    assert not torch.equal(first, flat_parameters(net()))
    assert wire > 3
