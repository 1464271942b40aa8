"""`python -m runs report`: runs that are done, as one page to read."""

from runs.report.command import HELP, add_arguments, main

__all__ = ["HELP", "add_arguments", "main"]
