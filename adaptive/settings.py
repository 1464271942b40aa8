"""What the user chose, checked; and in words, to be compared among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptive.foreign import HookRung
from adaptive.link import LinkSpec
from adaptive.memory.model_memory import MemoryChoice
from adaptive.timeline.records import SafeTimeline
from compressors import Compressor
from policies import Policy


@dataclass
class Settings:
    """Of an `AdaptiveCompressor`, which says what they mean."""

    base: Compressor
    granularity: str
    dense_below: int
    exchange: str
    hooks: dict[float, HookRung]
    cf_range: tuple[float, float]
    policy: Policy
    memory: MemoryChoice
    clip_norm: float | None
    shadow_sample: float
    samples_per_step: float | None
    timeline: SafeTimeline
    link: LinkSpec | None
    clock: Callable[[], float]
    debug: int
    checksum: bool

    def describe(self, memory: str) -> tuple[str, ...]:
        """What must be alike on all ranks, in readable lines. memory: the one chosen."""
        return (
            f"base={self.base.name!r} {_plain_settings(self.base)}",
            f"granularity={self.granularity!r}, dense_below={self.dense_below}, "
            f"exchange={self.exchange!r}, "
            f"hooks={ {cf: str(rung) for cf, rung in sorted(self.hooks.items())} }",
            f"cf_range={self.cf_range}, shadow_sample={self.shadow_sample:g}",
            f"policy={self.policy.name!r} {self.policy.state_dict()}",
            f"{self.memory}, chosen {memory!r}, clip_norm={self.clip_norm}",
            f"debug={self.debug}, checksum={self.checksum}",
        )


def _plain_settings(base: Compressor) -> dict[str, Any]:
    """A compressor's own settings, as far as they can be compared as text."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else value.name
        for name, value in sorted(vars(base).items())
        if isinstance(value, plain) or isinstance(getattr(value, "name", None), str)
    }
