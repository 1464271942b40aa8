"""`python -m runs tune`: a search for the settings that train best."""

from runs.tune.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
