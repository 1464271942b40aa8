"""After GraVAC has chosen: what would make it explore again (beyond the paper, DESIGN section 5).

1. A drift of step time or gain of the CF in use (policies/drift.py).
2. A chosen CF whose gain has been below epsilon for long: one between it and the floor may serve.
3. A look, now and then, at the gains of the CFs that were passed over (policies/glance.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from policies import saved
from policies.base import DENSE, GainKind, StepReport
from policies.drift import Cooldown, Drift, Watch
from policies.evidence import Evidence
from policies.glance import Glance


class Finding(NamedTuple):
    """What has changed: "time" or "gain" call for an exploration, "look" only for other probes."""

    what: Literal["time", "gain", "look"]
    why: str


class Vigil:
    """Watches over a choice.

    epsilon, up_at: gains below which a CF is not sent, and from which on it is sent again.
    omega: relative difference of T_comp that counts as none. drift: relative change that counts;
    None: never. patience: windows it must last. steps: of a window and of a look. retry: steps
    before a look, and that the chosen CF may be wanting; None: never. cooldown: steps for which a
    choice stands.
    """

    def __init__(
        self,
        kind: GainKind,
        *,
        epsilon: float,
        up_at: float,
        omega: float,
        drift: float | None,
        patience: int,
        steps: int,
        retry: int | None,
        cooldown: int,
    ) -> None:
        self._epsilon, self._up_at, self._omega = epsilon, up_at, omega
        self._retry = retry
        self._watch = None if drift is None else Watch(drift, patience, steps, kind)
        self._cooldown = Cooldown(cooldown)
        self._glance = Glance(retry, steps)
        self._chosen: float | None = None
        self._others: tuple[float, ...] = ()
        self._bottom = DENSE
        self._wanting = 0  # steps in a row in which the chosen CF's gain was below epsilon

    def begin(self, chosen: float, tried: tuple[float, ...], seen: Evidence) -> None:
        """A choice among the CFs that were tried (and dense)."""
        changed, self._chosen = chosen != self._chosen, chosen
        self._others = tuple(cf for cf in tried if cf not in (DENSE, chosen))
        self._bottom = tried[0]
        self._wanting = 0
        if self._watch is not None:
            self._watch.begin(chosen, seen.step_times())
        self._cooldown.begin()
        self._glance.begin(changed)

    def probe(self, send: float) -> tuple[float, ...]:
        """What to measure while the chosen CF is sent: nothing, except in a look."""
        return self._others if send == self._chosen and self._glance.looking else ()

    def observe(self, report: StepReport, seen: Evidence) -> Finding | None:
        """One step on with the choice; what was found, if anything."""
        gain = None if seen.signal is None else seen.gain(self._chosen)
        drift = None if self._watch is None else self._watch.observe(report, gain)
        ripe = self._cooldown.step()
        drift = drift or self._wants(report.cf, seen)
        if drift is not None and ripe:
            return Finding(*drift)
        return self._look(report.cf, seen, ripe)

    def _wants(self, sent: float, seen: Evidence) -> Drift | None:
        """Whether the chosen CF has been out of use for too long."""
        if self._retry is None or sent == self._chosen or self._chosen == self._bottom:
            self._wanting = 0
            return None
        gain = seen.gain(self._chosen)
        self._wanting = self._wanting + 1 if gain is not None and gain < self._epsilon else 0
        if self._wanting < self._retry:
            return None
        numbers = f"{gain:.4g} < epsilon {self._epsilon:g} for {self._wanting} steps"
        return Drift("gain", f"the gain of CF {self._chosen:g} is {numbers}")

    def _look(self, sent: float, seen: Evidence, ripe: bool) -> Finding | None:
        """Look again at the others, when it is time to and while the chosen CF is in use."""
        if not self._others or sent != self._chosen:
            self._glance.pause()
            return None
        was_looking = self._glance.looking
        if self._glance.step():
            why = seen.promising(self._others, self._chosen, self._up_at, self._omega)
            if why and ripe:
                return Finding("gain", why)
            self._glance.begin(changed=False)
            return Finding("look", f"looked again at CF {self._listed()}: none is better by omega")
        if self._glance.looking and not was_looking:
            return Finding("look", f"looks again at the gains of CF {self._listed()}")
        return None

    def outlook(self) -> str:
        """What would make it explore again; "" if nothing will."""
        causes = []
        if self._watch is not None:
            causes.append(
                f"its step time or gain changes by {self._watch.drift:g} of itself for "
                f"{self._watch.patience} x {self._watch.steps} steps"
            )
        if self._retry is not None and self._others:
            causes.append(
                f"in a look now and then CF {self._listed()} shows a gain that promises more"
            )
        return f"it explores again when {', or when '.join(causes)}" if causes else ""

    def _listed(self) -> str:
        return ", ".join(f"{cf:g}" for cf in self._others)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in JSON-like values."""
        return {
            "chosen": self._chosen,
            "others": list(self._others),
            "bottom": self._bottom,
            "wanting": self._wanting,
            "watch": None if self._watch is None else self._watch.state_dict(),
            "cooldown": self._cooldown.state_dict(),
            "glance": self._glance.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._chosen = saved.maybe_cf(state, "chosen")
        self._bottom = saved.number(state, "bottom", least=1)
        self._others = tuple(saved.numbers(state, "others", least=1))
        self._wanting = saved.count(state, "wanting")
        saved.load_if_there(state, "watch", self._watch)
        self._cooldown.load_state_dict(saved.part(state, "cooldown"))
        self._glance.load_state_dict(saved.part(state, "glance"))
