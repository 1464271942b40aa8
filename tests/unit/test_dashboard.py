"""The dashboard's answers, from event files that the sink wrote, as TensorBoard reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard import errors
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.base_plugin import TBContext
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client

from adaptive import Event, Header, TensorBoardTimeline
from adaptive.timeline.tensorboard import PLUGIN, SWITCHES, string_value
from runs.dashboard import timeline as row
from runs.dashboard.plugin import CFTimelinePlugin, Loader
from tests.unit.test_tensorboard import _record


class Board:
    """TensorBoard without its own pages, over a folder."""

    def __init__(self, folder: Path) -> None:
        flags = Namespace(samples_per_plugin={})
        Loader().fix_flags(flags)
        multiplexer = EventMultiplexer(
            tensor_size_guidance={"scalars": 1000, **flags.samples_per_plugin}
        )
        multiplexer.AddRunsFromDirectory(str(folder))
        multiplexer.Reload()
        provider = MultiplexerDataProvider(multiplexer, str(folder))
        self.plugin = Loader().load(TBContext(data_provider=provider))
        self.routes = self.plugin.get_plugin_apps()

    def get(self, route: str, **query: Any) -> Any:
        return Client(self.routes[route]).get("/", query_string=query)

    def row(self, run: str, **query: Any) -> Any:
        return json.loads(self.get("/timeline", run=run, **query).text)


def _run(folder: Path, cfs: list[float], layers: dict[int, dict[str, float]] | None = None) -> None:
    writer = SummaryWriter(str(folder))
    timeline = TensorBoardTimeline(writer, interval=1)
    told = "goodput", {}, (10, 100), 2, "topk", "residual", 9, 36.0, {}, {}
    timeline.start(Header(*told, rungs={8.0: "int4", 20.0: "int8"}))
    own: dict[str, float] = {}
    for step, cf in enumerate(cfs):
        before = cfs[step - 1] if step else cf
        if cf != before:
            timeline.event(Event(step, before, cf, f"<b>why</b> {step}\narithmetic"))
        own = (layers or {}).get(step, own)
        timeline.step(_record(step, cf, own))
    writer.add_scalar("train/loss", 2.0, 1)
    writer.add_scalar("eval/quality", 0.5, 2)
    timeline.close()
    writer.close()


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    folder = tmp_path_factory.mktemp("board")
    _run(folder / "a", [1, 1, 10, 10, 20, 1])
    _run(folder / "b", [10] * 5, {2: {"fc": 40.0, "conv": 4.0}, 4: {"fc": 4.0, "conv": 4.0}})
    flapping = [1.0 if (step // 3) % 2 else 10.0 for step in range(1200)]
    _run(folder / "flaps", flapping)
    _run(folder / "whole", [1] * 3)
    with SummaryWriter(str(folder / "dense")) as writer:
        writer.add_scalar("train/loss", 2.0, 1)
    return Board(folder)


def test_runs_without_a_cf_do_not_appear(board: Board) -> None:
    runs = json.loads(board.get("/runs").text)["runs"]
    assert [run["name"] for run in runs] == ["a", "b", "flaps", "whole"]
    assert runs[0]["qualities"] == ["eval/quality", "train/loss"]
    assert board.plugin.is_active()


def test_a_folder_without_any_cf_leaves_the_tab_inactive(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/loss", 2.0, 1)
    assert not Board(tmp_path).plugin.is_active()


def test_a_row_tells_cf_switches_and_numbers(board: Board) -> None:
    a = board.row("a")
    assert (a["first"], a["last"], a["most"]) == (0, 5, 20)
    assert a["totals"]["moves"] == [0, 0, 1, 1, 2, 3]
    assert a["totals"]["sent"] == [100, 200, 300, 400, 500, 600]
    assert a["totals"]["dense"] == [1000, 2000, 3000, 4000, 5000, 6000]
    assert a["band"]["step"] == [0, 2, 4, 5]
    assert a["band"]["cf"] == [1, 10, 20, 1]
    assert a["band"]["end"]["step"] == 6
    assert a["switches"]["step"] == [2, 4, 5]
    assert a["switches"]["before"] == [1, 10, 20]
    assert a["switches"]["reason"][1] == "<b>why</b> 4\narithmetic"
    assert a["rungs"] == {"20": "int8"}  # of those that were sent
    assert [board.row(run)["dense"] for run in ("a", "b", "whole")] == [False, False, True]
    assert a["numbers"]["step"] == [0, 1, 2, 3, 4, 5]
    assert a["numbers"]["values"]["gain/sent"] == [0.6] * 6
    assert a["numbers"]["values"]["bytes/sent"] == [100] * 6
    seconds = a["numbers"]["second"]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0
    assert a["quality"]["tag"] == "eval/quality"
    assert (a["quality"]["step"], a["quality"]["values"]) == ([2], [0.5])
    assert a["layers"] is None


def test_the_quality_can_be_chosen(board: Board) -> None:
    assert board.row("a", quality="train/loss")["quality"]["values"] == [2]
    assert board.row("a", quality="unknown")["quality"]["tag"] == "eval/quality"


def test_a_quality_is_told_by_words_not_by_letters_inside_them() -> None:
    tags = ["env/grad_accum_steps", "loss/train", "perf/bf16_tflops", "val/acc", "cf/sent"]
    assert row.quality_tags(tags) == ["val/acc", "loss/train"]


def test_a_part_of_a_run_begins_with_the_cf_in_use(board: Board) -> None:
    part = board.row("a", **{"from": 3, "to": 4})
    assert (part["from"], part["to"]) == (3, 4)
    assert (part["band"]["step"], part["band"]["cf"]) == ([3, 4], [10, 20])
    assert part["switches"]["step"] == [4]
    assert part["numbers"]["step"] == [3, 4]
    beyond = board.row("a", **{"from": 77, "to": 99})
    assert beyond["band"]["cf"] == [1]


def test_layers_hold_their_cf_until_the_next(board: Board) -> None:
    layers = board.row("b")["layers"]
    assert layers["names"] == ["conv", "fc"]
    assert layers["step"] == [0, 2, 4]
    assert layers["cf"] == [[10, 4, 4], [10, 40, 4]]  # at first that of the model


def test_thousands_of_switches_are_few_but_all_counted(board: Board) -> None:
    answer = board.get("/timeline", run="flaps")
    assert len(answer.data) < 100_000
    flaps = json.loads(answer.text)
    assert flaps["totals"]["moves"][-1] == 399
    assert len(flaps["switches"]["step"]) <= row.MARKS
    assert sum(flaps["switches"]["others"]) + len(flaps["switches"]["step"]) == 399
    assert len(flaps["band"]["step"]) <= row.PIECES
    near = board.row("flaps", **{"from": 900, "to": 920})
    assert near["switches"]["others"] == [0] * 7  # near enough, each is seen
    assert near["band"]["step"] == list(range(900, 921, 3))


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"run": ""},
        {"run": "a", "from": "x"},
        {"run": "a", "from": 5, "to": 3},
        {"run": "a", "to": "nan"},
    ],
)
def test_bad_questions_are_refused(board: Board, query: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="must"):
        board.get("/timeline", **query)


@pytest.mark.parametrize("run", ["none", "dense", "../a"])
def test_unknown_runs_are_not_found(board: Board, run: str) -> None:
    with pytest.raises(errors.NotFoundError, match="run must be one with a CF"):
        board.get("/timeline", run=run)


def test_switches_that_nobody_can_read_are_left_out(tmp_path: Path) -> None:
    _run(tmp_path / "a", [1, 10])
    with SummaryWriter(str(tmp_path / "a")) as writer:
        for step, content in enumerate((b"{", b"[1]", b'{"cf": "x"}', b"\xff"), start=1):
            value = string_value(SWITCHES, PLUGIN, content)
            writer._get_file_writer().add_summary(Summary(value=[value]), step)
    assert Board(tmp_path).row("a")["switches"]["reason"] == ["<b>why</b> 1\narithmetic"]


def _is_strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_cf_that_is_none_is_left_out(tmp_path: Path) -> None:
    """Any program can write event files; a NaN was answered with an error 500."""
    with SummaryWriter(str(tmp_path / "a")) as writer:
        cfs = [10.0, nan, inf, -inf, 0.0, -3.0, 1e38, 0.5, 20.0]
        for step, cf in enumerate(cfs):
            writer.add_scalar("cf/sent", cf, step)
            writer.add_scalar("cf_layer/fc", cf, step)
            writer.add_scalar("time/total", -cf, step)
            writer.add_scalar("time/step", cf, step)
            writer.add_scalar("eval/quality", cf, step)
        writer.add_scalar("cf/sent", 40.0, 10**18)
    with SummaryWriter(str(tmp_path / "b")) as writer:
        writer.add_scalar("cf/sent", nan, 1)
    board = Board(tmp_path)
    answer = board.get("/timeline", run="a")
    assert answer.status_code == 200
    a = _is_strict(answer.text)
    assert a["band"]["cf"] == [10, 20, 40]
    assert a["band"]["step"] == [0, 8, 1e18]
    assert a["numbers"]["values"]["time/step"][:2] == [10, 20]
    with pytest.raises(errors.NotFoundError, match="run must be one with a CF"):
        board.get("/timeline", run="b")


class _Provider:
    """Whatever a data provider may say of one run."""

    def __init__(self, points: dict[str, list[Any]], switches: list[Any]) -> None:
        self._points, self._switches = points, switches

    def list_scalars(self, **_: Any) -> Any:
        return {"a": dict.fromkeys(self._points)}

    def read_scalars(self, **_: Any) -> Any:
        return {"a": self._points}

    def read_tensors(self, **_: Any) -> Any:
        return {"a": {SWITCHES: self._switches}}


_STEPS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30)
_VALUES = st.floats() | st.sampled_from([1.0, 10.0, nan, inf, -inf, 0.0, 1e308, -1e308])
_POINTS = st.lists(
    st.builds(
        lambda step, wall, value: SimpleNamespace(step=step, wall_time=wall, value=value),
        _STEPS,
        _VALUES,
        _VALUES,
    ),
    max_size=6,
)
_CONTENT = (
    st.binary(max_size=8)
    | st.sampled_from([b'{"cf": NaN, "cf_before": 1, "reason": ""}', b"[" * 100_000])
    | st.builds(
        lambda before, cf, why: json.dumps({"cf_before": before, "cf": cf, "reason": why}).encode(),
        _VALUES | st.just(10**400),
        _VALUES,
        st.text(max_size=3) | st.none(),
    )
)


@given(
    st.fixed_dictionaries(
        {"cf/sent": _POINTS},
        optional=dict.fromkeys(
            ["time/total", "time/step", "gain/error_fed", "eval/quality", "cf_layer/" + "9" * 5000],
            _POINTS,
        ),
    ),
    st.lists(
        st.builds(lambda s, c: SimpleNamespace(step=s, numpy=np.array(c)), _STEPS, _CONTENT),
        max_size=4,
    ),
    st.none() | st.tuples(_VALUES, _VALUES),
)
def test_whatever_is_in_event_files_the_answer_is_json_or_a_sentence(
    points: dict[str, list[Any]], switches: list[Any], span: tuple[float, float] | None
) -> None:
    provider: Any = _Provider(points, switches)
    app = CFTimelinePlugin(TBContext(data_provider=provider)).get_plugin_apps()["/timeline"]
    query = {} if span is None else {"from": span[0], "to": span[1]}
    refused: errors.PublicError | None = None
    try:
        answer = Client(app).get("/", query_string={"run": "a", **query})
    except errors.PublicError as error:  # TensorBoard answers with its code and sentence
        refused = error
    if refused is not None:
        assert refused.http_code in (400, 404)
        assert "must" in str(refused)
    else:
        assert answer.status_code == 200
        _is_strict(answer.text)


def test_the_page_is_served_file_by_file(board: Board) -> None:
    metadata = board.plugin.frontend_metadata()
    assert metadata.tab_name == "CF Timeline"
    page = board.get(metadata.es_module_path)
    assert page.mimetype == "application/javascript"
    assert "export async function render" in page.text
    assert board.get("/style.css").mimetype == "text/css"


def test_loading_the_plugin_loads_no_torch() -> None:
    script = "import runs.dashboard.plugin, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False"
