"""The tasks of papers, by name."""

from __future__ import annotations

from runs.papers.images import Cifar10Task, Cifar100Task, FashionMnistTask
from runs.papers.words import WordsTask
from runs.tasks.base import Task

TASKS: dict[str, type[Task]] = {
    "cifar10": Cifar10Task,
    "cifar100": Cifar100Task,
    "fashion-mnist": FashionMnistTask,
    "words": WordsTask,
}
