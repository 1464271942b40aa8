"""What to train: tasks by name."""

from __future__ import annotations

from functools import cache
from typing import Any

from runs.config import TrainConfig
from runs.metric import higher_is_better, parse_metric
from runs.needs import left_out, of_papers
from runs.tasks.base import Batch, DataNotFoundError, Task, trainable
from runs.tasks.text import TextTask

DEFAULT_TASK = "text"


@cache
def tasks() -> dict[str, type[Task]]:
    """All tasks by name. Those of papers import this package, and so are imported late."""
    return {"text": TextTask, **of_papers("tasks", "TASKS")}


def quality_of(config: TrainConfig) -> tuple[str, bool]:
    """The name of what a run is judged by, and whether more of it is better. UsageError for a
    metric of a script that is none."""
    if not config.script:
        return task_named(config.task).quality_name, task_named(config.task).higher_is_better
    name = "quality" if config.metric is None else parse_metric(config.metric).name
    return name, config.better == "higher" if config.better else higher_is_better(name)


def make_task(task: str = DEFAULT_TASK, **arguments: Any) -> Task:
    """Build a task; `arguments` are those of `Task`. Raises ValueError naming the argument for an
    unknown task or model and for values out of range, DataNotFoundError when the data set is not
    there."""
    kind, model = task_named(task), arguments.get("model")
    if model is not None and model not in kind.models:
        others = ", ".join(name for name, each in tasks().items() if model in each.models)
        raise ValueError(
            f"model={model!r} does not go with task {task!r}; accepted: {', '.join(kind.models)}"
            + (f"; or a task that {model} goes with: {others}" if others else left_out())
        )
    return kind(**arguments)


def task_named(task: str) -> type[Task]:
    """The task's class. ValueError for an unknown one."""
    if task not in tasks():
        raise ValueError(f"task={task!r} is unknown; accepted: {', '.join(tasks())}{left_out()}")
    return tasks()[task]


__all__ = [
    "DEFAULT_TASK",
    "Batch",
    "DataNotFoundError",
    "Task",
    "make_task",
    "quality_of",
    "task_named",
    "tasks",
    "trainable",
]
