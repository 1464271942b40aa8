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

from torch.nn.parallel import DistributedDataParallel

from adaptive.integrations import metrics
from adaptive.model.wrappers import unwrap
from adaptive.session.compressor import AdaptiveCompressor

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:  # the same under its older name
        from pytorch_lightning.callbacks import Callback

log = logging.getLogger("adaptive")


class AdaptiveCompressionCallback(Callback):
    """Compresses the gradient exchange of Lightning's DDP strategies.

    compressor: an existing one; None: a new one for each `fit`, made with the other arguments. It
    gets the trainer's optimizers and `GradScaler`. The trainer's checkpoints hold its states of all
    ranks. The attribute `compressor` is the one in use.

    TypeError when training starts with a strategy of several processes that is not DDP.
    """

    def __init__(self, compressor: AdaptiveCompressor | None = None, **arguments: Any) -> None:
        if compressor is not None and arguments:
            raise TypeError("give a compressor or the arguments of one, not both")
        self._given, self._arguments = compressor, arguments
        self.compressor = compressor or AdaptiveCompressor(**arguments)
        self._model: DistributedDataParallel | None = None
        self._loaded: Mapping[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget a state that was read for a validation. The trainer reads the checkpoint later."""
        self._loaded = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, and go on from the checkpoint if there was one."""
        model = unwrap(trainer.strategy.model, None).model
        if not isinstance(model, DistributedDataParallel):
            _refuse(trainer)
            self._model = None
            return
        if self._model is not None:
            self.compressor = self._given or AdaptiveCompressor(**self._arguments)
        self._model = model
        self.compressor.attach(
            model,
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self.compressor.load_state_dict(loaded)
        clips = trainer.gradient_clip_val
        if clips and self.compressor.memory == "momentum" and trainer.is_global_zero:
            log.warning(
                "gradient_clip_val=%g clips velocities, since with SGD's momentum p.grad holds "
                "those: use AdaptiveCompressionCallback(memory=Momentum(clip_norm=...)) without "
                "gradient_clip_val, or memory='residual' with it",
                clips,
            )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log CF, gain and wire factor as often as the trainer logs."""
        step, every = trainer.global_step, max(1, trainer.log_every_n_steps)
        if self._model is not None and step and step % every == 0:
            pl_module.log_dict(metrics(self.compressor), rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take in the last step and close the timeline."""
        self.compressor.close()

    def state_dict(self) -> dict[str, Any]:
        """A part of the trainer's checkpoint. The trainer asks all ranks, and writes rank 0's."""
        if self._model is None:
            return {}
        return self.compressor.state_dict(checkpoint="gathered")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training starts."""
        self._loaded = state_dict or None


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
