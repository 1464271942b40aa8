"""The optimizers of `python -m runs`, and their learning rates step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runs.build import OPTIMIZERS, build_task, check, learning_rate, lr_factor, make_optimizers
from runs.config import TrainConfig
from runs.options import make_config
from runs.parser import UsageError
from runs.tasks import Task
from runs.tune.tuning import make_tuning, space_text


def _config(**options: Any) -> TrainConfig:
    return make_config({"log_dir": "logs/x", **options})


def _factors(**options: Any) -> list[float]:
    config = _config(**options)
    return [lr_factor(config, step) for step in range(config.steps)]


# -- the learning rate ---------------------------------------------------------------------------


def test_the_learning_rate_is_constant_unless_a_schedule_is_asked_for() -> None:
    assert _factors(steps=4) == [1.0] * 4
    assert _factors(steps=4, lr_drop=2) == [1.0, 1.0, 0.1, 0.1]
    assert _factors(steps=4, lr_drop=(1, 3)) == [1.0, 0.1, 0.1, pytest.approx(0.01)]


def test_it_rises_from_almost_nothing_and_reaches_its_value_with_the_last_step_of_warm_up() -> None:
    assert _factors(steps=6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_it_falls_to_nothing_at_the_last_step() -> None:
    assert _factors(steps=4, lr_schedule="linear") == [0.75, 0.5, 0.25, 0.0]
    assert _factors(steps=6, warmup=2, lr_schedule="linear") == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = [0.5, 1.0, 0.75, 0.25, 0.0]
    assert _factors(steps=5, warmup=2, lr_schedule="cosine") == pytest.approx(cosine)
    assert _factors(steps=5, warmup=2, lr_schedule="cosine")[-1] == 0.0


def test_a_drop_comes_on_top_of_warm_up_and_schedule() -> None:
    dropped = _factors(steps=4, warmup=2, lr_schedule="linear", lr_drop=1)
    assert dropped == pytest.approx([0.5, 0.1, 0.05, 0.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"lr": 0.3}, 0.3),
        ({"optimizer": "adagrad"}, 0.01),
        ({"optimizer": "radam"}, 0.001),
        ({"optimizer": "adamw", "lr": 0.3}, 0.3),
    ],
)
def test_the_task_has_a_learning_rate_for_sgd_alone(
    options: dict[str, Any], expected: float | None, task: Task
) -> None:
    config = _config(data=str(task.data), **options)
    assert learning_rate(config) == expected
    assert build_task(config).lr == (1.0 if expected is None else expected)


# -- the optimizer -------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "text.txt"
    path.write_text("All of this text is one and the same sentence. " * 400)
    return build_task(TrainConfig(log_dir="x", data=str(path)))


def _groups(task: Task, **options: Any) -> list[dict[str, Any]]:
    """The parameter groups, with a count of parameters in place of them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    (optimizer,) = make_optimizers(_config(**options), task, model)
    assert type(optimizer) is OPTIMIZERS[options.get("optimizer", "sgd")]
    return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def test_sgd_is_the_tasks_own_unless_it_is_told_otherwise(task: Task) -> None:
    task.weight_decay = 0.25  # type: ignore[misc]
    (usual,) = _groups(task)
    assert (usual["lr"], usual["momentum"], usual["weight_decay"]) == (task.lr, 0.9, 0.25)
    (told,) = _groups(task, momentum=0.5, weight_decay=0.0)
    assert (told["momentum"], told["weight_decay"]) == (0.5, 0.0)


