"""The sink that writes TensorBoard's event files.

Scalars are those of thinned.py. Those of a step are written as one record of the file: that costs a
tenth of as many calls of `SummaryWriter.add_scalar`. Beside them go the whole records of all steps,
which TensorBoard passes over, and from which reports are made and policies replayed.

Importing this needs no tensorboard package; making a `TensorBoardTimeline` does.
"""

from __future__ import annotations

import atexit
import json
import time
import zlib
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from adaptive.timeline.records import Event, Header, StepRecord, as_line, headline_of
from adaptive.timeline.thinned import ThinnedTimeline

PLUGIN = "cf_timeline"
"""The name of the dashboard (`runs.dashboard`); tensors written for it are marked with it."""

SWITCHES = f"{PLUGIN}/switches"
HEADLINE = f"{PLUGIN}/headline"

RECORDS = "cf_records"
"""The tag of whole records: lines of JSON as `JSONLTimeline` writes them, compressed by zlib. Also
the name of the plugin that they are for, which is none of TensorBoard's."""

HEADLINE_SECONDS = 10.0
"""Between two headlines; one is written with every switch, and at the end, too."""

_HELD = 1000
"""Records that wait for scalars to be written with, at most."""


class TensorBoardTimeline(ThinnedTimeline):
    """A sink that writes event files, which `tensorboard --logdir` shows.

    log_dir: folder for the event files, or an existing `torch.utils.tensorboard.SummaryWriter`,
        which stays open.
    interval: write scalars every this many steps; None: every step, but no more than 10 a second. A
        step with another CF than the one before is always written, and so is the one before it.
    records: also write the whole record of every step, so that `python -m runs report`
        can read the folder. It takes some 0.5 kB a step, and as long as a JSONLTimeline.
    ImportError, naming the extra to install, without the tensorboard package.
    """

    def __init__(
        self,
        log_dir: str | Path | Any,
        interval: int | None = None,
        *,
        records: bool = True,
    ) -> None:
        super().__init__(interval)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardTimeline needs the tensorboard package: "
                "pip install 'adaptive-compression[tensorboard]'"
            ) from error
        self._own = isinstance(log_dir, (str, Path))
        if not self._own and not isinstance(log_dir, SummaryWriter):
            raise TypeError(f"log_dir must be a folder or a SummaryWriter, got {log_dir!r}")
        self._open = (
            partial(SummaryWriter, str(log_dir), flush_secs=10) if self._own else lambda: log_dir
        )
        self._writer: Any = None
        # Records that are not written yet.
        self._whole: list[Header | StepRecord | Event] | None = [] if records else None
        self._network, self._gossip, self._headline_due = "", False, 0.0

    def start(self, header: Header) -> None:
        self._network, self._gossip = header.network, header.gossip
        self._keep(header)

    def step(self, record: StepRecord) -> None:
        self._keep(record)
        super().step(record)
        if time.time() >= self._headline_due:
            self._headline_due = time.time() + HEADLINE_SECONDS
            self._write_headline()

    def event(self, event: Event) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        text = f"CF {event.cf_before:g} -> {event.cf:g}: {event.reason}"
        switch = {"cf_before": event.cf_before, "cf": event.cf, "reason": event.reason}
        values = [
            string_value("policy/switch", "text", text.encode()),
            string_value(SWITCHES, PLUGIN, json.dumps(switch).encode()),
        ]
        self._opened()._get_file_writer().add_summary(Summary(value=values), event.step)
        self._write_headline()
        self._keep(event)
        self._write_whole(event.step)

    def flush(self) -> None:
        if self._writer is not None:
            self._write_whole()
            self._writer.flush()

    def _write_headline(self) -> None:
        """Whether compression was worth it so far, for the text page and the dashboard."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._last is None:
            return
        if text := headline_of(self._last, self._network, self._gossip):
            values = [
                string_value("policy/headline", "text", text.encode()),
                string_value(HEADLINE, PLUGIN, text.encode()),
            ]
            writer = self._opened()._get_file_writer()
            writer.add_summary(Summary(value=values), self._last.report.step)

    def close(self) -> None:
        if self._writer is None:
            return
        atexit.unregister(self.close)
        self._write_skipped()
        self._write_whole()
        step = 0
        if self._last is not None:
            step = self._last.report.step
            self._write_headline()
        write_scalars(self._writer, self._final_numbers(), step)
        self._writer.flush()
        if self._own:
            self._writer.close()
        self._writer = None

    def _opened(self) -> Any:
        """The writer. Opened at the first record, so on the writing rank only: TensorBoard follows
        the latest file of a folder, and one that another rank opened would stay empty."""
        if self._writer is None:
            self._writer = self._open()
            atexit.register(self.close)
        return self._writer

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        write_scalars(self._opened(), values, step, at)
        self._write_whole(step)

    def _keep(self, recorded: Header | StepRecord | Event) -> None:
        """To be written with the next scalars."""
        if self._whole is not None:
            self._whole.append(recorded)
            if len(self._whole) == _HELD:
                self._write_whole()

    def _write_whole(self, step: int | None = None) -> None:
        """Write the records since the last time; `step` is the newest step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._whole:
            lines = zlib.compress("".join(map(as_line, self._whole)).encode())
            self._whole = []
            summary = Summary(value=[string_value(RECORDS, RECORDS, lines)])
            self._opened()._get_file_writer().add_summary(summary, step)


def string_value(tag: str, plugin: str, content: bytes) -> Any:
    """A tensor of one string, for this plugin of TensorBoard's."""
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
    """Write those of the values that are finite. at: seconds since the epoch; None: now."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    known = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items() if isfinite(v)]
    if known:
        writer._get_file_writer().add_summary(Summary(value=known), step, at)
