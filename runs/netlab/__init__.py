"""`python -m runs netlab`: real slow links on one machine, a network namespace for each worker."""

from runs.netlab.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
