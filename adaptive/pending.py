"""A step whose statistics are under way: what is known of it, and what the ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adaptive.exchange import PendingSum, Traffic
from adaptive.tally import Agreed, Tally
from policies import LayerReport, StepReport


@dataclass
class PendingStep:
    """tally: this rank's part of the sum, `vector`. timed: CF and wire bytes of the step whose
    times it holds. read_sum: it holds the norm of a sum that was read."""

    step: int
    cf: float
    tally: Tally
    layer_cfs: Mapping[str, float]
    vector: PendingSum
    traffic: Traffic
    read_sum: bool
    timed: tuple[float, float]

    def agree(self, world_size: int) -> Agreed:
        """Wait for the sum over the ranks."""
        return Agreed.read(self.vector.wait(), self.tally, world_size)

    def report(
        self, agreed: Agreed, layers: Mapping[str, LayerReport], dense_wire_bytes: float
    ) -> StepReport:
        """For the policy; `layers` where they were read."""
        timed_cf, timed_bytes = self.timed
        return StepReport(
            step=self.step,
            cf=self.cf,
            measurements=agreed.measurements,
            timed_cf=timed_cf,
            seconds=agreed.seconds,
            median_seconds=agreed.median_seconds,
            compress_seconds=agreed.compress_seconds,
            exchange_seconds=agreed.exchange_seconds,
            network_seconds=agreed.network_seconds,
            decode_seconds=agreed.decode_seconds,
            compute_seconds=agreed.compute_seconds,
            wire_bytes=self.traffic.wire,
            statistics_bytes=self.traffic.statistics,
            dense_wire_bytes=dense_wire_bytes,
            timed_bytes=timed_bytes,
            grad_norm=agreed.grad_norm,
            sum_norm=agreed.sum_norm,
            lr=agreed.lr,
            steady=agreed.steady,
            layers=layers,
            signal=agreed.signal,
            signal_total=agreed.signal_total,
            peers=agreed.peers,
            peers_total=agreed.peers_total,
        )
