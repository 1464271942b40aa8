"""The synchronisers, which keep the parameters of the ranks together, and the choice of one."""

from __future__ import annotations

from adaptive.memory.updates import UpdateMemory
from adaptive.step.averager import Averager
from adaptive.step.synchronisation import Delayed, LocalSteps
from adaptive.sync.auto_steps import AutoStepsSync
from adaptive.sync.base import Synchroniser
from adaptive.sync.every_step import AsDDP, EveryStepSync
from adaptive.sync.local_steps import LocalStepsSync
from adaptive.sync.own_step import OwnStepSync
from policies.step_time import overlapped


def start(averager: Averager) -> Synchroniser:
    """The synchroniser of a model that is about to train."""
    choice = averager.settings.sync
    own: Synchroniser | None = choice.start(averager)
    if own is not None:
        return own
    if isinstance(choice, Delayed):
        return LocalStepsSync(averager, 1, choice.delays[-1] - 1)
    if isinstance(choice, LocalSteps) and isinstance(choice.steps, int):
        delay = overlapped(choice.overlap, choice.steps)
        return LocalStepsSync(averager, choice.steps, delay, choice.outer_lr, choice.outer_momentum)
    if isinstance(choice, LocalSteps):
        return AutoStepsSync(averager, choice)
    if averager.controller.too_small:
        return AsDDP(averager)
    return gradients_or_steps(averager)


def gradients_or_steps(averager: Averager) -> Synchroniser:
    """The synchroniser of ranks that exchange in every step: updates or gradients, depending on
    the memory."""
    by_steps = isinstance(averager.memory.now, UpdateMemory)
    return OwnStepSync(averager) if by_steps else EveryStepSync(averager)
