"""Adaptive gradient compression for PyTorch DistributedDataParallel.

compressor = AdaptiveCompressor(base="topk", cf_range=(10, 1000)).attach(ddp_model)
"""

from adaptive.compressor import AdaptiveCompressor
from adaptive.exchange.link import LinkSpec
from adaptive.hook import HookRung, adaptive_hook
from adaptive.state import reshard_states
from adaptive.statistics.timing import ModelledClock
from adaptive.summary import Summary
from adaptive.timeline.records import (
    Event,
    Header,
    JSONLTimeline,
    MemoryTimeline,
    StepRecord,
    Timeline,
)
from adaptive.timeline.tensorboard import TensorBoardTimeline
from compressors import Compressor, GraceCompressor, NoCompression, RandomK, TopK
from policies import (
    Accordion,
    Budget,
    Fixed,
    Goodput,
    GraVAC,
    Layerwise,
    Plan,
    Policy,
    Schedule,
    StepReport,
    Warmup,
)

__all__ = [
    "Accordion",
    "AdaptiveCompressor",
    "Budget",
    "Compressor",
    "Event",
    "Fixed",
    "Goodput",
    "GraVAC",
    "GraceCompressor",
    "Header",
    "HookRung",
    "JSONLTimeline",
    "Layerwise",
    "LinkSpec",
    "MemoryTimeline",
    "ModelledClock",
    "NoCompression",
    "Plan",
    "Policy",
    "RandomK",
    "Schedule",
    "StepRecord",
    "StepReport",
    "Summary",
    "TensorBoardTimeline",
    "Timeline",
    "TopK",
    "Warmup",
    "adaptive_hook",
    "reshard_states",
]
