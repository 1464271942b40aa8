"""The code of docs/recipes.md, as it stands there: under compression it does what it does under
DDP."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import adaptive
from adaptive import AdaptiveCompressor
from tests.distributed.own_optimizers import LAMB, LARS
from tests.distributed.processes import run_ranks
from tests.distributed.setting import Scripted, batch, flat_parameters, listen

STEPS = 6
SINGLE = torch.float32
PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = {
    part.partition("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.S)
    for part in PAGE.split("\n## ")[1:]
}


def recipe(heading: str, names: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """Run the code of a recipe, with these names. Returns all names."""
    whole = {"torch": torch, "dist": dist, "math": math, **vars(adaptive), **names}
    exec(compile(SECTIONS[heading][number], f"docs/recipes.md: {heading}", "exec"), whole)
    return whole


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 3))


def _batches(rank: int, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    return (batch(step, rank, SINGLE) for step in range(count))


def _square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _compressor(cf: float, **options: Any) -> AdaptiveCompressor:
    return AdaptiveCompressor(cf_range=(1, 100), policy=Scripted([cf]), **options)


class Ended:
    """How a run of a recipe has ended. told: what was warned of. exchanges: steps that the
    compressor has counted."""

    def __init__(self, model: nn.Module, told: list[str], exchanges: int) -> None:
        self.flat, self.told, self.exchanges = flat_parameters(model), list(told), exchanges
        x, y = batch(100, 0, SINGLE)
        with torch.no_grad():
            self.loss = float(_square(model(x), y))


def _trained(
    rank: int, heading: str, number: int, make: Callable[[Any], Any], cf: float | None
) -> Ended:
    """A recipe that trains `model` on `loader`. cf: None for DDP without a compressor."""
    model, told = DDP(_net()), listen()
    names = {"model": model, "optimizer": make(model.parameters()), "loader": _batches(rank, 40)}
    names |= {"loss_of": _square, "rho": 0.05, "weight": 0.01}
    if cf is not None:
        compressor = _compressor(cf).attach(model, optimizer=names["optimizer"])
    recipe(heading, names, number)
    return Ended(model, told, 0 if cf is None else compressor.summary().steps)


TRAINS = [
    ("Sharpness-aware minimisation (SAM)", 0),
    ("Gradient penalties, double backward", 0),
    ("Gradient penalties, double backward", 1),
]
MAKE: list[Callable[[Any], Any]] = [
    lambda of: SGD(of, lr=0.05, momentum=0.9),
    lambda of: AdamW(of, lr=0.01),
]


def _trained_each_way(rank: int) -> list[list[Ended]]:
    ways = [(*which, make) for which in TRAINS for make in MAKE]
    return [[_trained(rank, *way, cf) for cf in (None, 1.0, 10.0)] for way in ways]


def test_sam_and_gradient_penalties_train_as_under_ddp_and_exchange_once_a_step() -> None:
    at_first = Ended(_net(), [], 0).loss
    first, second = run_ranks(2, _trained_each_way)
    for (plain, at_1, at_10), others in zip(first, second, strict=True):
        torch.testing.assert_close(at_1.flat, plain.flat)
        assert at_1.told == at_10.told == []
        assert at_1.exchanges == at_10.exchanges == 40
        assert torch.equal(at_10.flat, others[2].flat)
        assert plain.loss < 0.8 * at_first
        assert at_10.loss < 0.9 * at_first


def _layerwise(rank: int, kind: Any, cf: float | None) -> Ended:
    """LARS and LAMB, whose recipe attaches its compressor itself; without one an optimizer in its
    place does nothing."""

    class AtCF(AdaptiveCompressor):
        def __init__(self, **options: Any) -> None:
            super().__init__(cf_range=(1, 100), policy=Scripted([cf or 1.0]), **options)

        def attach(self, model: Any, **options: Any) -> Any:
            return self if cf is None else super().attach(model, **options)

    model, told = DDP(_net()), listen()
    names = {"model": model, "LAMB": lambda of, lr: kind(of), "loss_of": _square}
    names |= {"loader": _batches(rank, 40), "AdaptiveCompressor": AtCF}
    compressor = recipe("LARS and LAMB", names)["compressor"]
    return Ended(model, told, 0 if cf is None else compressor.summary().steps)


def _layerwise_each_way(rank: int) -> list[list[Ended]]:
    return [[_layerwise(rank, kind, cf) for cf in (None, 1.0, 10.0)] for kind in (LARS, LAMB)]


def test_lars_and_lamb_step_by_themselves() -> None:
    at_first = Ended(_net(), [], 0).loss
    first, second = run_ranks(2, _layerwise_each_way)
    for (plain, at_1, at_10), others in zip(first, second, strict=True):
        assert torch.equal(at_1.flat, plain.flat)
        assert at_10.exchanges == 40
        assert torch.equal(at_10.flat, others[2].flat)
        assert plain.loss < 0.8 * at_first
        assert at_10.loss < 0.9 * at_first
        assert len(at_10.told) == 1
        assert "was measured for torch's SGD, Muon" in at_10.told[0]


def _spiked(rank: int, spikes: bool) -> Tensor:
    """Parameters of a run in which one backward was thrown away, or was not there."""
    model = DDP(_net())
    optimizer = SGD(model.parameters(), lr=0.02)
    compressor = _compressor(10.0).attach(model, optimizer=optimizer)
    _square(model(batch(0, rank, SINGLE)[0]), batch(0, rank, SINGLE)[1]).backward()
    compressor.discard()  # DDP's first buckets are others
    optimizer.zero_grad()
    for step in range(STEPS):
        for spike in (True, False) if spikes and step == 0 else (False,):
            x, y = batch(step, rank, SINGLE)
            names = {"optimizer": optimizer, "compressor": compressor, "loss_spiked": spike}
            loss = _square(model(x), y) * (1e6 if spike else 1.0)
            recipe("A backward whose gradients are thrown away", {**names, "loss": loss})
    return flat_parameters(model)


def _spiked_and_not(rank: int) -> list[Tensor]:
    return [_spiked(rank, spikes) for spikes in (False, True)]


def test_a_backward_that_is_thrown_away_leaves_no_trace() -> None:
    for without, with_one in run_ranks(2, _spiked_and_not):
        assert torch.equal(without, with_one)


def _gan(rank: int, cf: float | None, kind: Any) -> tuple[Tensor, list[str]]:
    """Parameters of both models, and what was warned of. cf: None without compressors."""
    torch.manual_seed(0)
    g = DDP(nn.Sequential(nn.Linear(12, 60), nn.Tanh(), nn.Linear(60, 3)))
    d = DDP(nn.Sequential(nn.Linear(3, 80), nn.Tanh(), nn.Linear(80, 1)))
    batches, told = [batch(step, rank, SINGLE) for step in range(STEPS)], listen()
    noises = iter([noise for noise, _ in batches])

    class AtCF(AdaptiveCompressor):
        def __init__(self) -> None:
            super().__init__(cf_range=(1, 100), policy=Scripted([cf or 1.0]))

        def attach(self, model: Any, **options: Any) -> Any:
            return self if cf is None else super().attach(model, **options)

    names = {"G": g, "D": d, "loader": [real for _, real in batches], "AdaptiveCompressor": AtCF}
    names |= {f"optimizer_{'gd'[i]}": kind(m.parameters(), 0.02) for i, m in enumerate((g, d))}
    names |= {
        "noise": lambda: next(noises),
        "loss_of_scores": lambda scores: softplus(-scores[:8]).mean() + softplus(scores[8:]).mean(),
        "loss_of_fakes": lambda scores: softplus(-scores).mean(),
    }
    recipe("GANs: gradients that are meant for another model", names)
    return torch.cat([flat_parameters(g), flat_parameters(d)]), list(told)


def _gans(rank: int, kind: Any) -> dict[str, tuple[Tensor, list[str]]]:
    return {
        "plain": _gan(rank, None, kind),
        "at CF 1": _gan(rank, 1.0, kind),
        "at CF 10": _gan(rank, 10.0, kind),
    }


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_gan_leaves_nothing_of_the_generators_loss_in_the_discriminator(kind: Any) -> None:
    for result in run_ranks(2, _gans, kind):
        torch.testing.assert_close(result["at CF 1"][0], result["plain"][0])
        assert not torch.equal(result["at CF 10"][0], result["plain"][0])
        for which in ("at CF 1", "at CF 10"):
            assert result[which][1] == []


def _accumulated(rank: int, compressed: bool) -> Tensor:
    model = DDP(_net())
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9)
    if compressed:
        compressor = _compressor(1.0).attach(model, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(10 * step + part, rank, SINGLE) for part in range(3)]
        targets = iter([y for _, y in parts])
        names = {"model": model, "optimizer": optimizer, "micro_batches": [x for x, _ in parts]}
        names["loss"] = lambda output, targets=targets: _square(output, next(targets))
        recipe("Several backward passes for one step", names)
    if compressed:
        assert compressor.summary().steps == STEPS
    return flat_parameters(model)


def _accumulated_both(rank: int) -> list[Tensor]:
    return [_accumulated(rank, compressed) for compressed in (False, True)]


def test_gradients_are_accumulated_under_no_sync() -> None:
    for plain, ours in run_ranks(2, _accumulated_both):
        torch.testing.assert_close(ours, plain)


class _PrunesSecond(optuna.pruners.BasePruner):
    """Ends the second trial at its second report."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 1 and len(trial.intermediate_values) > 1


