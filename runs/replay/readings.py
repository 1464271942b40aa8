"""What a policy reads now and then, of an interval of steps: the norm of the summed gradient, which
a model may stand in for, and each layer's statistics, of which only what was recorded is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan

from adaptive import StepRecord
from policies import LayerReport, Plan
from runs.parser import UsageError


class RecordedSums:
    """A sum over an interval is recorded only if the recorded policy read the same interval (which
    records without `read_sum`, older ones, show only where it was finite).

    Otherwise the sum of the gradients' norms stands in for the norm of their sum. modelled: how
    many readings that was so for.
    """

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self._records = records
        self._ours = self._theirs = 0  # first step since the last reading
        self.modelled = 0

    def read(self, i: int, reads: bool) -> float:
        """What a policy finds in the report of step `i`; nan if it does not read."""
        record = self._records[i]
        recorded = record.report.sum_norm
        theirs = record.read_sum or isfinite(recorded)
        value = nan
        if reads:
            value = recorded if theirs and self._same_interval() else self._model(i)
            self._ours = i
        if theirs:
            self._theirs = i
        return value

    def _same_interval(self) -> bool:
        """Also if only a reading that was not finite, and so not seen, lies between."""
        between = self._records[self._theirs : self._ours]
        return self._theirs == self._ours or any(
            not isfinite(record.report.grad_norm) for record in between
        )

    def _model(self, i: int) -> float:
        norms = [record.report.grad_norm for record in self._records[self._ours : i]]
        if not norms:
            return nan
        self.modelled += 1
        return sum(norms)


class LayerReadings:
    """What one replayed policy reads of each layer, as the recorded policy read it.

    Nothing that was recorded of one interval tells what a layer's sum would be over another one.
    ladder: the CFs whose steady-state gains are wanted.
    """

    def __init__(self, records: Sequence[StepRecord], ladder: tuple[float, ...]) -> None:
        self._records, self._ladder = records, ladder
        layers = [layer for record in records for layer in record.report.layers.values()]
        self._has_gains = {cf for layer in layers for cf in layer.steady}.issuperset(ladder)
        self._ours = self._theirs = 0  # first step since the last reading
        self._our_sum = self._their_sum = 0

    def read(self, i: int, plan: Plan) -> Mapping[str, LayerReport]:
        """What the report of step `i` has of the layers; none if the plan does not read them.

        UsageError unless the recorded policy read the same of the same steps."""
        record = self._records[i]
        layers = record.report.layers
        their_sum = record.read_sum or isfinite(record.report.sum_norm)
        found: Mapping[str, LayerReport] = {}
        if plan.read_layers:
            same = bool(layers) and self._theirs == self._ours and self._has_gains
            if plan.read_sum:
                same = same and their_sum and self._their_sum == self._our_sum
            if not same:
                raise UsageError(self._unknown(record.report.step))
            found = {name: self._asked(layer, plan) for name, layer in layers.items()}
            self._ours = i
        self._our_sum = i if plan.read_sum else self._our_sum
        self._theirs = i if layers else self._theirs
        self._their_sum = i if their_sum else self._their_sum
        return found

    def _asked(self, layer: LayerReport, plan: Plan) -> LayerReport:
        steady = {cf: gain for cf, gain in layer.steady.items() if cf in self._ladder}
        return replace(layer, sum_norm=layer.sum_norm if plan.read_sum else nan, steady=steady)

    def _unknown(self, step: int) -> str:
        first = self._records[self._ours].report.step
        return (
            f"TIMELINE: at step {step} this policy reads each layer's statistics since step "
            f"{first}, which cannot be told from the record, since no policy read them there; "
            f"accepted: a record of the same policy with the same interval (train --policy "
            f"'Accordion(per_layer=True)', or --layerwise on), or one CF for all layers"
        )
