"""The Lightning callback without DDP: one process is told, several are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.frameworks import needs
from tests.distributed.setting import listen

pytestmark = [pytest.mark.long, needs("lightning")]


def _trainer(world_size: int) -> Any:
    strategy = SimpleNamespace(model=torch.nn.Linear(2, 2))
    return SimpleNamespace(strategy=strategy, world_size=world_size, global_step=5)


def _ddp() -> Any:
    """A model of DDP's class that needs no process group."""
    return DistributedDataParallel.__new__(DistributedDataParallel)


def test_without_ddp_one_process_is_told_and_several_are_refused() -> None:
    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    told = listen()
    callback = AdaptiveCompressionCallback(cf_range=(10, 100))
    callback.on_train_start(_trainer(1), None)
    callback.on_train_end(_trainer(1), None)
    assert callback.state_dict() == {}
    assert len(told) == 1
    assert "one process" in told[0]
    callback.load_state_dict({"of": "two ranks"})
    callback.on_train_start(_trainer(1), None)
    assert "momentum of SGD" in told[-1]
    with pytest.raises(TypeError, match=r"got SimpleNamespace with 4 processes.*strategy='ddp'"):
        AdaptiveCompressionCallback().on_train_start(_trainer(4), None)
    with pytest.raises(TypeError, match="not both"):
        AdaptiveCompressionCallback(callback.compressor, cf_range=(10, 100))
    with pytest.raises(ValueError, match="base"):  # when it is made, not when training starts
        AdaptiveCompressionCallback(base="top")
    with pytest.raises(TypeError, match=r"compressor must be an Adap.*base=.*, got 'topk'"):
        AdaptiveCompressionCallback("topk")


def test_a_checkpoint_before_the_first_step_holds_nothing_of_an_earlier_fit() -> None:
    """A learning rate finder saves one, goes back to it, and so would begin with an old state."""
    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    callback, left = AdaptiveCompressionCallback(cf_range=(10, 100)), []
    session = SimpleNamespace(leave=lambda: left.append(True))
    states = {"running": lambda: session, "state_dict": lambda **_: {"of": "an earlier fit"}}
    callback.compressor = earlier = SimpleNamespace(**states)
    callback._model = _ddp()
    callback.setup(None, None, "validate")
    assert callback.state_dict() == {"of": "an earlier fit"}
    callback.setup(None, None, "fit")
    assert callback.state_dict() == {}
    assert left == [True]
    assert callback.compressor is not earlier


def test_it_logs_with_the_trainer_though_optimizers_step_unevenly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GAN's: one steps in every batch, another in every third."""
    from adaptive.integrations import lightning

    monkeypatch.setattr(lightning, "metrics", lambda _: {"compression/cf": 10.0})
    callback = lightning.AdaptiveCompressionCallback(cf_range=(10, 100))
    callback._model = _ddp()
    logged: list[int] = []
    for batch in range(12):
        epoch_loop = SimpleNamespace(_batches_that_stepped=batch)
        trainer = SimpleNamespace(
            fit_loop=SimpleNamespace(epoch_loop=epoch_loop),
            global_step=batch + 1 + batch // 3,
            log_every_n_steps=4,
        )
        module = SimpleNamespace(log_dict=lambda *_, batch=batch, **__: logged.append(batch))
        callback.on_train_batch_end(trainer, module, None, None, batch)
    assert logged == [3, 7, 11]  # where Lightning's own loggers write


def test_a_static_graph_with_manual_optimization_is_refused() -> None:
    """Lightning has DDP send the first gradients when backward has ended."""
    from adaptive.integrations.lightning import AdaptiveCompressionCallback

    trainer, module = _trainer(2), SimpleNamespace(automatic_optimization=False)
    trainer.strategy.model = _ddp()
    trainer.strategy.model.static_graph = True
    with pytest.raises(ValueError, match="static_graph=True does not go with manual optimization"):
        AdaptiveCompressionCallback().on_train_start(trainer, module)