def _tuned(rank: int) -> tuple[int, list[tuple[str, float | None, dict[str, float]]]]:
    """How many models were trained; and on rank 0 of each trial its state, value and parameters."""
    made: list[Any] = []

    def model_and_optimizer() -> tuple[Any, Any]:
        made.append(DDP(_net()))
        return made[-1], AdamW(made[-1].parameters(), lr=0.01)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruners = SimpleNamespace(MedianPruner=_PrunesSecond)
    names: dict[str, Any] = {"model_and_optimizer": model_and_optimizer, "loss_of": _square}
    names |= {"loader": lambda: _batches(rank), "every": 2, "trials": 3}
    names["validate"] = lambda model: Ended(model, [], 0).loss
    in_memory = {"create_study": lambda storage, pruner: optuna.create_study(pruner=pruner)}
    names["optuna"] = SimpleNamespace(**{**vars(optuna), **in_memory, "pruners": pruners})
    study = recipe("Settings by Optuna, in your own script", names).get("study")
    trials = [] if study is None else study.trials
    return len(made), [(each.state.name, each.value, each.params) for each in trials]


def test_optuna_finds_settings_in_ones_own_script() -> None:
    """All ranks train each trial, and end it together where it is pruned."""
    (many, trials), (others, none) = run_ranks(2, _tuned)
    assert many == others == 3
    assert none == []
    states, values, parameters = zip(*trials, strict=True)
    assert states == ("COMPLETE", "PRUNED", "COMPLETE")
    assert all(isfinite(value) for value in values if value is not None)
    assert len({tuple(each.items()) for each in parameters}) == 3


