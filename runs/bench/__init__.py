"""`python -m runs bench`: speed and memory as ratios against a peer in the same run."""

from runs.bench.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