def test_adamw_decays_no_biases_and_no_scales_of_norms(task: Task) -> None:
    weights, others = _groups(task, optimizer="adamw")
    assert (weights["params"], weights["weight_decay"]) == (1, 0.1)
    assert (others["params"], others["weight_decay"]) == (3, 0.0)
    assert weights["betas"] == others["betas"] == (0.9, 0.95)
    weights, others = _groups(task, optimizer="adamw", weight_decay=0.3, betas=[0.8, 0.999])
    assert (weights["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert weights["betas"] == (0.8, 0.999)


@pytest.mark.parametrize("name", ["adam", "nadam", "radam", "rmsprop", "adagrad"])
def test_the_others_decay_nothing_unless_they_are_told_to(name: str, task: Task) -> None:
    (usual,) = _groups(task, optimizer=name)
    assert (usual["lr"], usual["weight_decay"]) == (task.lr, 0.0)
    assert usual.get("betas", (0.9, 0.95)) == (0.9, 0.95)
    assert _groups(task, optimizer=name, weight_decay=0.2)[0]["weight_decay"] == 0.2


def _with_muon(task: Task, model: torch.nn.Module, **options: Any) -> list[dict[str, Any]]:
    """The groups of Muon and of the AdamW beside it, with the shapes of their parameters."""
    muon, adamw = make_optimizers(_config(optimizer="muon", **options), task, model)
    assert (type(muon).__name__, type(adamw).__name__) == ("Muon", "AdamW")
    groups = [*muon.param_groups, *adamw.param_groups]
    return [{**group, "params": [tuple(p.shape) for p in group["params"]]} for group in groups]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_muon_has_the_matrices_of_layers_and_adamw_all_the_others(task: Task) -> None:
    layers = (torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 6))
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), *layers)
    muon, weights, others = _with_muon(task, model)
    assert muon["params"] == [(5, 4)]
    assert weights["params"] == [(3, 4), (6, 5)]
    assert others["params"] == [(5,), (5,), (5,), (6,)]
    assert [group["lr"] for group in (muon, weights, others)] == [task.lr] * 3
    assert [group["weight_decay"] for group in (muon, weights, others)] == [0.1, 0.1, 0.0]
    assert (muon["momentum"], muon["adjust_lr_fn"]) == (0.95, "match_rms_adamw")
    muon, weights, _ = _with_muon(task, model, momentum=0.5, betas=[0.8, 0.999], weight_decay=0.0)
    assert (muon["momentum"], muon["weight_decay"], weights["betas"]) == (0.5, 0.0, (0.8, 0.999))
    with pytest.raises(UsageError, match="--optimizer muon: needs a matrix that is neither"):
        _with_muon(task, torch.nn.Linear(3, 4))


# -- what does not go together -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"momentum": 0.5, "optimizer": "adamw"},
            "--momentum 0.5 is for --optimizer sgd, muon; got .*w",
        ),
        (
            {"memory": "Momentum(share=1)", "optimizer": "adam"},
            r"Momentum\(share=1\) is for --optimi",
        ),
        ({"memory": "momentum", "optimizer": "radam"}, "--memory momentum is for --optimizer sgd"),
        ({"betas": (0.9, 0.99)}, "--betas 0.9 0.99 is for .*adamw, adam, .*; got --optimizer sgd"),
        ({"betas": (0.9, 1.0), "optimizer": "adam"}, r"--betas 0.9 1: must be .* in \[0, 1\)"),
        ({"warmup": 20, "steps": 20}, "--warmup 20: must be less than --steps, 20"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _config(**options)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": "lion"}, "optimizer must be 'sgd', 'adamw', .*, got 'lion'"),
        ({"lr_schedule": "zigzag"}, "lr_schedule must be 'constant', 'cosine' or 'linear', got"),
        ({"clip_grad": 0}, "--clip-grad 0: must be > 0"),
    ],
)
def test_a_configuration_from_a_file_is_held_to_the_same(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((UsageError, ValueError), match=said):
        check(TrainConfig.from_json({"log_dir": "x", **wrong}))


def test_tune_searches_around_the_learning_rate_of_the_optimizer(tmp_path: Path) -> None:
    tuning = make_tuning({"log_dir": str(tmp_path), "search": ["lr"], "optimizer": "adamw"})
    assert space_text(tuning.space) == "lr=5e-05..0.002"
