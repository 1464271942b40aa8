"""The timeline in TensorBoard: scalars, a layout for them, switches, HParams, histogram, figure.

Importing this needs no tensorboard package; making a `TensorBoardTimeline` does.
"""

from adaptive.tensorboard.hparams import end_session, start_session
from adaptive.tensorboard.sink import TensorBoardTimeline

__all__ = ["TensorBoardTimeline", "end_session", "start_session"]
