"""Lightning: a callback for its `Trainer`.

    trainer = Trainer(strategy="ddp", callbacks=[AdaptiveCompressionCallback(cf_range=(10, 1000))])

Lightning itself registers communication hooks on CUDA only, and has no place to hand the optimizer
over. It restores callbacks before it wraps the model, and optimizers after that. So the callback
attaches and loads when training starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from adaptive.integrations import LEFT_OUT, made, metrics
from adaptive.model.parameters import parameters_of
from adaptive.model.wrappers import unwrap
from adaptive.session.compressor import AdaptiveCompressor
from policies import DENSE

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:  # the same under its older name
        from pytorch_lightning.callbacks import Callback

log = logging.getLogger("adaptive")

AFTER_FIT = (
    "this checkpoint has no state of the compressor: after fit() Lightning has moved the model off "
    "its device, where the ranks cannot exchange their residuals. Training that goes on from it "
    "begins with empty ones. ModelCheckpoint(save_last=True) saves them within fit()"
)


class AdaptiveCompressionCallback(Callback):
    """Compresses the gradient exchange of Lightning's DDP strategies.

    compressor: an existing one; None: a new one for each `fit`, made with the other arguments. It
    gets the trainer's optimizers and `GradScaler`. The trainer's checkpoints hold its states of all
    ranks. The attribute `compressor` is the one in use.

    When training starts, TypeError with a strategy of several processes that is not DDP, and
    ValueError for manual optimization with DDP's `static_graph`.
    """

    def __init__(self, compressor: AdaptiveCompressor | None = None, **arguments: Any) -> None:
        self._given, self._arguments = compressor, arguments
        self.compressor = made(compressor, arguments)
        self._model: DistributedDataParallel | None = None
        self._device: torch.device | None = None  # of the model while it trained
        self._loaded: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings, and no model. Lightning adds `log` and `log_dict`, which are the
        module's."""
        of_module = ("log", "log_dict")
        return {n: each for n, each in vars(self).items() if n not in of_module} | {"_model": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget a state that was read for a validation. The trainer reads the checkpoint later.
        A fit also forgets the fit before, whose state a checkpoint before the first step (the one
        that a learning rate finder goes back to) must not hold."""
        self._loaded = None
        if stage == "fit" and self._model is not None:
            self._model = None
            if self._given is None:
                self.compressor.running().leave()  # as after a fit that an exception has ended
                self.compressor = AdaptiveCompressor(**self._arguments)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, and go on from the checkpoint if there was one."""
        model = unwrap(trainer.strategy.model, None).model
        if not isinstance(model, DistributedDataParallel):
            _refuse(trainer)
            if self._loaded is not None:
                log.warning(LEFT_OUT)
            return
        if model.static_graph and not pl_module.automatic_optimization:
            raise ValueError(
                "static_graph=True does not go with manual optimization: Lightning has DDP send "
                "the first gradients after backward, where none can be compressed; leave one of "
                "the two out"
            )
        # If a module makes its optimizers itself, Lightning has a stand-in, which steps nothing.
        own = {*pl_module.parameters()}
        optimizers = [each for each in trainer.optimizers if own & {*parameters_of(each)}]
        self.compressor.attach(
            model,
            optimizer=optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )
        self._model, self._device = model, next(model.parameters()).device
        self._go_on()
        clips = trainer.gradient_clip_val
        if clips and self.compressor.memory == "momentum" and trainer.is_global_zero:
            log.warning(
                "gradient_clip_val=%g clips velocities, since with SGD's momentum p.grad holds "
                "those: use AdaptiveCompressionCallback(memory=Momentum(clip_norm=...)) without "
                "gradient_clip_val, or memory='residual' with it",
                clips,
            )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on from a checkpoint that was restored within training. A learning rate finder at the
        beginning of an epoch goes back to one."""
        self._go_on()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Drop the gradients of the last epoch, with which Lightning steps once at the end of an
        epoch without backward passes (`StochasticWeightAveraging` has one for batch norm). After a
        compressed step they are each rank's own, or velocities, and were exchanged already."""
        compressed = self._model is not None and self.compressor.cf != DENSE
        if compressed and trainer.fit_loop._skip_backward:
            optimizer.zero_grad()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log CF, gain and wire factor as often as the trainer logs. The trainer counts batches
        that have stepped. Its `global_step` counts the steps of all optimizers."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if self._model is not None and step % max(1, trainer.log_every_n_steps) == 0:
            pl_module.log_dict(metrics(self.compressor), rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take in the last step and close the timeline. A later fit wraps the module anew, and may
        have another callback, while somebody still holds this one's compressor."""
        self.compressor.close()
        if self._model is not None and self._given is None:
            self.compressor.running().leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the module to another trainer. No collective: other ranks may go on. A checkpoint
        of this moment comes after it."""
        if self._model is not None and self._given is None:
            self.compressor.running().leave()

    def state_dict(self) -> dict[str, Any]:
        """A part of the trainer's checkpoint. The trainer asks all ranks, and writes rank 0's."""
        if self._model is None:
            return {}
        if self._device is not None and next(self._model.parameters()).device != self._device:
            log.warning(AFTER_FIT)
            return {}
        return self.compressor.state_dict(checkpoint="gathered")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training starts, or goes on: the trainer restores optimizers after
        callbacks."""
        self._loaded = state_dict or None

    def _go_on(self) -> None:
        """Load the state that was kept, if the compressor is attached."""
        if self._loaded is not None and self._model is not None:
            loaded, self._loaded = self._loaded, None
            self.compressor.load_state_dict(loaded)


def _refuse(trainer: Any) -> None:
    """Warn that one process compresses nothing; TypeError if there are several."""
    strategy = type(trainer.strategy).__name__
    if trainer.world_size > 1:
        raise TypeError(
            f"compression needs DistributedDataParallel, got {strategy} with "
            f"{trainer.world_size} processes: Trainer(strategy='ddp')"
        )
    log.warning(
        "%s: there is one process, so no gradient is exchanged and none compressed", strategy
    )
