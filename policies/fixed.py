"""One CF for the whole run: the static baseline (CF 1: dense)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from policies import checks, saved
from policies.base import Context, GainKind, Plan, Policy


class Fixed(Policy):
    """Sends the same CF in every step.

    cf: 1 (dense) or inside cf_range; None: the smallest of cf_range. probe: other CFs > 1, measured
    without being sent, for the record. gain: which is recorded with them; "signal" needs a shadow
    ladder.
    """

    name = "fixed"

    def __init__(
        self,
        cf: float | None = None,
        probe: Sequence[float] = (),
        gain: GainKind = "gradient",
    ) -> None:
        self.cf = None if cf is None else checks.real("cf", cf, least=1)
        if isinstance(probe, str) or not isinstance(probe, Iterable):
            kind = type(probe).__name__
            raise TypeError(f"probe={probe!r}: must be a sequence of CFs > 1, got {kind}")
        self.probe = tuple(sorted({checks.real("probe", other, above=1) for other in probe}))
        checks.one_of("gain", gain, get_args(GainKind))
        self.gain = gain
        self.shadow = self.shadow or gain == "signal"
        self._plan: Plan | None = None

    def start(self, context: Context) -> None:
        """Raises ValueError if cf is neither 1 nor inside cf_range."""
        allowed = checks.cf_range(context.cf_range)
        send = allowed[0] if self.cf is None else self.cf
        send = context.supported(checks.cf_within("cf", send, allowed))
        self._plan = Plan(send, probe=tuple(cf for cf in self.probe if cf != send))

    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("Fixed.plan() needs start(context) first")
        return self._plan

    def candidates(self) -> tuple[float, ...]:
        return self.plan().send, *self.probe

    def outlook(self) -> str:
        return "nothing would change it"

    def state_dict(self) -> dict[str, Any]:
        return {"send": self.plan().send}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing but a check: raises ValueError if the state is of another CF."""
        checks.same(self.name, {"send": self.plan().send}, {"send": saved.field(state, "send")})
