"""The model that a run starts with: new, or another run's (`--init`), with adapters of low rank
(`--lora`)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from runs.checkpoint import find_checkpoint
from runs.config import TrainConfig
from runs.papers.lora import add_adapters
from runs.parser import UsageError
from runs.tasks import TASKS, Task


def initial_model(config: TrainConfig, task: Task, read_weights: bool = True) -> nn.Module:
    """The model on the CPU, the same on all ranks.

    read_weights: take the weights of --init, if it is given. A run that goes on from a checkpoint
    need not: the checkpoint holds all parameters, the frozen ones too, and the run of --init may
    be gone. UsageError if --init or --lora cannot be done.
    """
    model = task.build_model()
    if config.init is not None and read_weights:
        _take_weights(model, config, config.init)
        task.restart(model)
    if config.lora is not None:
        try:
            add_adapters(model, config.lora, config.seed)
        except ValueError as error:
            raise UsageError(
                f"--lora {config.lora}: {error}; got --model {_model(config)}"
            ) from error
    return model


def _take_weights(model: nn.Module, config: TrainConfig, init: str) -> None:
    """Load the model of the checkpoint in that run's folder, but neither its optimizer nor its
    step. UsageError if there is none, or if it is another model's."""
    try:
        checkpoint = find_checkpoint(Path(init))
        _check_same_model(config, checkpoint.config, init)
        state = checkpoint.read(0)
    except UsageError as error:
        raise UsageError(str(error).replace("--resume", "--init", 1)) from error
    try:
        model.load_state_dict(state["model"])
    except Exception as error:  # whatever does not fit; torch says it in several lines
        said = " ".join(str(error).split())
        raise UsageError(f"--init {init}: its weights do not fit the model: {said}") from error


def _check_same_model(config: TrainConfig, other: TrainConfig, init: str) -> None:
    if (other.task, _model(other)) != (config.task, _model(config)):
        raise UsageError(
            f"--init {init}: is a run of --task {other.task} --model {_model(other)}; accepted: a "
            f"run of --task {config.task} --model {_model(config)}"
        )
    if other.lora is not None:
        raise UsageError(
            f"--init {init}: is a run with --lora {other.lora}, whose weights are not merged; "
            f"accepted: a run without --lora"
        )


def _model(config: TrainConfig) -> str:
    """The model's name, the task's default if none is given."""
    if config.model is None and config.task in TASKS:
        return TASKS[config.task].models[0]
    return str(config.model)
