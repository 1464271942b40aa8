"""The simulate command: a run of train, whose workers are threads that take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from runs.expression import PLAIN
from runs.option_types import Positive, metavar
from runs.parser import UsageError, options
from runs.settings import (
    Compressing,
    Keeping,
    Modelling,
    Optimizing,
    PolicyArguments,
    Resuming,
    Training,
)

WORKERS = 8
STEP_SECONDS = 0.1

HELP = """\
Train on n simulated workers in one process, under a modelled network.

The library runs as it would on n machines: each worker has its replica, its batches, its residual
and its own controller. They take turns, and exchange in memory what they would send. Quality, CF
decisions and bytes are those of `train` with as many processes; step times are modelled, since
how long one process takes says nothing about a cluster.

examples:
  python -m runs simulate --workers 16 --network 1gbit --step-seconds 0.2 --policy goodput
      what 16 machines would do that compute for 0.2 s a step and are joined by 1 Gbit/s
  python -m runs simulate --workers 16 --network 1gbit --step-seconds 0.2 --model-mb 102
      the same as if the model had the gradients of a ResNet-50: bytes take so much longer
  python -m runs simulate --workers 32 --network 100mbit --exchange all_gather --steps 100
  python -m runs simulate --workers 8 --policy fixed --cf 100 --memory none
      how quality goes at one CF, here without error feedback; no network: only compute takes time
  python -m runs simulate --resume logs/sim16 --steps 600

A run leaves the files that train leaves: report and TensorBoard read them alike. Memory
grows with the workers, by a replica and what its compressor keeps. Ctrl-C stops after the step
and saves a checkpoint (exit code 130); a second Ctrl-C ends at once. Wrong options end with exit
code 2, a failed worker with 1."""


@dataclass(frozen=True)
class StepTime:
    """How long a step takes."""

    step_seconds: Annotated[Positive, metavar("SECONDS")] = STEP_SECONDS
    """Of forward, backward and optimizer on a worker; --network's seconds come on top."""


@dataclass(frozen=True)
class Place:
    """Where the workers compute."""

    device: Annotated[str, metavar("DEVICE")] = "cpu"
    """Of all workers: cpu, cuda or cuda:1. A GPU's run that was resumed draws other random
    numbers there (dropout) than one that was not."""


OPTIONS = {
    "training": options(Training, told={"workers": "simulated in turn (8)"}),
    "optimizer": options(Optimizing),
    "compression": options(
        Compressing,
        told={
            "network": "model a network between the workers, e.g. 1gbit,5ms; the latency is of "
            "each hop of each bucket: N - 1 round a ring of N workers, one to neighbours"
        },
    ),
    "policy": options(PolicyArguments),
    "output": options(Keeping),
    "resume": options(Resuming),
    "step_time": options(StepTime),
    "place": options(Place),
    "modelling": options(
        Modelling,
        without=("fixed_clock", "one_worker_seconds"),
        told={
            "model_mb": "step times as if the gradients were so large (ResNet-101 170, VGG-16 528, "
            "a large LSTM 252)",
            "coding": "nanoseconds for each gradient element that compressing and decoding take in "
            "a compressed step, 0 for nothing (as measured at some CFs on this machine, once)",
            "server": "a server makes the means, and its link, e.g. 1gbit or 1gbit/500mbit (up and "
            "down), carries what all workers send and are sent; --exchange is sharded, or "
            "all_reduce (the workers themselves make them)",
        },
    ),
}


def main(given: dict[str, Any]) -> int:
    """Run the simulation; returns the exit code."""
    # torch is imported late, so that help and wrong options need not wait for it.
    from runs.job import claimed, make_job
    from runs.simulate.ranks import simulate
    from runs.worker import run_rank

    job = make_job(_with_defaults(given), None, simulated=True)
    check_device(job.config.device)
    with claimed(job) as job:
        return simulate(job.config, lambda rank, *own: run_rank(job, rank, *own))


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """The options as train has them. UsageError for what only train can do."""
    if "step_seconds" in given:
        given["fixed_clock"] = given.pop("step_seconds")
    if given.get("policy") == PLAIN:
        raise UsageError(
            f"--policy {PLAIN} leaves out the library's hook, which models the step times; "
            "accepted: any other --policy (dense: it sends everything)"
        )
    if "TwoLevel" in given.get("exchange", ""):
        raise UsageError(
            f"--exchange {given['exchange']}: simulated workers exchange on one level; accepted: "
            "what stands between its nodes, such as all_gather"
        )
    if "resume" in given:
        return given
    return {"workers": WORKERS, "fixed_clock": STEP_SECONDS, **given}


def check_device(device: str) -> None:
    """UsageError unless the workers can compute there."""
    import torch

    there = ["cpu"]
    if torch.cuda.is_available():
        there += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device not in there:
        none = "" if len(there) > 1 else " (torch finds no CUDA device here)"
        raise UsageError(f"--device must be one of {', '.join(there)}{none}, got {device!r}")
