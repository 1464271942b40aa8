"""Gossip by the commands of `python -m runs`: trained, resumed, and studied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.studies import gossip as study
from runs.__main__ import main
from tests.distributed.setting import same

SHORT = ("--batch-size", "1", "--cf", "20")
GOSSIP = "Gossip('ring', consensus_step=0.5{})"


@pytest.mark.long
def test_a_simulated_run_is_evaluated_at_the_mean_and_resumed_to_the_bit(
    text: Path, tmp_path: Path, capsys: Any
) -> None:
    def run(*words: str) -> dict[str, Any]:
        assert main(["simulate", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    def states(name: str) -> list[dict[str, Any]]:
        files = sorted((tmp_path / name).glob("checkpoint/step-*/rank*.pt"))
        return [torch.load(path, weights_only=True) for path in files]

    given = ("--data", str(text), *SHORT, "--sync", GOSSIP.format(""), "--workers", "3")
    given += ("--checkpoint-every", "4")
    whole = run(*given, "--steps", "8", "--log-dir", str(tmp_path / "whole"))
    run(*given, "--steps", "4", "--log-dir", str(tmp_path / "half"))
    rest = run("--resume", str(tmp_path / "half"), "--steps", "8")
    assert rest["quality"] == whole["quality"]
    assert "spectral gap 1" in whole["summary"]["sync"]  # three are all neighbours
    ours, theirs = states("half"), states("whole")
    assert len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        for what in ("model", "optimizers"):
            assert same(mine[what], other[what])
        assert same(mine["compressor"]["sync"], other["compressor"]["sync"])
    assert not same(theirs[0]["model"], theirs[1]["model"])


@pytest.mark.long
def test_the_study_reckons_seconds_from_one_run_of_each(text: Path, tmp_path: Path) -> None:
    contenders = ("dense", "topk@20:exchange=all_gather", "none:sync=Gossip()")
    words = ["--data", str(text), "--batch-size", "1", "--steps", "2", "--eval-every", "1"]
    words += ["--sizes", "2", "4", "--log-dir", str(tmp_path), "--contenders", *contenders]
    study.main([*words, "--links", "8mbit,10ms", "--target", "1e9"])
    rows = {}
    for n in (2, 4):
        for one in map(study.contender, contenders):
            run, config = study.read(tmp_path / "runs" / f"{one.folder}-of-{n}")
            rows[one.label, n] = study.trained(one.label, run, config, 1e9)
    link = study.LinkSpec.parse("8mbit,10ms")
    beta, alpha = 1e-6, 0.01  # of a byte, of a message
    for (label, n), row in rows.items():
        assert row.to_target == 1  # any quality will do
        senders = 1 if "Gossip" in label else n
        lecture = 0.1 + senders * (alpha + row.message * beta)
        assert row.seconds(link, 0.1, lecture=True) == pytest.approx(lecture)
        hops = {"dense": 2 * (n - 1), "topk@20:exchange=all_gather": n - 1}.get(label, 1)
        rings = 0.1 + hops * alpha + row.sent * beta
        assert row.seconds(link, 0.1, lecture=False) == pytest.approx(rings)
        assert f"{lecture:.3g} / {rings:.3g}" in (tmp_path / "table.txt").read_text()
    for n, copies in ((2, 1), (4, 2)):
        dense, gossip = rows["dense", n], rows["none:sync=Gossip()", n]
        assert dense.sent == pytest.approx(2 * (n - 1) / n * dense.message)
        assert gossip.sent == pytest.approx(copies * gossip.message)
        assert gossip.message == pytest.approx(dense.message)
    assert (tmp_path / "gossip.png").exists()


def test_local_steps_are_those_between_two_exchanges(
    text: Path, tmp_path: Path, capsys: Any
) -> None:
    sent = []
    for every in ("1", "2"):
        words = ("--data", str(text), *SHORT, "--workers", "2")
        words += ("--sync", GOSSIP.format(f", every={every}"))
        words += ("--steps", "4", "--log-dir", str(tmp_path / every))
        assert main(["simulate", "--json", *words]) == 0
        summary = json.loads(capsys.readouterr().out)["summary"]
        assert (summary["steps"], summary["local_steps"]) == (4 // int(every), 4)
        sent.append(summary["bytes_sent"])
    assert sent[0] == 2 * sent[1]
