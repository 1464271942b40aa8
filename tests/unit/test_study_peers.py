"""Other people's rules: what each does to replicas, what it sends, and the script around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from docs.studies import peers
from docs.studies.messages import (
    Residual,
    dct,
    from_chunks,
    idct,
    largest_of_chunks,
    mean_of_sent,
    one_bit,
    to_chunks,
    two_bits,
)
from docs.studies.rules import PEERS, DeMo, OneBitAdam, Replica, Rule, SparseLoCo
from runs.__main__ import main
from runs.config import TrainConfig
from tests.unit.ranks import simulates

STEPS = 6
NUMEL = 70 * 80 + 80 + 80 * 2
TENSORS = 3


def _make(name: str, ranks: int = 2, clip: float | None = None, **keys: Any) -> Rule:
    """A rule with replicas of a small model of three tensors."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 2, bias=False))
    replicas = []
    for _ in range(ranks):
        model = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 2, bias=False))
        model.load_state_dict(first.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        replicas.append(Replica(model, optimizer))
    config = TrainConfig(log_dir="", steps=STEPS, clip_grad=clip)
    return PEERS[name](config, replicas, **keys)


def _go(rule: Rule, first: int, last: int) -> None:
    """Steps from `first` to before `last`, with gradients that differ from rank to rank."""
    for step in range(first, last):
        for rank, replica in enumerate(rule.replicas):
            generator = torch.Generator().manual_seed(100 * step + rank)
            for p in replica.parameters:
                p.grad = torch.randn(p.shape, generator=generator)
        rule.step(step)


def _parameters(rule: Rule, rank: int = 0) -> Tensor:
    return torch.cat([p.detach().flatten() for p in rule.replicas[rank].parameters])


@pytest.mark.parametrize("name", PEERS)
def test_replicas_are_alike_after_each_exchange(name: str) -> None:
    keys = {"steps": 2} if "steps" in PEERS[name].settings() else {}
    rule = _make(name, ranks=3, clip=1.0, **keys)
    before = _parameters(rule)
    for step in range(STEPS):
        _go(rule, step, step + 1)
        apart = not torch.equal(_parameters(rule, 0), _parameters(rule, 2))
        assert apart == (bool(keys) and step % 2 == 0)
    assert torch.isfinite(_parameters(rule)).all()
    assert not torch.equal(_parameters(rule), before)


def test_onebit_adam_is_dense_until_it_compresses() -> None:
    dense, rule = _make("dense", clip=1.0), _make("onebit-adam", clip=1.0, warmup=0.5)
    _go(dense, 0, 3)
    _go(rule, 0, 3)
    assert torch.equal(_parameters(dense), _parameters(rule))
    assert dense.bits == rule.bits == 3 * 32 * NUMEL
    _go(dense, 3, 4)
    _go(rule, 3, 4)
    assert not torch.equal(_parameters(dense), _parameters(rule))
    assert rule.bits == 3 * 32 * NUMEL + NUMEL + 32 * TENSORS


def test_onebit_adam_loses_no_momentum() -> None:
    """What has arrived and what waits, at the ranks and on the way back, is all that there was."""
    rule = _make("onebit-adam", warmup=0.1)
    assert isinstance(rule, OneBitAdam)
    _go(rule, 0, 1)
    beta1, whole, arrived = 0.9, [torch.zeros_like(p) for p in rule.momentum], rule.momentum
    rule._freeze()
    momentum = rule.momentum
    for step in range(1, STEPS):
        _go(rule, step, step + 1)
        gradients = [replica.gradients for replica in rule.replicas]
        for i, same in enumerate(zip(*gradients, strict=True)):
            whole[i] = whole[i] + beta1 * momentum[i] + (1 - beta1) * torch.stack(same).mean(0)
        momentum = rule.momentum
        arrived = [a + m for a, m in zip(arrived, momentum, strict=True)]
    for i in range(TENSORS):
        waits = torch.stack([residual.tensors[i] for residual in rule.residuals]).mean(0)
        expected = arrived[i] + rule.back.tensors[i] + waits
        torch.testing.assert_close(whole[i], expected, rtol=1e-4, atol=1e-5)


def test_bf16_is_near_dense_with_half_of_the_bits() -> None:
    dense, rule = _make("dense"), _make("bf16")
    for one in (dense, rule):
        _go(one, 0, 1)
    gradients = [p.grad for p in dense.replicas[0].parameters]
    for exact, rounded in zip(gradients, rule.replicas[0].parameters, strict=True):
        torch.testing.assert_close(rounded.grad, exact, rtol=0.01, atol=0.01)
        assert rounded.grad is not None
        assert torch.equal(rounded.grad, rounded.grad.bfloat16().float())
    assert 2 * rule.bits == dense.bits == 32 * NUMEL


def test_diloco_with_a_plain_outer_step_takes_the_mean_of_the_parameters() -> None:
    rule = _make("diloco", steps=4, outer_lr=1.0, outer_momentum=0.0)
    _go(rule, 0, 3)
    assert rule.bits == 0
    apart = _make("diloco", steps=100)
    _go(apart, 0, 4)
    mean = (_parameters(apart, 0) + _parameters(apart, 1)) / 2
    _go(rule, 3, 4)
    torch.testing.assert_close(_parameters(rule), mean)
    _go(rule, 4, STEPS)  # there is an exchange after the last step
    assert torch.equal(_parameters(rule, 0), _parameters(rule, 1))
    assert rule.bits == 2 * 32 * NUMEL


def test_sparseloco_that_sends_everything_is_diloco_with_a_plain_outer_step() -> None:
    sparse = _make("sparseloco", steps=2, k=4096, value_bits=32)
    dense = _make("diloco", steps=2, outer_lr=1.0, outer_momentum=0.0)
    for rule in (sparse, dense):
        _go(rule, 0, STEPS)
    assert torch.equal(_parameters(sparse), _parameters(dense))
    assert sparse.bits == 3 * NUMEL * (12 + 32)


def test_sparseloco_counts_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = _make("sparseloco", ranks=1, steps=1, k=50)
    assert isinstance(rule, SparseLoCo)
    sent: list[Tensor] = []
    compress = rule._compress
    monkeypatch.setattr(rule, "_compress", lambda values: sent.extend(compress(values)) or sent)
    _go(rule, 0, 1)
    counts = [int(x.count_nonzero()) for x in sent]
    assert counts == [100, 50, 50]  # 5600 elements are two chunks
    assert rule.bits == sum(counts) * (12 + 2) + TENSORS * 2 * 32


def test_demo_counts_what_it_takes_out_of_the_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = _make("demo", ranks=1, k=10)
    assert isinstance(rule, DeMo)
    taken: list[Tensor] = []
    take = rule.take
    monkeypatch.setattr(rule, "take", lambda m: taken.append(take(m)) or taken[-1])
    _go(rule, 0, 1)
    assert rule.bits == sum(int(x.count_nonzero()) for x in taken) * 48
    gradients = rule.replicas[0].gradients
    for left, out, gradient in zip(rule.momenta[0], taken, gradients, strict=True):
        whole = left + from_chunks(idct(out), left.shape)
        torch.testing.assert_close(whole, 0.01 * gradient, rtol=1e-4, atol=1e-6)


def test_a_coefficient_counts_where_it_was_sent() -> None:
    ranks = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3.0, 4.0, 0.0])]
    assert mean_of_sent(ranks).tolist() == [2, 4, 0]


