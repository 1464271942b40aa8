"""`python -m runs replay`: what a policy would have chosen in a recorded run."""

from runs.replay.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
