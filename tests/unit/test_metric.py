"""What a script of a user's own prints or logs is found by its metric."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import inf, isnan
from pathlib import Path

import pytest

from runs.metric import higher_is_better, parse_metric
from runs.parser import UsageError


def heard(text: str, do: Callable[[], object]) -> list[float]:
    """What is heard of a metric while something is done."""
    found: list[float] = []
    before = sys.stdout, sys.stderr
    try:
        take_in = parse_metric(text).listen(found.append)
        do()
        take_in()
    finally:
        sys.stdout, sys.stderr = before
    return found


@pytest.mark.parametrize(
    ("metric", "line", "values"),
    [
        ("loss {}", "step 3  loss 2.5", [2.5]),
        ("val loss: {} ", "train loss: 3.5 val  loss: -1.25e-3 end", [-1.25e-3]),
        ("val loss{}", "val loss: 2.5", [2.5]),
        ("val loss {}", "val loss=2.5", [2.5]),
        ("acc={}%", "acc=71.25% of 10", [71.25]),
        ("loss {}", "loss inf", [inf]),
        ("loss {}", "loss 1,000.8, acc 3", [1000.8]),
        ("loss {}", "loss -12,345,678", [-12345678]),
        ("loss {}", "loss 1,2000", [1]),  # two numbers
        ("loss {}", "loss 1,200,30", [1]),
        ("loss {}", "loss 0,123", [0]),
        ("val,{}", "val,12,100", [12]),  # columns
        ("{} acc", "1234,567 acc", [567]),
        ("loss {}", "\x1b[1;32mloss:\x1b[0m \x1b[1m2.5\x1b[0m", [2.5]),
        ("loss {}", "a loss of nothing", []),
        ("loss {}", "loss information: 3 files", []),
        ("acc {}", "acc nanoseconds 3", []),
        ("loss {}", "loss inf, acc 3", [inf]),
        ("loss {}", "loss 2.5nats", [2.5]),
        ("{}nats", "infnats", [inf]),
        ("json:loss", 'INFO {"step": 3, "loss": 0.5}', [0.5]),
        ("json:val.loss", '{"val": {"loss": 4}}', [4.0]),
        ("json:val.loss", '{"val.loss": 4}', [4.0]),
        ("json:loss", '{"loss": "high", broken', []),
        ("json:loss", '{"loss": true}', []),
    ],
)
def test_a_printed_metric_is_heard(
    metric: str, line: str, values: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """On stdout and stderr, in lines that end as progress bars' do, and in pieces."""

    def do() -> None:
        print(line)
        print(line, file=sys.stderr, end="\r")
        sys.stdout.writelines([line[:4], line[4:], "\n"])

    assert heard(metric, do) == 3 * values
    assert capsys.readouterr().out == f"{line}\n{line}\n"


def test_a_line_without_an_end_is_heard() -> None:
    """When it is shown, and once; the last one at the latest in the end."""
    found: list[float] = []
    metric, before = parse_metric("loss {}"), sys.stdout
    try:
        take_in = metric.listen(found.append)
        for loss in (3.0, 2.0):
            print(f"\rloss {loss}", end="", flush=True)
            assert found[-1] == loss
        print("\rloss 1.0", end="")
        take_in()
    finally:
        sys.stdout = before
    assert found == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("written", ["nan", "NaN", "NAN"])
def test_nan_is_a_value(written: str) -> None:
    (value,) = heard("loss {}", lambda: print(f"loss {written}"))
    assert isnan(value)


def test_infinity_is_a_value() -> None:
    assert heard("loss {}", lambda: print("loss Infinity\nloss -Inf")) == [inf, -inf]


@pytest.mark.parametrize("anew", [True, False])
def test_lines_of_a_file_count_from_the_start_of_the_run(anew: bool, tmp_path: Path) -> None:
    """What an earlier run has written there does not, whether the script begins the file anew."""
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"loss": 9.0, "more": "x" * 99}) + "\n")
    found: list[float] = []
    take_in = parse_metric(f"{path}:loss").listen(found.append)
    with path.open("w" if anew else "a") as file:
        for loss in (3.0, 2.0):
            line = json.dumps({"loss": loss})
            file.write(line[:5])
            file.flush()
            take_in()  # half of a line is none
            file.write(line[5:] + "\n")
            file.flush()
            take_in()
    take_in()
    assert found == [3.0, 2.0]


def test_scalars_of_tensorboard_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.setattr(
        tensorboard.SummaryWriter, "add_scalar", tensorboard.SummaryWriter.add_scalar
    )

    def do() -> None:
        with tensorboard.SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("val/loss", 0.5, 3)
            writer.add_scalar("train/loss", 7.0, 4)
            writer.add_scalar("val/loss", 0.25, global_step=5)

    assert heard("tensorboard:val/loss", do) == [0.5, 0.25]
    assert list(tmp_path.iterdir())  # and are written


@pytest.mark.parametrize("text", ["loss", "{}", "a {} b {}", "tensorboard:", "json:", "x.txt:a"])
def test_what_is_no_metric_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"accepted: what the script prints"):
        parse_metric(text)


def test_a_metric_has_a_name_and_a_better_side() -> None:
    names = {text: parse_metric(text).name for text in ("val loss: {}", "{} top1-acc", "json:f1")}
    assert list(names.values()) == ["val loss", "top1-acc", "f1"]
    assert [higher_is_better(name) for name in names.values()] == [False, True, True]


@pytest.mark.parametrize(
    ("higher", "names"),
    [
        (True, ("acc", "val_acc", "valacc", "top1-acc", "Acc@5", "accTop1", "test/accuracy")),
        (True, ("AUC", "roc_auc", "auroc", "bleu", "sacreBLEU4", "PSNR", "precision", "rewards")),
        (True, ("f1", "F1Score", "f1_macro", "valF1", "macroF1", "mIoU", "meanIoU", "val iou")),
        (True, ("recall@10", "rouge1", "rougeL", "rougeLsum", "mean_reward", "bf16 accuracy")),
        (False, ("loss", "perplexity", "previous loss", "bf16 loss", "diff1", "conf1", "accum")),
        (False, ("accumulated error", "vaccine", "sauce", "various", "mixed precision loss")),
        (False, ("iou_loss", "rewardLoss", "acceptance", "f16", "")),
    ],
)
def test_the_better_side_is_told_by_words_not_by_letters_inside_them(
    higher: bool, names: tuple[str, ...]
) -> None:
    assert {name: higher_is_better(name) for name in names} == dict.fromkeys(names, higher)