def test_demo_moves_by_the_learning_rate_and_decays_the_weights() -> None:
    rule = _make("demo")
    before = _parameters(rule)
    _go(rule, 0, 1)
    moved = _parameters(rule) - before * (1 - 0.01 * 0.1)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01), rtol=1e-3, atol=1e-6)


SHAPES = st.one_of(
    st.tuples(st.integers(1, 150)),
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.tuples(st.integers(1, 20), st.integers(1, 8), st.just(3), st.just(3)),
)


@settings(deadline=None, max_examples=25)
@given(shape=SHAPES)
def test_the_transform_is_orthonormal_and_all_of_it_leaves_no_momentum(shape: Any) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    chunks = to_chunks(x)
    assert max(chunks.shape[1:]) <= 64
    assert torch.equal(from_chunks(chunks, x.shape), x)
    coefficients = dct(chunks)
    torch.testing.assert_close(idct(coefficients), chunks, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(coefficients.norm(), x.norm())
    rule = _make("demo", k=4096)
    assert isinstance(rule, DeMo)
    rule.take(x)
    torch.testing.assert_close(x, torch.zeros_like(x), rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(
    numel=st.integers(1, 9000),
    steps=st.integers(1, 5),
    how=st.sampled_from(["one bit", "top-k", "top-k in two bits"]),
)
def test_error_feedback_loses_nothing(numel: int, steps: int, how: str) -> None:
    def compress(values: list[Tensor]) -> list[Tensor]:
        if how == "one bit":
            return [one_bit(x, torch.ones_like(x)) for x in values]
        kept = [largest_of_chunks(x, 7) for x in values]
        return kept if how == "top-k" else [two_bits(x) for x in kept]

    generator = torch.Generator().manual_seed(numel)
    residual = Residual([torch.zeros(numel)])
    whole = torch.zeros(numel)
    for _ in range(steps):
        values = torch.randn(numel, generator=generator)
        (sent,) = residual.send([values], compress)
        whole += values - sent
    torch.testing.assert_close(residual.tensors[0], whole, rtol=1e-4, atol=1e-5)


def test_one_bit_keeps_the_norm_and_what_is_masked_at_zero() -> None:
    x = torch.tensor([3.0, -1.0, 0.0, 2.0])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    sent = one_bit(x, mask)
    torch.testing.assert_close(sent.norm(), x.norm())
    assert sent.sign().tolist() == [1, -1, 0, 1]


def test_two_bits_are_a_sign_and_one_of_two_means() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 10.0, -12.0])
    assert two_bits(x).tolist() == [1.5, -1.5, 0, 11, -11]
    assert two_bits(torch.zeros(3)).tolist() == [0, 0, 0]
    assert two_bits(torch.tensor([2.0, -2.0])).tolist() == [2, -2]


