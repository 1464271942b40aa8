"""Low-rank adapters, and runs that start with the weights of another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runs.build import build_task, check, initial_model, make_optimizer
from runs.checkpoint import save_checkpoint
from runs.config import TrainConfig
from runs.models import MODELS, make_model
from runs.models.gpt import ByteGPT
from runs.options import make_config
from runs.papers.lora import SCALE, LowRankLinear, add_adapters
from runs.parser import UsageError
from runs.simulate.ranks import run_ranks

SMALL = {"vocab": 256, "context": 16, "width": 20, "layers": 2}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text; the models `gpt` are small for as long as the test lasts."""
    monkeypatch.setitem(MODELS, "gpt", partial(ByteGPT, width=20, layers=1))
    path = tmp_path / "text.txt"
    path.write_text("All of this text is one and the same sentence. " * 400)
    return path


def _config(text: Path, **options: Any) -> TrainConfig:
    given = {"log_dir": str(text.parent / "run"), "data": str(text), "model": "gpt"}
    return make_config({**given, "batch_size": 2, **options})


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if n.endswith((".a", ".b"))}


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# -- the adapters --------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(rank=st.integers(1, 20), seed=st.integers(0, 2**40))
def test_a_model_starts_as_it_was_and_its_adapters_are_drawn_from_the_seed(
    rank: int, seed: int
) -> None:
    model, symbols = ByteGPT(**SMALL), torch.randint(256, (2, 16))
    before = model(symbols)
    random = torch.random.get_rng_state()
    add_adapters(model, rank, seed)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.equal(model(symbols), before)
    assert sum(isinstance(module, LowRankLinear) for module in model.modules()) == 2 * 4
    # In each block qkv, out, up and down: of 20, 20, 20, 80 inputs and 60, 20, 80, 20 outputs.
    assert sum(p.numel() for p in _adapters(model).values()) == 2 * rank * (80 + 40 + 100 + 100)
    other = ByteGPT(**SMALL)
    add_adapters(other, rank, seed)
    for name, parameter in _adapters(other).items():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_an_adapter_adds_a_product_of_rank_r_to_the_weights() -> None:
    linear = nn.Linear(7, 5)
    adapted = LowRankLinear(linear, 3, torch.Generator())
    nn.init.normal_(adapted.b)
    inputs = torch.randn(2, 4, 7)
    merged = linear.weight + SCALE * adapted.b @ adapted.a
    expected = nn.functional.linear(inputs, merged, linear.bias)
    torch.testing.assert_close(adapted(inputs), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_only_adapters_have_gradients_and_nothing_else_changes(optimizer: str, small: Path) -> None:
    config = _config(small, lora=4, optimizer=optimizer, weight_decay=0.5)
    task = build_task(config)
    model = initial_model(config, task)
    before, made = _copied(model), make_optimizer(config, task, model)
    adapters = _adapters(model)
    for step in range(3):
        task.loss(model, task.batch(step, 0, 1)).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == set(adapters)
        made.step()
        made.zero_grad()
    after = _copied(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(adapters)
    held = [p for group in made.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in adapters.values()}


@pytest.mark.parametrize("rank", [0, -1, 21])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    model = ByteGPT(**SMALL)
    with pytest.raises(ValueError, match="from 1 to 20, the smallest dimension"):
        add_adapters(model, rank, seed=0)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["lstm", "resnet8"])
def test_models_without_such_layers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="needs a model that has blocks"):
        add_adapters(make_model(name), 4, seed=0)


# -- the weights of another run --------------------------------------------------------------------


def _saved(text: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """The folder of a run whose checkpoint holds what its model starts with, and that state."""
    config = _config(text, log_dir=str(text.parent / "base"), seed=7, workers=1, **options)
    model = initial_model(config, build_task(config)).state_dict()
    state = {"step": 1, "model": model, "optimizer": {}, "compressor": None, "rng": None}
    assert run_ranks(1, lambda rank, group: save_checkpoint(config, 1, state)) == [""]
    return config.log_dir, model


@pytest.mark.parametrize("lora", [None, 2])
def test_a_run_starts_with_the_weights_of_another(small: Path, lora: int | None) -> None:
    folder, saved = _saved(small)
    config = _config(small, init=folder, lora=lora)
    check(config)
    task = build_task(config)
    model = initial_model(config, task)
    base = task.build_model()
    symbols, _ = task.batch(0, 0, 1)
    assert not torch.equal(base(symbols), model(symbols))
    base.load_state_dict(saved)
    assert torch.equal(base(symbols), model(symbols))


def test_a_run_that_goes_on_does_not_need_them(small: Path) -> None:
    config = _config(small, init="/gone", lora=2)
    check(config, resumed=True)
    with pytest.raises(UsageError, match="--init /gone: there is no checkpoint"):
        check(config)


def test_weights_that_do_not_fit_are_refused(small: Path) -> None:
    folder, _ = _saved(small)
    for options, said in (
        ({"model": "lstm"}, "is a run of --task text --model gpt; accepted: .* --model lstm"),
        ({"init": str(small.parent)}, "there is no checkpoint, .*; accepted: the folder of a run"),
    ):
        init = options.get("init", folder)
        with pytest.raises(UsageError, match=f"--init {init}: {said}"):
            check(_config(small, **{"init": folder, **options}))
    [file] = Path(folder).glob("checkpoint/step-1/rank0.pt")
    file.write_bytes(b"")
    with pytest.raises(UsageError, match=f"--init {folder}: .*rank0.pt is missing or damaged"):
        check(_config(small, init=folder))


def test_weights_of_another_shape_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = _saved(small)
    monkeypatch.setitem(MODELS, "gpt", partial(ByteGPT, width=40))
    with pytest.raises(UsageError, match=f"--init {folder}: its weights do not fit the model"):
        check(_config(small, init=folder))


def test_adapters_are_no_weights_to_start_with(small: Path) -> None:
    folder, _ = _saved(small, lora=2)
    with pytest.raises(UsageError, match="a run with --lora 2, whose weights are not merged"):
        check(_config(small, init=folder))


def test_a_rank_that_cannot_be_is_refused_before_training(small: Path) -> None:
    for options, said in (
        ({"lora": 21}, "--lora 21: must be from 1 to 20, .*; got --model gpt"),
        ({"lora": 2, "model": None}, "--lora 2: needs a model that has blocks.*--model lstm"),
    ):
        with pytest.raises(UsageError, match=said):
            check(_config(small, **options))
    with pytest.raises(ValueError, match="lora must be greater than or equal to 1, got 0"):
        TrainConfig.from_json({"log_dir": "x", "lora": 0})
