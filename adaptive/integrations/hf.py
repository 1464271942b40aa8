"""Hugging Face's `Trainer`: a callback.

    trainer = Trainer(..., callbacks=[AdaptiveCompressionCallback(cf_range=(10, 1000))])

The trainer shows its callbacks the bare model. So a hook catches the wrapped one at its first
forward, before the first exchange.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adaptive.integrations import LEFT_OUT, made, metrics
from adaptive.model.wrappers import unwrap
from adaptive.network.agreement import all_or_none
from adaptive.session.compressor import AdaptiveCompressor

log = logging.getLogger("adaptive")

FILE = "adaptive_compressor.pt"
"""The file in the trainer's checkpoint folders with the states of all ranks, written by rank 0."""


class AdaptiveCompressionCallback(TrainerCallback):
    """Compresses the gradient exchange of a `Trainer` on several processes.

    compressor: an existing one; None: a new one for each `train()`, made with the other arguments.
    It gets the trainer's optimizer and `GradScaler`. resume_from: the checkpoint folder that
    `train(resume_from_checkpoint=...)` is given, which callbacks do not see; None: the folder of
    the step in the output folder. The attribute `compressor` is the one in use.

    CF, gain and wire factor are added to the trainer's logs. RuntimeError after the first step of
    several processes whose model is not DDP.
    """

    _catching: ClassVar[RemovableHandle | None] = None
    """The hook that catches the wrapped model. All callbacks share it: a `train()` that has raised
    before the first forward leaves its hook, which must not attach to the model of another."""

    def __init__(
        self,
        compressor: AdaptiveCompressor | None = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        self._given, self._arguments = compressor, arguments
        self.compressor = made(compressor, arguments)
        self._resume_from = resume_from
        self._model: DistributedDataParallel | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings, and no model."""
        return {**vars(self), "_model": None}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = self._resume_from or _checkpoint(args, state)
        if args.world_size == 1:
            log.warning("there is one process: no gradient is exchanged and none compressed")
            if state.global_step and Path(folder, FILE).exists():
                log.warning(LEFT_OUT)
            return
        bare, optimizer = _bare(kwargs["model"]), kwargs["optimizer"]
        logged = str(state.log_history)  # as the checkpoint has it

        def catch(module: nn.Module, _: Any) -> None:
            found = unwrap(module, None).model
            if isinstance(found, DistributedDataParallel) and _bare(found.module) is bare:
                self._stop_catching()
                self._attach(found, optimizer, Path(folder) if state.global_step else None, logged)

        self._stop_catching()
        AdaptiveCompressionCallback._catching = register_module_forward_pre_hook(catch)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._catching is not None:
            self._stop_catching()
            raise RuntimeError(
                f"compression needs DistributedDataParallel, and none has been seen in a step of "
                f"{args.world_size} processes (FSDP, DeepSpeed?)"
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._model is None:
            return
        gathered = self.compressor.state_dict(checkpoint="gathered")  # on every rank
        if "ranks" in gathered:
            path = _checkpoint(args, state) / FILE
            torch.save(gathered, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._model is None or logs is None or "loss" not in logs:
            return
        found = metrics(self.compressor)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop_catching()
        self.compressor.close()
        if self._model is not None and self._given is None:
            # Another trainer may wrap the model anew, while somebody still holds this compressor.
            self.compressor.running().leave()

    def _stop_catching(self) -> None:
        if self._catching is not None:
            self._catching.remove()
            AdaptiveCompressionCallback._catching = None

    def _attach(
        self, model: DistributedDataParallel, optimizer: Any, folder: Path | None, logged: str
    ) -> None:
        """Attach to a model. folder: the checkpoint to go on from; None: none. logged: the history
        in that checkpoint."""
        known, self._model = self._model, None  # nothing else keeps a model of another `train()`
        if known is not None and self._given is None:
            if known is model and folder is None:
                self.compressor.detach()  # the optimizer goes on with its velocities and moments
            # Model and optimizer of a checkpoint are there already: detaching would change them.
            self.compressor.running().leave()
            self.compressor = AdaptiveCompressor(**self._arguments)
        if known is not model or self._given is None:
            self.compressor.attach(model, optimizer=optimizer)
        self._model = model
        if folder is None:
            return
        path, group = folder / FILE, model.process_group
        # Rank 0 has written it, perhaps where no other node sees it.
        read: list[Any] = [None]
        with all_or_none(group, "no state can be loaded:"):
            if dist.get_rank(group) == 0 and path.exists() and _has_logged(folder, logged):
                try:
                    read = [torch.load(path, map_location="cpu", weights_only=True)]
                except Exception as error:  # which does not name the file
                    raise ValueError(f"{path} cannot be read: {error!r}") from error
        dist.broadcast_object_list(read, dist.get_global_rank(group, 0), group)
        if read[0] is None:
            log.warning(
                "training resumes, but %s is not there, or of another run, so that the compressor "
                "begins anew: give AdaptiveCompressionCallback(resume_from=...) the folder of the "
                "checkpoint",
                path,
            )
            return
        self.compressor.load_state_dict(read[0])


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the trainer's checkpoint at this step. Each trial of a hyperparameter search
    has a folder of its own, which callbacks do not see: it is the one with the newest such."""
    folder, name = Path(args.output_dir or "."), f"checkpoint-{state.global_step}"
    of_trials = folder.glob(f"*/{name}") if state.is_hyper_param_search else ()
    return max(of_trials, key=lambda path: path.stat().st_mtime, default=folder / name)


def _has_logged(folder: Path, logged: str) -> bool:
    """Whether the checkpoint in a folder has this history (as text, in which nan is nan). One that
    has not is another run's, whose compressor's state would replace the model that was loaded."""
    file = folder / "trainer_state.json"
    return not file.exists() or str(TrainerState.load_from_json(str(file)).log_history) == logged


def _bare(model: Any) -> Any:
    """The module inside torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)
