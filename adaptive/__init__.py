"""Adaptive gradient compression for PyTorch DistributedDataParallel.

compressor = AdaptiveCompressor(base="topk", cf_range=(10, 1000)).attach(ddp_model)
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from adaptive import on_import as _on_import  # first: it checks the import path
from adaptive.exchange.choice import ParameterServer, register_exchange
from adaptive.exchange.strategies import Outgoing, Piece, Received, Rounds, Strategy
from adaptive.exchange.two_level import TwoLevel
from adaptive.memory.options import Momentum, Residual, Updates, register_memory
from adaptive.memory.rule import Kept, MemoryRule
from adaptive.model.state import reshard_states
from adaptive.network.collectives import Exchange
from adaptive.network.link import LinkSpec, Network, StepClock
from adaptive.session.compressor import AdaptiveCompressor
from adaptive.step.synchronisation import Delayed, EveryStep, LocalSteps
from adaptive.timeline.records import Event, Header, StepRecord
from adaptive.timeline.sinks import JSONLTimeline, LogTimeline, MemoryTimeline, Timeline
from adaptive.timeline.summary import Summary
from adaptive.timeline.tensorboard import TensorBoardTimeline
from compressors import Compressor, Ladder, NoCompression, RandomK, TopK
from policies import Accordion, Fixed, Goodput, GraVAC, Plan, Policy, Schedule, StepReport, Warmup

if _TYPE_CHECKING:
    from adaptive.contrib.gossip import Gossip, GossipRule
    from adaptive.contrib.hooks import HookRung

__all__ = [
    "Accordion",
    "AdaptiveCompressor",
    "Compressor",
    "Delayed",
    "Event",
    "EveryStep",
    "Exchange",
    "Fixed",
    "Goodput",
    "Gossip",
    "GossipRule",
    "GraVAC",
    "Header",
    "HookRung",
    "JSONLTimeline",
    "Kept",
    "Ladder",
    "LinkSpec",
    "LocalSteps",
    "LogTimeline",
    "MemoryRule",
    "MemoryTimeline",
    "Momentum",
    "Network",
    "NoCompression",
    "Outgoing",
    "ParameterServer",
    "Piece",
    "Plan",
    "Policy",
    "RandomK",
    "Received",
    "Residual",
    "Rounds",
    "Schedule",
    "StepClock",
    "StepRecord",
    "StepReport",
    "Strategy",
    "Summary",
    "TensorBoardTimeline",
    "Timeline",
    "TopK",
    "TwoLevel",
    "Updates",
    "Warmup",
    "__version__",
    "register_exchange",
    "register_memory",
    "reshard_states",
]


def __getattr__(name: str) -> _Any:
    """Import the names of `adaptive.contrib` at their first use."""
    return _on_import.load_optional(name)


try:
    __version__ = _version("adaptive-compression")
except _PackageNotFoundError:  # a source tree on sys.path
    __version__ = "0+unknown"
