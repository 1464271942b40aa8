"""Puts steps and switches on record: the timeline's, on the one rank that writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import isfinite, nan
from typing import Any

from adaptive.timeline import Event, Header, SafeTimeline, StepRecord
from policies import DENSE, Policy, StepReport
from policies import state as saved

log = logging.getLogger("adaptive")


class Recorder:
    """writes: on this rank. header: asked for at the first record. samples: in a step, of all
    workers; 1 if throughput is to be steps/s."""

    def __init__(
        self, timeline: SafeTimeline, writes: bool, header: Callable[[], Header], samples: float
    ) -> None:
        self._timeline = timeline
        self._writes = writes
        self._header = header
        self._samples = samples
        self._started = False
        self._started_at: float | None = None  # the first step's time
        self._active = 0.0  # seconds of steps so far
        self._told: list[str] = []

    def event(self, event: Event) -> None:
        if self._writes:
            self._start()
            self._timeline.event(event)

    def step(
        self,
        report: StepReport,
        policy: Policy,
        now: float,
        layer_cfs: Mapping[str, float],
        read_sum: bool,
        sent: float,
        dense: float,
    ) -> None:
        """A step that was agreed on, at the time `now`; and in the log, what the policy has
        concluded. sent, dense: bytes by its end, see `StepRecord`."""
        if not self._writes:
            return
        self._start()
        if self._started_at is None:
            self._started_at = now
        status = dict(policy.status())
        seconds = report.median_seconds
        t_sys = status.pop("t_sys", 1 / seconds if seconds > 0 else nan)
        gain = report.gain(report.timed_cf, policy.gain)
        self._active += seconds if isfinite(seconds) else 0.0
        t_comp = status.pop("t_comp", t_sys * (1.0 if report.timed_cf == DENSE else gain))
        self._timeline.step(
            StepRecord(
                report,
                now - self._started_at,
                t_sys * self._samples,
                t_comp * self._samples,
                status,
                layer_cfs,
                read_sum,
                self._active,
                sent,
                dense,
            )
        )
        verdict = policy.verdict()
        if verdict and verdict not in self._told:
            log.warning("%s", verdict)
            self._told.append(verdict)

    def close(self) -> None:
        """Nothing is recorded any more."""
        self._timeline.close()
        self._timeline = SafeTimeline([])

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._timeline.start(self._header())

    def state_dict(self) -> dict[str, Any]:
        told = list(self._told)
        return {"told": told, "started_at": self._started_at, "active": self._active}

    def load_state_dict(self, state: Mapping[str, Any], pause: float) -> None:
        """Go on after a pause of so many seconds, which do not count."""
        told = saved.values(state, "told")
        saved.together(all(isinstance(each, str) for each in told), "'told' must be sentences")
        self._told = told
        self._active = saved.number(state, "active", least=0)
        self._started_at = saved.maybe_number(state, "started_at")
        self._started = self._started_at is not None
        if self._started_at is not None:
            self._started_at += pause
