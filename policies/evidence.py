"""What GraVAC has seen of each CF: gain, T_sys, T_comp = T_sys x gain (GraVAC section 3.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from policies import saved
from policies.average import Average, averages_by_cf
from policies.base import DENSE, GainKind, StepReport
from policies.cost import CostModel
from policies.signal import SignalGain


class Evidence:
    """Averaged gains of the CFs measured now, gains of those judged before, and step times.

    kind: which gain. weight: of a new value in its average. believed_after: measurements that a
    gain must rest on. assumed: gains of CFs that cannot be measured.
    """

    def __init__(
        self,
        kind: GainKind,
        weight: float,
        believed_after: int,
        assumed: Mapping[float, float] | None = None,
    ) -> None:
        self._kind = kind
        self._weight = weight
        self._believed_after = believed_after
        self._assumed = dict(assumed or {})
        self._averages: dict[float, Average] = {}
        self._judged: dict[float, float] = {}
        self._remembered: dict[float, float] = {}
        self._cost = CostModel()
        self.signal = SignalGain() if kind == "signal" else None

    def observe(self, report: StepReport, measured: Collection[float]) -> str:
        """Take in one step: all times, and the gains of the CFs in `measured` (signal gains are
        those of the whole ladder at any time). In words, a change of what decides, else ""."""
        self._cost.observe(report)
        if self.signal is not None:
            return self.signal.observe(report)
        for cf, measurement in report.measurements.items():
            if cf in measured:
                if cf not in self._averages:
                    self._averages[cf] = Average(self._weight)
                self._averages[cf].add(*measurement.terms(self._kind))
        return ""

    def forget_all_but(self, measured: Collection[float]) -> None:
        """An average that is not fed any more is stale: measured again, a CF starts afresh."""
        self._averages = {cf: a for cf, a in self._averages.items() if cf in measured}

    def gain(self, cf: float | None) -> float | None:
        """The averaged gain of a CF in [0, 1], once it can be believed; dense has 1.

        Until then, in an exploration that a changed network has opened again: the one before.
        """
        if cf == DENSE:
            return 1.0
        if cf in self._assumed:
            return self._assumed[cf]
        if self.signal is not None:
            return None if cf is None else self.signal.gain(cf)
        average = None if cf is None else self._averages.get(cf)
        if average is None or average.count < self._believed_after:
            return None if cf is None else self._remembered.get(cf)
        return min(1.0, average.value)

    def forget_times(self) -> None:
        """Times have drifted, gains have not: they are judged again, but known until then."""
        self._remembered.update(self._judged)
        self._judged = {}
        self._cost.forget()

    def forget_gains(self) -> None:
        """Gains have drifted: they are measured afresh, while the times go on counting."""
        self._averages, self._judged, self._remembered = {}, {}, {}

    def judge(self, *cfs: float | None) -> None:
        """A window is over: put down the gains of these CFs, where they are known."""
        for cf in cfs:
            gain = self.gain(cf)
            if cf is not None and cf != DENSE and gain is not None:
                self._judged[cf] = gain

    def t_sys(self, cf: float) -> float | None:
        """Steps a second at a CF, if it was ever sent."""
        seconds = self._cost.seconds(cf)
        return None if seconds is None else 1 / seconds

    def step_times(self) -> dict[float, float]:
        """Seconds of a step without compression, by CF."""
        return self._cost.without_compression()

    def t_comp(self, epsilon: float) -> dict[float, float]:
        """T_comp of the judged CFs that were sent and whose gain is at least epsilon."""
        return {
            cf: gain * t_sys
            for cf, gain in self._judged.items()
            if gain >= epsilon and (t_sys := self.t_sys(cf)) is not None
        }

    def promising(self, cfs: Collection[float], chosen: float, up_at: float, omega: float) -> str:
        """Why one of these CFs may be better than the one chosen, by the gains it has now; else "".

        One that was sent must promise omega more T_comp. One that was not, for want of gain, must
        have it now.
        """
        gain, t_sys = self.gain(chosen), self.t_sys(chosen)
        kept = None if gain is None or t_sys is None else gain * t_sys
        for cf in sorted(cfs):
            gain, t_sys = self.gain(cf), self.t_sys(cf)
            if gain is None or gain < up_at:
                continue
            if t_sys is None:
                return f"CF {cf:g} has not been sent and has gain {gain:.4g} >= {up_at:.4g} now"
            if kept is not None and gain * t_sys > (1 + omega) * kept:
                return (
                    f"CF {cf:g} has gain {gain:.4g} now, T_comp {gain * t_sys:.4g} > "
                    f"{1 + omega:.4g} x {kept:.4g} of CF {chosen:g}"
                )
        return ""

    def hopeless(self) -> str:
        """Why no CF can beat dense, as soon as two that were sent show it; else "".

        The bound: nothing on the wire, the fastest compression and the best gain that were seen.
        """
        dense = self.t_sys(DENSE)
        sent = {cf: t_sys for cf in self._judged if (t_sys := self.t_sys(cf)) is not None}
        if dense is None or len(sent) < 2:
            return ""
        gain = max(self._judged.values())
        seconds = self._cost.predict(0, min(self._cost.compress(cf) for cf in sent))
        # A step that was faster than the model's limit says that the model is wrong.
        if not seconds or gain > dense * seconds or gain * max(sent.values()) > dense:
            return ""
        return (
            f"even with nothing on the wire a step would take {seconds:.4g} s and T_comp be "
            f"{gain / seconds:.4g} at the best gain, {gain:.4g}, <= {dense:.4g} of dense"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values: pairs, since JSON has no float keys."""
        return {
            "averages": [[cf, average.state_dict()] for cf, average in self._averages.items()],
            "judged": [list(item) for item in self._judged.items()],
            "remembered": [list(item) for item in self._remembered.items()],
            "cost": self._cost.state_dict(),
            "signal": None if self.signal is None else self.signal.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._averages = averages_by_cf(state, "averages", self._weight)
        self._judged = saved.by_cf(state, "judged")
        self._remembered = saved.by_cf(state, "remembered")
        self._cost.load_state_dict(saved.part(state, "cost"))
        saved.load_if_there(state, "signal", self.signal)
