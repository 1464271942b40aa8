"""Labs with real links: options, what they come to, and what is said where there can be none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runs.netlab import lab as labs
from runs.netlab import place as places
from runs.netlab.command import HELP, OPTIONS, _agree_on_workers
from runs.netlab.lab import Lab, Link, missing, real_links
from runs.netlab.place import HEADERS, Place, told
from runs.parser import UsageError, read
from tests.integration.commands import assert_refused


@pytest.mark.parametrize(
    ("text", "rate", "delay"),
    [("100mbit", 1e8, 0.0), ("1gbit,5ms", 1e9, 5e-3), ("2.5 Gbit/s, 100us", 2.5e9, 1e-4)],
)
def test_a_link_is_read(text: str, rate: float, delay: float) -> None:
    link = Link.parse("--network", text)
    assert (link.rate, link.delay) == (rate, pytest.approx(delay))


@pytest.mark.parametrize("text", ["", "fast", "0mbit", "1bit", "1000gbit", "10mbit,5", "-1mbit"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--network must be a rate from 1kbit to 100gbit"):
        Lab(text).links()


def test_a_burst_is_small_and_never_less_than_two_frames() -> None:
    rates = [f"{mbit}mbit" for mbit in (1, 10, 100, 500, 1000, 10000)]
    bursts = [Link.parse("--network", rate).burst for rate in rates]
    assert bursts == sorted(bursts)
    assert bursts[0] >= 2 * 1514
    assert bursts[-1] / (10e9 / 8) < 1e-3


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["train", "--steps", "3"], None, (["train", "--workers", "2", "--steps", "3"], 2)),
        (["train", "--workers=4"], None, (["train", "--workers=4"], 4)),
        (["compare"], 3, (["compare", "--workers", "3"], 3)),
        (["doctor", "--", "a.py", "--workers", "9"], 4, None),
        (["a.py", "--workers", "9"], None, (["a.py", "--workers", "9"], 2)),
    ],
)
def test_the_lab_has_a_place_for_each_worker(
    words: list[str], given: int | None, expected: tuple[list[str], int] | None
) -> None:
    if expected is None:
        expected = (["doctor", "--workers", "4", *words[1:]], 4)
    assert _agree_on_workers(words, given) == expected


def test_rates_change_where_links_are_not_slow() -> None:
    changing = Lab("100mbit,2ms", 3, 1, ("1:10mbit,1ms",), ("200:1gbit", "50:20mbit"))
    rates = {step: [link.rate for link in changing.links(step)] for step in (0, 49, 50, 199, 200)}
    assert rates[0] == rates[49] == [1e8, 1e7, 1e8]
    assert rates[50] == rates[199] == [2e7, 1e7, 2e7]
    assert rates[200] == [1e9, 1e7, 1e9]
    assert [link.delay for link in changing.links(200)] == [2e-3, 1e-3, 2e-3]
    assert [step for step in range(300) if changing.changes_at(step)] == [50, 200]


def test_options_make_the_same_lab_again() -> None:
    first = Lab("1gbit,5ms", slow_rank=("0:10mbit",), rate_at=("3:20mbit",))
    assert Lab(**read("netlab", OPTIONS, HELP, [*first.options, "--workers", "2"])) == first
    assert real_links(first.options) == str(first)
    assert "1gbit and 5ms, rank 0 10mbit, from step 3 20mbit" in str(first)


def test_workers_of_a_node_share_a_link() -> None:
    lab = Lab("1gbit", 6, 2, slow_rank=("3:10mbit",))
    assert [link.rate for link in lab.links()] == [1e9, 1e7, 1e9]
    assert "1gbit, each shared by 2, rank 3 10mbit" in str(lab)
    told = [lab.as_torchrun(rank) for rank in range(6)]
    assert {each["LOCAL_WORLD_SIZE"] for each in told} == {"2"}
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1"] * 3


def test_child_processes_learn_of_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(labs.VARIABLE, "null")
    assert Lab.of_environment() is None
    opened = Lab("1gbit", 2, 1, ("1:10mbit",), ("5:1mbit",), holder=7, inside=(8, 9), switch=3)
    opened.tell()
    assert Lab.of_environment() == opened


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", "5", "[" * 10**5),
        *('{"network": 5}', '{"network": "1gbit", "what": 1}'),
        '{"network": "1gbit", "workers": "2"}',
        *('{"network": "1gbit", "per_node": 0}', '{"network": "1gbit", "inside": ["a"]}'),
        '{"network": "1gbit", "slow_rank": ["7:1mbit"]}',
    ],
)
@pytest.mark.parametrize("words", [["train", "--steps", "1"], ["netlab", "--network", "1gbit"]])
def test_a_lab_that_nobody_has_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, words: list[str], text: str
) -> None:
    monkeypatch.setenv(labs.VARIABLE, text)
    command = [*words, "--", "train"] if words[0] == "netlab" else words
    assert_refused(capfd, *command, parts=[labs.VARIABLE, "must be what netlab has set"])


def test_headers_are_told_from_data(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(Lab("100mbit"), rank=1)
    place.model = model = torch.nn.Linear(2, 2)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sent in ((70, 1), (1070 + 3 * HEADERS, 4), (2070 + 5 * HEADERS, 6)):
        monkeypatch.setattr(places, "sent_so_far", lambda sent=sent: sent)
        place._stepped(optimizer, (), {})
    counted = place.counted(2000.0)
    assert (counted["steps"], counted["data_bytes"]) == (2, 2000)
    assert counted["interface_bytes"] == 2000 + 5 * HEADERS
    assert "1.165 and 1.000 of the 0.002 MB reported" in told(counted)
    assert "reported" not in told({**counted, "reported_bytes": None})


def test_several_optimizers_make_one_step_of_a_model() -> None:
    """And one whose first group is empty, or of another model, is an optimizer of it, too."""
    place = Place(Lab("100mbit"), rank=1)
    place.model = model = torch.nn.Linear(2, 2)  # type: ignore[assignment]
    groups = [{"params": []}, {"params": [torch.zeros(1)]}, {"params": [model.weight]}]
    both = torch.optim.SGD(groups, lr=0.1), torch.optim.Adam([model.bias])
    for _ in range(3):
        for optimizer in (*both, torch.optim.SGD([torch.zeros(1)], lr=0.1)):
            place._stepped(optimizer, (), {})
    assert place.steps == 3


def test_rates_begin_anew_with_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a comparison of scripts, too, in which nobody calls `begin`."""
    done: list[object] = []
    monkeypatch.setattr(Lab, "shape", lambda lab, step=0: done.append(("shape", step)))
    monkeypatch.setattr(Lab, "enter", lambda lab, rank: done.append(rank))
    monkeypatch.setattr(Place, "watch", lambda place: None)
    monkeypatch.setattr(places, "die_with_parent", lambda: None)
    monkeypatch.setattr(places, "_place", None)
    for name in (labs.VARIABLE, "GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # and as it was afterwards
    Lab("100mbit", rate_at=("5:1mbit",)).tell()
    for rank in range(2):
        places.enter_lab(rank, 2)
    assert done == [("shape", 0), 0, 1]


@pytest.mark.parametrize("dashes", [[], ["--"]])
@pytest.mark.parametrize(("told", "places"), [([], 2), (["--workers", "3"], 3)])
def test_the_workers_of_a_script_are_its_own(
    dashes: list[str], told: list[str], places: int
) -> None:
    """Those that load its data, say."""
    words = ["doctor", *told, *dashes, "script.py", "--workers", "8"]
    found, workers = _agree_on_workers(words, None)
    assert workers == places
    assert found[:3] == ["doctor", "--workers", str(places)]
    assert found[-2:] == ["--workers", "8"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--network", "fast", "--", "train"], ["--network must be a rate", "'fast'"]),
        (["--network", "1gbit"], ["-- COMMAND: none given"]),
        (["--", "train"], ["--network"]),
        (["--network", "1gbit", "--", "report"], ["-- report: must be train, compare"]),
        (
            ["--network", "1gbit", "--workers", "2", "--", "train", "--workers", "4"],
            ["--workers 4"],
        ),
        (["--network", "1gbit", "--slow-rank", "2:1mbit", "--", "train"], ["ranks 0 to 1"]),
        (["--network", "1gbit", "--slow-rank", "1mbit", "--", "train"], ["must be RANK:RATE"]),
        (["--network", "1gbit", "--rate-at", "5:1mbit,1ms", "--", "train"], ["a rate alone"]),
        (
            ["--network", "1gbit", "--per-node", "2", "--workers", "3", "--", "train"],
            ["divide", "3"],
        ),
        (
            ["--network", "1gbit", "--workers", "100000000", "--", "train"],
            ["--workers", "500 at most"],
        ),
    ],
)
def test_wrong_options_are_one_line(capfd: Any, words: list[str], parts: list[str]) -> None:
    assert_refused(capfd, "netlab", *words, parts=parts)


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(labs.sys, "platform", "darwin")
    assert "needs Linux" in missing()
    monkeypatch.undo()
    monkeypatch.setattr(labs.sys, "platform", "linux")
    monkeypatch.setattr(labs, "_tool", lambda name: None)
    command = ["--network", "1gbit", "--", "train"]
    assert_refused(capfd, "netlab", *command, parts=["ip and tc not found: install iproute2"])
    monkeypatch.setattr(labs, "_tool", lambda name: f"/sbin/{name}")

    def refuse(name: str, *arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(labs, "_call", refuse)
    parts = ["no network namespaces can be had here (Operation not permitted)", "run it as root"]
    assert_refused(capfd, "netlab", *command, parts=parts)


def test_a_lab_is_not_built_inside_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(labs.VARIABLE, "null")
    Lab("1gbit").tell()
    with pytest.raises(UsageError, match="inside a netlab already"):
        Lab("1gbit").opened()
