"""The sink that writes TensorBoard's event files: scalars of the CF timeline, and switches as text.

All scalars of a step are written as one record of the event file. This takes a tenth of the time
of a `SummaryWriter.add_scalar` for each scalar. Importing this module does not need the tensorboard
package; making a `TensorBoardTimeline` does.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from adaptive.timeline.records import Event, Header, StepRecord
from adaptive.timeline.sinks import ThinnedTimeline
from adaptive.timeline.summary import headline_of
from policies.words import named

PLUGIN = "cf_timeline"
"""The name of the TensorBoard plugin. It reads the tags `SWITCHES` and `HEADLINE`."""

SWITCHES = f"{PLUGIN}/switches"
HEADLINE = f"{PLUGIN}/headline"

HEADLINE_SECONDS = 10.0
"""Least seconds between two headlines. An event and the end of the run always write a headline."""


class TensorBoardTimeline(ThinnedTimeline):
    """A sink that writes event files, which `tensorboard --logdir` shows.

    log_dir: folder for the event files, or an existing `torch.utils.tensorboard.SummaryWriter`.
        `close` leaves that writer open.
    interval: write every `interval`-th step; None: at most 10 steps a second. The two steps around
        a switch of CF are always written.
    ImportError if the tensorboard package is missing; its message says what to install.
    """

    # Least seconds between two written steps. Writing one takes 0.1 to 0.3 ms, less than 1% of it.
    shortest = 0.1

    def __init__(self, log_dir: str | Path | Any, interval: int | None = None) -> None:
        super().__init__(interval)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardTimeline needs the tensorboard package: pip install tensorboard"
            ) from error
        self._own = isinstance(log_dir, (str, Path))
        if not self._own and not isinstance(log_dir, SummaryWriter):
            raise TypeError(f"log_dir must be a folder or a SummaryWriter, got {log_dir!r}")
        self._open = (
            partial(SummaryWriter, str(log_dir), flush_secs=10) if self._own else lambda: log_dir
        )
        self._writer: Any = None
        self._header: Header | None = None
        self._headline_due = 0.0

    def start(self, header: Header) -> None:
        self._header = header

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if time.monotonic() >= self._headline_due:
            self._headline_due = time.monotonic() + HEADLINE_SECONDS
            self._write_headline()

    def event(self, event: Event) -> None:
        names = {} if self._header is None else self._header.rungs
        text = f"{named(event.cf, names)}: {event.reason}"
        cfs = event.cf_before, event.cf
        rungs = {f"{cf:g}": names[cf] for cf in cfs if cf in names}
        switch = {"cf_before": cfs[0], "cf": cfs[1], "reason": event.reason, "rungs": rungs}
        self._write_texts({"policy/switch": text, SWITCHES: json.dumps(switch)}, event.step)
        self._write_headline()

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is None:
            return
        atexit.unregister(self.close)
        self._write_headline()
        super().close()
        self._writer.flush()
        if self._own:
            self._writer.close()
        self._writer = None

    def _opened(self) -> Any:
        """The writer. It is opened at the first record, so only the writing rank makes a file.
        TensorBoard follows a folder's latest file, and the files of other ranks would be empty."""
        if self._writer is None:
            self._writer = self._open()
            atexit.register(self.close)
        return self._writer

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        write_scalars(self._opened(), values, step, at)

    def _write_headline(self) -> None:
        """Write the headline of the run so far, if there is one."""
        last = self._last
        if last is not None and (text := headline_of(last, self._header)):
            self._write_texts({"policy/headline": text, HEADLINE: text}, last.report.step)

    def _write_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Write texts by tag. A tag that begins with `PLUGIN` is for the plugin, any other for
        TensorBoard's text page."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            string_value(tag, PLUGIN if tag.startswith(PLUGIN) else "text", text.encode())
            for tag, text in texts.items()
        ]
        self._opened()._get_file_writer().add_summary(Summary(value=values), step)


def string_value(tag: str, plugin: str, content: bytes) -> Any:
    """A protobuf `Summary.Value` with one string for the TensorBoard plugin named `plugin`."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=data, data_class=summary_pb2.DATA_CLASS_TENSOR
    )
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content])
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def write_scalars(
    writer: Any, values: Mapping[str, float], step: int, at: float | None = None
) -> None:
    """Write the finite values as one record of the event file. writer: a `SummaryWriter`. at: the
    time in seconds since the epoch; None: now."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    known = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items() if isfinite(v)]
    if known:
        writer._get_file_writer().add_summary(Summary(value=known), step, at)
