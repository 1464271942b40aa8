"""`python -m runs simulate`: n workers in one process, under a modelled network."""

from runs.simulate.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
