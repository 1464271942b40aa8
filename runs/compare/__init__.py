"""`python -m runs compare`: several ways to compress, trained in turn on the same task."""

from runs.compare.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
