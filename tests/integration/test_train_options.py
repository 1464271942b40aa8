"""The options of `python -m runs train`: what is refused, and what is kept of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from adaptive.step.config import make_base
from runs.__main__ import main
from runs.build import build_compressor
from runs.cli import HELP, OPTIONS
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import read
from tests.integration.commands import assert_refused

BAD = {
    "--window 5": ["Unrecognized", "--window"],
    "--task x": ["--task", "'x'", "text, cifar10"],
    "--model x": ["--model", "'x'", "lstm, gpt"],
    "--data /nowhere": ["--data", "/nowhere", "text file or a folder"],
    "--workers 0": ["--workers", "'0'", "integer >= 1"],
    "--steps many": ["--steps", "'many'", "integer >= 1"],
    "--lr -1": ["--lr", "'-1'", "> 0"],
    "--policy x": ["--policy", "'x'", "gravac"],
    "--base x": ["--base", "'x'", "adacomp, bf16, dgc"],
    "--base int8+bf16": ["--base", "'int8+bf16'", "sparsifier"],
    "--base TwoBit(x=1)": ["--base 'TwoBit(x=1)'", "'x'"],
    "--base TwoBit(threshold=-1)": ["threshold must", "-1"],
    "--base topk+x": ["--base", "'topk+x'", "bf16, fp16"],
    "--exchange x": ["--exchange", "'x'", "all_gather, sharded"],
    "--base qsgd --exchange all_reduce": ["--exchange", "'all_reduce'", "all_gather"],
    "--granularity x": ["--granularity", "'x'", "one of 'auto', 'bucket', 'layer'"],
    "--dense-below -1": ["--dense-below", "'-1'", ">= 0"],
    "--base fp16 --dense-below 9": ["--dense-below", "9", "half"],
    "--policy Goodput(margin=0)": ["--policy", "margin=0", "(0, 1]"],
    "--policy schedule": ["--policy schedule", "Schedule(pieces, gain)"],
    "--policy Schedule({0:0.5})": ["--policy", "pieces[0]=0.5", ">= 1"],
    "--policy Schedule({-1:2})": ["--policy", "step=-1", ">= 0"],
    "--policy Schedule({5:2}) --cf-range 10 20": ["CF 2", "--cf-range 10 20"],
    "--step 3": ["--step", "--steps N"],
    "--cf-range 1000 10": ["--cf-range", "1000", "must not exceed"],
    "--cf-range 0 10": ["--cf-range", "0.0", ">= 1"],
    "--cf-range 10": ["--cf-range", "Expected 2"],
    "--cf-range nan 10": ["--cf-range", "'nan'", "finite"],
    "--policy GraVAC(epsilon=1.5)": ["--policy", "epsilon=1.5", "(0, 1]"],
    "--policy GraVAC(omega=0)": ["--policy", "omega=0", "(0, 1]"],
    "--policy GraVAC(epsilom=0.5)": ["--policy", "takes no epsilom", "epsilon, omega"],
    "--policy GraVAC(scaling='x')": ["scaling='x'", "'geometric'"],
    "--policy GraVAC(gain='x')": ["gain='x'", "'error_fed'"],
    "--policy Fixed(cf=5) --cf 5": ["cf is given twice"],
    "--policy GraVAC --steps 9": ["--policy", "'GraVAC'", "gravac", "Warmup(steps=50"],
    "--memory x": ["--memory", "'x'", "momentum"],
    "--memory Momentum(share=0)": ["--memory", "share=0", "(0, 1]"],
    "--memory Momentum(masking=0.5)": ["--memory", "masking=0.5", ">= 1"],
    "--memory Momentum(log=1)": ["--memory", "takes no log", "share, masking, clip_norm"],
    "--memory Momenta(1)": ["--memory", "'Momenta(1)'", "Momentum(...) or Residual(...)"],
    "--memory os.remove(1)": ["--memory", "'os.remove(1)'", "Momentum(...)", "or a name"],
    "--memory Residual(dtype=torch.int8)": ["--memory", "torch.int8", "neither a literal"],
    "--exchange ParameterServer(down_cf=0.5)": ["--exchange", "down_cf=0.5", ">= 1"],
    "--exchange ParameterServer(": ["--exchange", "'ParameterServer('", "never closed"],
    "--base Ladder(3)": ["--base", "'Ladder(3)'"],
    "--network slow": ["--network", "'slow'", "100mbit,5ms"],
    "--policy gravac --cf 10": ["--cf", "10", "--policy fixed"],
    "--policy Accordion(gain='raw')": ["--policy", "takes no gain"],
    "--policy Goodput(gain='raw')": ["--policy", "takes no gain"],
    "--policy goodput --base qsgd": ["policy", "'goodput'", "topk", "'qsgd'"],
    "--policy GraVAC(gain='signal')": ["gain='signal'", "'error_fed'"],
    "--policy accordion-paper --granularity bucket": ["--granularity", "'layer'", "'bucket'"],
    "--policy dense --base topk": ["--base topk", "--policy dense sends everything"],
    "--policy off": ["policy must be one of", "dense, ddp", "'off'"],
    "--sync LocalSteps(0)": ["--sync", "steps=0", ">= 2"],
    "--sync LocalSteps('auto') --policy gravac": ["--sync", "'gravac'", "'goodput'", "'auto'"],
    "--sync LocalSteps('auto') --memory residual": ["--memory", "'updates'", "'residual'"],
    "--sync local": ["--sync", "'local'", "LocalSteps(...) or Delayed(...)"],
    "--sync LocalSteps(4,outer_momentum=1)": ["--sync", "outer_momentum=1", "[0, 1)"],
    "--sync LocalSteps(4) --memory Residual(clip_norm=1)": ["--memory", "no clip_norm"],
    "--sync LocalSteps(4) --memory momentum": ["--memory", "'residual'", "'momentum'"],
    "--policy ddp --sync LocalSteps(4)": ["--sync", "--policy ddp"],
    "--sync Delayed(0)": ["--sync", "steps=0", ">= 1"],
    "--sync Gossip('rong')": ["--sync", "topology='rong'", "'ring'"],
    "--sync Gossip() --policy gravac": ["--policy must be 'fixed', 'schedule' or 'warmup'"],
    "--policy expression": ["--policy", "'expression'", "GraVAC(window=20)"],
    "--policy Nope()": [
        "--policy",
        "'Nope()'",
        "Accordion, Accordion.paper, Fixed",
    ],
    "--momentum 1": ["--momentum", "'1'", "[0, 1)"],
    "--lr-drop 0": ["--lr-drop", "'0'", ">= 1"],
    "--optimizer lion": ["--optimizer", "'lion'", "sgd", "adagrad"],
    "--optimizer adamw --momentum 0.5": ["--momentum 0.5", "--optimizer adamw", "sgd"],
    "--optimizer adam --betas 0.9": ["--betas", "Expected 2"],
    "--optimizer adam --betas 0.9 1": ["--betas", "'1'", "[0, 1)"],
    "--betas 0.9 0.99": ["--betas 0.9 0.99", "--optimizer sgd", "adamw, adam"],
    "--weight-decay -1": ["--weight-decay", "'-1'", ">= 0"],
    "--warmup -1": ["--warmup", "'-1'", ">= 0"],
    "--steps 20 --warmup 20": ["--warmup 20", "--steps, 20"],
    "--lr-schedule x": ["--lr-schedule", "'x'", "cosine"],
    "--clip-grad 0": ["--clip-grad", "'0'", "> 0"],
    "--resume /nowhere --clip-grad 1": ["--clip-grad", "1", "--steps"],
    "--policy fixed --cf 0.5": ["cf=0.5", ">= 1"],
    "--policy fixed --cf-range 10 20": ["--cf-range", "10 20", "--cf"],
    "--policy Accordion(eta=0)": ["eta=0", "> 0"],
    "--policy ddp --network 1gbit": ["--network", "1gbit", "--policy ddp"],
    "--base none --policy gravac": ["--base none", "--policy gravac"],
    "--model-mb 170": ["--model-mb 170", "--fixed-clock"],
    "--batch-size 99999999": ["--batch", "99999999", "smaller"],
    "--resume /nowhere": ["--resume", "/nowhere", "--checkpoint-every"],
    "--resume": ["--resume", "logs/", "LOGDIR"],
    "--resume /nowhere --lr 1": ["--lr", "1", "--steps"],
    "--log-dir /dev/null/x": ["--log-dir", "/dev/null", "folder"],
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(
    options: str, text: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runs.launch.launch", lambda *_: pytest.fail("started workers"))
    words = options.split()
    if "--data" not in options and "--resume" not in options:
        words += ["--data", str(text)]
    assert_refused(capfd, "train", *words, parts=BAD[options])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_neither_overwritten_nor_resumed_where_nothing_is_left(
    text: Path, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    (run / "checkpoint" / "step-5").mkdir(parents=True)
    config = {"log_dir": str(run), "data": str(text), "steps": 5}
    (run / "config.json").write_text(json.dumps(config))
    assert main(["train", "--log-dir", str(run)]) == 2
    assert f"--log-dir {run}: holds a run already" in capfd.readouterr().err

    meta = {"step": 5, "world_size": 2, "digests": ["", ""], "config": config}
    (run / "checkpoint" / "meta.json").write_text(json.dumps(meta))
    assert main(["train", "--resume", str(run)]) == 2
    assert "rank0.pt is missing" in capfd.readouterr().err
    for rank in range(2):
        (run / "checkpoint" / "step-5" / f"rank{rank}.pt").touch()
    assert main(["train", "--resume", str(run)]) == 2
    assert "--steps above 5" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        "--network 1gbit,5ms --steps 7 --policy GraVAC(epsilon=0.4) --cf-range 1.5 200 --seed 3",
        "--policy fixed --cf 1 --memory Momentum(masking=False,clip_norm=2.5)",
        "--policy Accordion(eta=0.3,interval=9) --sync LocalSteps(4,overlap=2) --eval-every 4",
        "--policy ddp --task text --model gpt --batch-size 2 --checkpoint-every 5",
        "--optimizer adamw --betas 0.8 0.999 --weight-decay 0 --warmup 9 --lr-schedule cosine",
        "--policy Warmup(steps=3) --warmup 7 --lr-schedule linear --clip-grad 0.5",
        "--model gpt-10m --policy ddp --autocast on",
        "--base none --threads 2",
        "--policy Goodput(margin=0.1) --cf-range 5 50",
        "--policy Schedule({0:1,100:10,300:12.5})",
        "--base dgc+bf16 --policy Warmup(steps=3) --exchange sharded --dense-below 99",
    ],
)
def test_the_command_that_is_saved_makes_the_same_run(options: str) -> None:
    def config(words: list[str]) -> TrainConfig:
        return make_config(read("train", OPTIONS, HELP, [*words, "--log-dir", "logs/x"]))

    made = config(options.split())
    assert config(shlex.split(made.command)[4:]) == made
    assert TrainConfig.from_json(json.loads(json.dumps(made.as_json()))) == made


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ("", "goodput"),
        ("--base qsgd", "gravac"),
        ("--base QSGD(norm='l2')", "gravac"),
        ("--base Ladder({4:'int8'},'topk')", "goodput"),
        ("--base none", "fixed"),
        ("--cf 100", "Fixed(cf=100)"),
        ("--sync Gossip('ring') --cf 20", "Fixed(cf=20)"),
        ("--policy GraVAC.paper(epsilon=0.5)", "GraVAC.paper(epsilon=0.5)"),
    ],
)
def test_settings_choose_their_policy(options: str, policy: str) -> None:
    given = read("train", OPTIONS, HELP, options.split())
    assert make_config(given).policy == policy


@pytest.mark.parametrize(
    ("options", "base", "cf_range"),
    [
        ("--policy gravac-paper", "topk+fp32", None),
        ("--policy gravac-paper --base dgc+fp32", "dgc+fp32", None),
        ("--policy Accordion.paper(4,20)", "topk+fp32", (4, 20)),
        ("--policy gravac", "topk", None),
    ],
)
def test_the_compression_of_a_papers_policy_is_recorded(
    options: str, base: str, cf_range: tuple[float, float] | None
) -> None:
    made = make_config(read("train", OPTIONS, HELP, options.split()))
    assert (made.base, made.cf_range) == (base, cf_range)
    compressor = build_compressor(made)
    assert compressor._settings.base.name == make_base(base, "auto").name


def test_a_compressor_is_written_with_its_settings() -> None:
    for written, settings in {
        "TwoBit(threshold=0.25)": {"threshold": 0.25},
        "QSGD(norm='l2',bucket=None)": {"norm": "l2", "bucket": None},
    }.items():
        made = make_config(read("train", OPTIONS, HELP, ["--cf", "16", "--base", written]))
        base = vars(build_compressor(made)._settings.base)
        assert settings.items() <= base.items()


@pytest.mark.parametrize(
    ("policy", "cf_range"),
    [
        ("Fixed(8)", (10, 1000)),
        ("Fixed(20)", (20, 20)),
        ("Schedule({0:8,5:1,9:40,12:20})", (20, 40)),
        ("Schedule({0:8,5:1})", (10, 1000)),
    ],
)
def test_a_policys_rungs_are_below_the_range(policy: str, cf_range: tuple[float, float]) -> None:
    options = ["--base", "Ladder({8:'int4'},'topk')", "--policy", policy]
    made = make_config(read("train", OPTIONS, HELP, options))
    assert build_compressor(made)._settings.cf_range == cf_range
