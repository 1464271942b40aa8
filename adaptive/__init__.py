"""Adaptive gradient compression for PyTorch DistributedDataParallel.

compressor = AdaptiveCompressor(base="topk", cf_range=(10, 1000)).attach(ddp_model)
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from adaptive.compressor import AdaptiveCompressor as AdaptiveCompressor
from adaptive.exchange.choice import ParameterServer as ParameterServer
from adaptive.exchange.link import LinkSpec as LinkSpec
from adaptive.exchange.link import Network as Network
from adaptive.exchange.link import StepClock as StepClock
from adaptive.hook import HookRung as HookRung
from adaptive.memory.options import Momentum as Momentum
from adaptive.memory.options import Residual as Residual
from adaptive.memory.options import Updates as Updates
from adaptive.state import reshard_states as reshard_states
from adaptive.summary import Summary as Summary
from adaptive.sync.options import Delayed as Delayed
from adaptive.sync.options import EveryStep as EveryStep
from adaptive.sync.options import Gossip as Gossip
from adaptive.sync.options import LocalSteps as LocalSteps
from adaptive.timeline.records import Event as Event
from adaptive.timeline.records import Header as Header
from adaptive.timeline.records import StepRecord as StepRecord
from adaptive.timeline.sinks import JSONLTimeline as JSONLTimeline
from adaptive.timeline.sinks import LogTimeline as LogTimeline
from adaptive.timeline.sinks import MemoryTimeline as MemoryTimeline
from adaptive.timeline.sinks import Timeline as Timeline
from adaptive.timeline.tensorboard import TensorBoardTimeline as TensorBoardTimeline
from compressors import Compressor as Compressor
from compressors import Ladder as Ladder
from compressors import NoCompression as NoCompression
from compressors import RandomK as RandomK
from compressors import TopK as TopK
from policies import Accordion as Accordion
from policies import Fixed as Fixed
from policies import Goodput as Goodput
from policies import GraVAC as GraVAC
from policies import Plan as Plan
from policies import Policy as Policy
from policies import Schedule as Schedule
from policies import StepReport as StepReport
from policies import Warmup as Warmup

try:
    __version__ = _version("adaptive-compression")
except _PackageNotFoundError:  # a source tree on sys.path
    __version__ = "0+unknown"