class _Sizes:
    """In the place of Accordion and of its compressor: the numbers of micro-batches are given."""

    def __init__(self, sizes: list[int]) -> None:
        self._left = iter(sizes)

    @property
    def critical(self) -> bool:
        return next(self._left) == 1

    def paper(self, **_: Any) -> _Sizes:
        return self

    def __call__(self, **_: Any) -> _Sizes:
        return self

    def attach(self, *_: Any, **__: Any) -> None:
        return


def _batches_by_regime(rank: int, sizes: list[int]) -> tuple[list[int], Tensor]:
    """How many micro-batches each step has taken, and the parameters. sizes: without compressor."""
    model = DDP(_net())
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    taken: list[int] = []
    targets: list[Tensor] = []

    def batches() -> Iterator[Tensor]:
        while True:
            x, y = batch(len(taken) + len(targets), rank, SINGLE)
            targets.append(y)
            yield x

    def stepped(*_: Any) -> None:
        taken.append(len(targets))
        targets.clear()
        if len(taken) == 14:
            for group in optimizer.param_groups:
                group["lr"] /= 10  # critical again

    optimizer.register_step_post_hook(stepped)
    names = {"model": model, "optimizer": optimizer, "batches": batches(), "steps": 20}
    names |= {"interval": 6, "loss": lambda output: _square(output, targets[-1])}
    if sizes:
        names |= dict.fromkeys(("Accordion", "AdaptiveCompressor"), _Sizes(sizes))
    recipe("Larger batches outside critical regimes", names)
    return taken, flat_parameters(model)


def test_batches_grow_outside_critical_regimes() -> None:
    first, second = run_ranks(2, _batches_by_regime, [])
    assert first[0] == second[0]
    assert first[0][:8] == [1] * 8
    assert 8 in first[0][8:14]
    assert 1 in first[0][14:]
    plain = run_ranks(2, _batches_by_regime, first[0])
    torch.testing.assert_close(first[1], plain[0][1])
    assert torch.equal(first[1], second[1])


def _dgc(rank: int) -> tuple[list[float], Tensor]:
    """Each step's root of the mean over ranks of ||g||^2, over the limit, and the parameters."""
    model, norms = DDP(_net()), list[float]()

    class Recorded(AdaptiveCompressor):
        def __init__(self, **options: Any) -> None:
            super().__init__(
                timeline=lambda numbers, step: norms.append(numbers.get("gradient/norm", 0.0)),
                **options,
            )

    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = {"model": model, "sgd_with_momentum": optimizer, "loader": _batches(rank, 12)}
    names |= {"steps_per_epoch": 2, "clip_norm": 0.3, "loss_of": _square}
    whole = recipe("Deep Gradient Compression whole", {**names, "AdaptiveCompressor": Recorded})
    compressor, limit = whole["compressor"], whole["limit"]
    assert compressor.memory == "momentum"
    assert compressor.cf == 1000
    compressor.close()
    return [norm / limit for norm in norms], flat_parameters(model)


def test_deep_gradient_compression_clips_by_the_norm_of_the_whole_local_gradient() -> None:
    (norms, parameters), (_, others) = run_ranks(2, _dgc)
    assert max(norms) == pytest.approx(1.0, rel=1e-4)
    assert torch.equal(parameters, others)


def test_every_recipe_is_run_by_a_test() -> None:
    """By its heading, and the number of the block where there are several."""
    text = Path(__file__).read_text(encoding="utf-8")
    for heading, blocks in SECTIONS.items():
        assert blocks, heading
        assert f'"{heading}"' in text
        for number in range(1, len(blocks)):
            assert f'("{heading}", {number})' in text
