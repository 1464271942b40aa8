"""Starts a policy on a model: what it is told, and what a record says of that for replays."""

from __future__ import annotations

from adaptive.options import check_layerwise
from adaptive.settings import Settings
from adaptive.sizes import Sizes
from adaptive.timeline.records import Header
from policies import DENSE, Context, Fixed


class PolicyStart:
    """Starts `settings.policy`, which for a base that cannot compress becomes a dense one.

    candidates: the CFs, ascending, that the base may have to compress by for the policy; cfs: and
    those of the ends of cf_range. ValueError if the settings do not go together or do not fit the
    model.
    """

    def __init__(self, settings: Settings, sizes: Sizes, world_size: int) -> None:
        self._settings, self._sizes, self._world_size = settings, sizes, world_size
        hooks, (low, high) = settings.hooks, settings.cf_range
        ends = tuple(map(sizes.supported, settings.cf_range))
        if ends[1] == DENSE < high and not hooks:
            settings.policy = Fixed(cf=DENSE)
            low = high = DENSE
        outside = [cf for cf in hooks if not low <= cf <= high]
        if outside:
            raise ValueError(
                f"hooks must have CFs inside cf_range ({low:g}, {high:g}), got {outside[0]:g}"
            )
        assumed = {cf: rung.gain for cf, rung in hooks.items() if rung.gain is not None}
        self._layers = sizes.layers()
        check_layerwise(settings.policy, self._layers)
        self._cf_range = (min(low, *ends), max(high, *ends))
        settings.policy.start(
            Context(
                self._cf_range,
                world_size,
                sizes.supported,
                assumed,
                frozenset(hooks.keys() - assumed.keys()),
                sizes.wire_bytes,
                self._layers,
                sizes.layer_nbytes,
            )
        )
        candidates = {*map(sizes.supported, settings.policy.candidates())}
        self.candidates = tuple(sorted(candidates - {DENSE, *hooks}))
        self.cfs = tuple(sorted({*candidates, *ends} - {DENSE, *hooks}))

    def header(self, memory: str, dense_bytes: float) -> Header:
        """memory: the one in use. dense_bytes: on the wire in a dense step."""
        settings, sizes = self._settings, self._sizes
        policy = settings.policy
        cfs = sorted({DENSE, *self._cf_range, *settings.cf_range, *policy.candidates()})
        supported = {cf: sizes.supported(cf) for cf in cfs}
        return Header(
            policy=policy.name,
            settings=policy.state_dict().get("settings", {}),
            cf_range=self._cf_range,
            world_size=self._world_size,
            base=settings.base.name,
            memory=memory,
            numel=sizes.numel(),
            dense_bytes=dense_bytes,
            supported=supported,
            wire_bytes={cf: sizes.wire_bytes(cf) for cf in supported.values()},
            layers=sizes.shapes(self._layers),
        )
