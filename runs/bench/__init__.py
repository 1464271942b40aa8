"""`python -m runs bench`: speed and memory as ratios against a peer in the same run."""

from runs.bench.command import add_arguments, main

__all__ = ["add_arguments", "main"]
