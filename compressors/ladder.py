"""One compressor made of several, each for some CFs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from compressors.base import Compressor, Payload, Spec, check_cf
from compressors.kernels.blocks import Flag
from compressors.quantizers import BF16
from compressors.registry import make_compressor
from compressors.rounds import RoundsCompressor
from compressors.sparsifier import Sparsifier

GAIN, GAIN_AS_DENSE = 0.95, 0.99
"""The gains that policies assume at a rung, and at a rung that is sent as dense. The true gains are
larger. With these gains a policy sends dense if a rung saves hardly any time."""


class Ladder(Compressor):
    """A ladder uses another compressor at each of a few small CFs, and one at all other CFs.

    Ladder({2: "bf16", 4: "int8", 8: "int4"}, above="topk+int4") sends every element in 16 bits at
    CF 2, in 8 bits at CF 4 and in 4 bits at CF 8. At any other CF it keeps the largest elements.

    rungs: compressors, or names, by CF. Each has error feedback, needs no other ranks (no
        `RoundsCompressor`), and can reach exactly this CF, which is above 1.
    above: the compressor at all other CFs, with error feedback and without rounds.

    A step at a rung "bf16" is a dense step that is summed in bfloat16 (`sent_as_dense`), as by
    PyTorch's bf16_compress_hook: it has 8 significant bits, and the rounding error is in no rank's
    residual. The payloads of other rungs are all-gathered or use the sharded exchange, with error
    feedback.

    TypeError for a `rungs` that is no mapping; ValueError for compressors that do not fit.
    """

    def __init__(self, rungs: Mapping[float, str | Compressor], above: str | Compressor) -> None:
        if not isinstance(rungs, Mapping):
            raise TypeError(
                f"rungs must be a mapping of CFs to compressors, {{4: 'int8'}}, got {rungs!r}"
            )
        self.above = make_compressor(above)
        self.rungs = {check_cf(cf): make_compressor(rung) for cf, rung in sorted(rungs.items())}
        for cf, rung in self.rungs.items():
            if cf == 1 or not _feeds_back_alone(rung) or rung.nearest(Spec((10**6,), cf)) != cf:
                raise ValueError(
                    f"rungs[{cf:g}] must be a compressor with error feedback that can do this CF, "
                    f"which is above 1; got {rung.name!r}"
                )
        if isinstance(self.above, Ladder) or not _feeds_back_alone(self.above):
            raise ValueError(
                f"above must be a compressor with error feedback that needs no rounds and is no "
                f"ladder, got {self.above.name!r}"
            )
        self.rungs = {
            cf: _NarrowDense(rung.peers) if isinstance(rung, BF16) else rung
            for cf, rung in self.rungs.items()
        }
        self.name = self.above.name
        self.sampled, self.masking = self.above.sampled, self.above.masking
        self.keeps_zeros = all(each.keeps_zeros for each in (self.above, *self.rungs.values()))
        self.known_gains = {
            cf: GAIN_AS_DENSE if rung.sent_as_dense else GAIN for cf, rung in self.rungs.items()
        }

    def at(self, cf: float) -> Compressor:
        return self.rungs.get(cf, self.above)

    def uncoded(self) -> Ladder:
        """The same ladder, with `Sparsifier.uncoded` above its rungs."""
        assert isinstance(self.above, Sparsifier)
        return Ladder(self.rungs, self.above.uncoded())

    # By the CF of a spec

    def compress(self, x: Tensor, spec: Spec, add: Tensor | None = None) -> Payload:
        return self.at(spec.cf).compress(x, spec, add)

    def nbytes(self, spec: Spec) -> int:
        return self.at(spec.cf).nbytes(spec)

    def read(self, data: Tensor, spec: Spec) -> list[Payload]:
        return self.at(spec.cf).read(data, spec)

    def nearest(self, spec: Spec) -> float:
        return self.at(spec.cf).nearest(spec)

    def floats(self, spec: Spec) -> float:
        return self.at(spec.cf).floats(spec)

    # By the CF of a payload

    def smaller(self, payload: Payload, factor: float) -> Payload:
        return self.at(payload.cf).smaller(payload, factor)

    def add_to(self, out: Tensor, payload: Payload, scale: float = 1.0) -> None:
        self.at(payload.cf).add_to(out, payload, scale)

    def mean_of(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        by = self.at(payloads[0].cf) if payloads else self.above
        by.mean_of(out, payloads, scale, as_zeros)

    def add_all(
        self, out: Tensor, payloads: Sequence[Payload], scale: float, as_zeros: Flag = False
    ) -> None:
        by = self.at(payloads[0].cf) if payloads else self.above
        by.add_all(out, payloads, scale, as_zeros)

    @property
    def _parts(self) -> dict[float, Compressor]:
        """The compressors by CF; 0: the one above."""
        return {0.0: self.above, **self.rungs}

    def state_dict(self) -> dict[str, Any]:
        """The states of the compressors that have one, by CF; "0": of the one above."""
        states = {f"{cf:g}": part.state_dict() for cf, part in self._parts.items()}
        return {cf: state for cf, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = {f"{cf:g}": part for cf, part in self._parts.items()}
        if unknown := sorted(map(str, state.keys() - parts.keys())):
            raise ValueError(f"state: {self!r} has no compressor at CF {', '.join(unknown)}")
        for cf, part in parts.items():
            part.load_state_dict(state.get(cf, {}))

    def __repr__(self) -> str:
        return f"Ladder({self.rungs!r}, above={self.above!r})"


class _NarrowDense(BF16):
    """The rung "bf16": a dense step, summed in bfloat16."""

    sent_as_dense = True


def _feeds_back_alone(compressor: Compressor) -> bool:
    """Whether the compressor has error feedback, and needs no sums over other ranks."""
    return compressor.feeds_back and not isinstance(compressor, RoundsCompressor)
