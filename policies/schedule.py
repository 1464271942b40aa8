"""CFs by a table written beforehand: constant pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from policies import checks, saved
from policies.base import DENSE, Context, GainKind, Plan, Policy, StepReport
from policies.reasons import change


class Schedule(Policy):
    """Sends the CF of the last piece that has begun.

    pieces: {first step: CF}, e.g. {0: 10, 1000: 100}. Steps are counted from 0, from where this
    policy begins (after another one in `Warmup`); dense before the first. CFs are 1 (dense) or
    inside cf_range, and what is sent is the nearest that the compressor can do. gain: which is
    recorded; "signal" needs a shadow ladder.
    TypeError or ValueError names what is wrong.
    """

    name = "schedule"

    def __init__(self, pieces: Mapping[int, float], gain: GainKind = "gradient") -> None:
        checks.one_of("gain", gain, get_args(GainKind))
        self.gain = gain
        self.shadow = self.shadow or gain == "signal"
        if not isinstance(pieces, Mapping):
            kind = type(pieces).__name__
            raise TypeError(f"pieces={pieces!r}: must be a mapping {{step: CF}}, got {kind}")
        if not pieces:
            raise ValueError("pieces={}: must have at least one step: CF")
        checked = {
            checks.whole("pieces: step", step, least=0): checks.real(
                f"pieces[{step!r}]", cf, least=1
            )
            for step, cf in pieces.items()
        }
        self.pieces = {0: DENSE, **checked}
        self._starts = sorted(self.pieces)
        self._cfs: dict[int, float] = {}

    def start(self, context: Context) -> None:
        """Raises ValueError if a CF is neither 1 nor inside cf_range."""
        allowed = checks.cf_range(context.cf_range)
        for step, cf in self.pieces.items():
            checks.cf_within(f"pieces[{step}]", cf, allowed)
        self._cfs = {
            step: DENSE if cf == DENSE else context.supported(cf)
            for step, cf in self.pieces.items()
        }
        self._step = 0

    def _at(self, step: int) -> float:
        """What is sent in a step; dense before the first."""
        begun = [start for start in self._starts if start <= step]
        return self._cfs[begun[-1]] if begun else DENSE

    def plan(self) -> Plan:
        if not self._cfs:
            raise RuntimeError("Schedule needs start(context) before plan()")
        before, now = self._at(self._step - 1), self._at(self._step)
        moved = self._step > 0 and now != before
        why = f"the schedule has CF {now:g} from step {self._step}"
        return Plan(now, reason=change(before, now, why) if moved else "")

    def observe(self, report: StepReport) -> None:
        self._step += 1

    def candidates(self) -> tuple[float, ...]:
        return tuple(sorted(set(self._cfs.values())))

    def outlook(self) -> str:
        later = [start for start in self._starts if start >= self._step and start > 0]
        if not later:
            return "the schedule has no later piece"
        return f"the schedule has CF {self._cfs[later[0]]:g} from step {later[0]}"

    def state_dict(self) -> dict[str, Any]:
        return {"cfs": self._saved_pieces(), "step": self._step}

    def _saved_pieces(self) -> list[list[float]]:
        """As pairs, since JSON has no int keys."""
        return [[step, self._cfs[step]] for step in self._starts]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After start(). Raises ValueError if the state is of another schedule."""
        if not self._cfs:
            raise RuntimeError("Schedule needs start(context) before load_state_dict()")
        checks.same(
            self.name, {"cfs": self._saved_pieces()}, {"cfs": saved.entries(state, "cfs", 2)}
        )
        self._step = saved.count(state, "step")
