"""The settings of runs of a user's own script, before any process starts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from runs.__main__ import main
from runs.compare.command import turns
from runs.compare.options import make_comparison
from runs.config import TrainConfig
from runs.options import make_config, with_script
from runs.parser import UsageError, at_dashes
from runs.records import Recorded
from runs.report.run import Run
from runs.script_run import _Watched
from runs.tune.study import written
from runs.tune.tuning import make_tuning


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("print('nothing')\n")
    return path


def comparison(script: Path, *words: str, **given: Any) -> Any:
    return make_comparison(with_script({**given, "command": [str(script), *words]}))


def test_places_in_the_words_are_filled(script: Path) -> None:
    made = comparison(
        script,
        *("--seed", "{seed}", "--out={run}", "--lr", "{lr}", '{"a": {other}}'),
        contender=("dense", "topk@50:lr=0.25"),
        seeds=(3, 4),
    )
    config = made.config(made.contenders[1], 4)
    assert config.script[1:] == (*("--seed", "4", "--out={run}", "--lr", "0.25", '{"a": {other}}'),)
    assert config.lr is None
    assert config.policy == "Fixed(cf=50)"


def test_a_contender_names_what_is_not_the_scripts_own(script: Path) -> None:
    made = comparison(script, contender=("goodput", "gravac:epsilon=0.5,cf_range=10/500", "own"))
    goodput, gravac, own = (made.config(one, 0) for one in made.contenders)
    assert goodput.base is None
    assert goodput.contender == "goodput"
    assert gravac.contender == "GraVAC(epsilon=0.5):cf_range=10/500"
    assert own.contender == "own"
    assert len(turns(made)) == 3


def test_the_command_of_a_run_makes_it_again(script: Path) -> None:
    given = {"metric": "val loss {}", "network": "100mbit", "workers": 3}
    labels = ("dense", "gravac:epsilon=0.5,cf_range=10/500,memory=residual", "topk+bf16@50")
    made = comparison(script, "--epochs", "3", contender=labels, **given)
    for one in made.contenders:
        config = made.config(one, 0)
        own, behind = at_dashes(shlex.split(config.command)[4:])
        assert behind == [str(script), "--epochs", "3"]
        options = {a.removeprefix("--"): b for a, b in zip(own[::2], own[1::2], strict=True)}
        again = comparison(
            script,
            *behind[1:],
            contender=(options["contender"],),
            network=options["network"],
            metric=options["metric"],
            workers=int(options["workers"]),
        )
        found = again.config(again.contenders[0], 0)
        assert {**vars(found), "log_dir": ""} == {**vars(config), "log_dir": ""}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"steps": 9}, ["--steps 9", "the script's own", "{steps}"]),
        ({"contender": ("goodput:lr=0.1",)}, ["--lr 0.1", "{lr}"]),
        ({"contender": ("ddp",)}, ["own, the script as it is"]),
        ({"contender": ("own",), "network": "1gbit"}, ["--network 1gbit", "netlab"]),
        ({"seeds": (0, 1)}, ["--seeds 0 1", "{seed}"]),
        ({"slice": 3}, ["--slice 3", "from its beginning to its end"]),
        ({"metric": "loss"}, ["--metric 'loss'", "val loss {}"]),
    ],
)
def test_what_does_not_go_with_a_script_is_refused(
    script: Path, given: dict[str, Any], parts: list[str]
) -> None:
    def check() -> None:
        made = comparison(script, **given)
        for one in made.contenders:
            made.config(one, 0)

    with pytest.raises(UsageError) as error:
        check()
    for part in parts:
        assert part in str(error.value)


def test_a_metric_needs_a_script(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--metric", "loss {}"]) == 2
    assert "is of a script of your own" in capfd.readouterr().err
    assert main(["tune", "--", "gone.py"]) == 2
    assert "-- gone.py: No such file" in capfd.readouterr().err


def test_a_changed_script_is_another_one(script: Path) -> None:
    before = comparison(script)
    script.write_text("print('something')\n")
    assert comparison(script).folder != before.folder
    assert comparison(script, "--epochs").folder != comparison(script).folder


def test_a_trial_of_a_script(script: Path) -> None:
    given = {"metric": "acc {}", "search": ["epsilon", "lr=0.01..1"]}
    words = {**given, "command": [str(script), "--lr", "{lr}"]}
    tuning = make_tuning(with_script(words))
    assert tuning.directions == ["maximize", "minimize"]
    assert tuning.labels == ["acc", "MB sent by a worker"]
    config = tuning.config({"epsilon": 0.25, "lr": 0.5}, 7)
    assert config.script[1:] == ("--lr", "0.5")
    assert written(config) == "AdaptiveCompressor(policy=GraVAC(epsilon=0.25))"
    with pytest.raises(UsageError, match="--search lr: needs a range"):
        make_tuning(with_script({**words, "search": ["lr"]}))
    with pytest.raises(UsageError, match="--metric: needed"):
        make_tuning(with_script({"command": [str(script)]}))


def test_steps_go_on_with_an_optimizer_that_is_made_later() -> None:
    """As where the head is trained first: a step more or less at the change is none."""
    model = torch.nn.Linear(2, 2)
    watched = _Watched(job=None, rank=0, folder=Path("x"), model=model)  # type: ignore[arg-type]
    for optimizer in (torch.optim.SGD([model.bias], 0.1), torch.optim.Adam(model.parameters())):
        for _ in range(5):
            watched._stepped(optimizer, (), {})
    assert watched.steps == 9
    assert len(watched.seconds) == 9


def test_a_script_as_it_is_is_dense_without_a_compressor(script: Path) -> None:
    config = make_config({"policy": "ddp", "script": (str(script),), "log_dir": "x"})
    assert isinstance(config, TrainConfig)
    run = Run("own", Path("x"), config, Recorded([], []), 9, ())
    assert run.is_dense
    assert run.task == "script.py"
    assert not run.finished