def _words(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 60)
    words = ["--data", str(text), "--model", "gpt", "--steps", "4", "--batch-size", "1"]
    words += ["--optimizer", "adamw", "--warmup", "2", "--lr-schedule", "cosine"]
    return [*words, "--clip-grad", "1", "--workers", "2"]


@simulates
def test_dense_is_what_simulate_does(tmp_path: Path, capsys: Any) -> None:
    words = [*_words(tmp_path), "--lr", "3e-3", "--betas", "0.8", "0.95", "--log-dir"]
    peers.main([*words, str(tmp_path / "peers"), "--peers", "dense", "demo:k=3,lr=2e-3"])
    capsys.readouterr()
    fixed = ["--policy", "fixed", "--cf", "1", "--json"]
    assert main(["simulate", *words, str(tmp_path / "simulate"), *fixed]) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    lines = (tmp_path / "peers" / "table.txt").read_text().splitlines()
    dense, demo = lines[1].split(), lines[2]
    assert dense[:3] == ["dense", "lr=0.003", "0"]
    assert float(dense[3]) == pytest.approx(quality, rel=1e-3)
    assert dense[4:] == ["1", "times"]
    assert "lr=0.002 k=3 decay=0.999" in demo


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "demos"], "must be one of dense, bf16, onebit-adam, demo, diloco, sparseloco"),
        (["--peers", "demo:steps=3"], "demo takes numbers for lr, k, decay as key=value"),
        (["--peers", "demo:k=many"], "got 'k=many'"),
        (["--optimizer", "adam", "--weight-decay", "0.1"], "--weight-decay"),
        (["--data", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_options_are_refused_before_training(
    words: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--log-dir", str(tmp_path / "log"), *words])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
