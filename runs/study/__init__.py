"""`python -m runs study`: experiments behind the notes in docs/."""

from runs.study.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
