"""The options of `python -m runs simulate`: those of train, but for the clock."""

from __future__ import annotations

import argparse
from typing import Any

from runs.options import (
    add_hook_arguments,
    add_output_arguments,
    add_server_argument,
    add_size_argument,
    add_task_arguments,
)
from runs.parser import UsageError, positive
from runs.policy_options import add_policy_arguments

WORKERS = 8
STEP_SECONDS = 0.1

HELP = """\
Train on n simulated workers in one process, under a modelled network.

The library runs as it would on n machines: each worker has its replica, its batches, its residual
and its own controller. They take turns, and exchange in memory what they would send. Quality, CF
decisions and bytes are those of `train` with as many processes; step times are modelled, since
how long one process takes says nothing about a cluster.

examples:
  python -m runs simulate --workers 16 --link 1gbit --step-seconds 0.2 --policy goodput
      what 16 machines would do that compute for 0.2 s a step and are joined by 1 Gbit/s
  python -m runs simulate --workers 16 --link 1gbit --step-seconds 0.2 --model-mb 102
      the same as if the model had the gradients of a ResNet-50: bytes take so much longer
  python -m runs simulate --workers 32 --link 100mbit --exchange all_gather --steps 100
  python -m runs simulate --workers 8 --policy fixed --cf 100 --memory none
      how quality goes at one CF, here without error feedback; no network: only compute takes time
  python -m runs simulate --resume logs/sim16 --steps 600

A run leaves the files that train leaves: report, replay and TensorBoard read them alike. Memory
grows with the workers, by a replica and what its compressor keeps. Ctrl-C stops after the step
and saves a checkpoint (exit code 130); a second Ctrl-C ends at once. Wrong options end with exit
code 2, a failed worker with 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; what is not given is not in the namespace."""
    parser.argument_default = argparse.SUPPRESS
    add_task_arguments(parser, workers=f"simulated in turn ({WORKERS})")
    add_hook_arguments(parser, link="model a network")
    add_policy_arguments(parser)
    add_output_arguments(parser)
    clock = parser.add_argument_group("how long a step takes")
    clock.add_argument(
        "--step-seconds",
        dest="fixed_clock",
        type=positive,
        metavar="SECONDS",
        help="of forward, backward and optimizer on a worker; --link's seconds come on top "
        f"({STEP_SECONDS:g})",
    )
    add_size_argument(clock, "--link's seconds")
    add_server_argument(clock, "as if")


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """The options as train has them. UsageError for what only train can do."""
    if given.get("policy") == "off":
        raise UsageError(
            "--policy off leaves out the library's hook, which models the step times; accepted: "
            "any other --policy (fixed with --cf 1 for a dense run)"
        )
    if "resume" in given:
        return given
    return {"workers": WORKERS, "fixed_clock": STEP_SECONDS, **given}
