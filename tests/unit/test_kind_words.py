"""What a mistake in a name or a value is answered with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptive import AdaptiveCompressor, Fixed, LinkSpec, Schedule, Warmup
from adaptive.model.wrappers import unwrap
from runs.compare.contender import parse_contender
from runs.needs import install
from runs.netlab.lab import Link
from runs.parser import UsageError


@pytest.mark.parametrize("name", ["top-k", "TopK", "top_k", "topkk"])
def test_a_name_that_is_nearly_right_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=r"; did you mean 'topk'\?"):
        AdaptiveCompressor(name)
    with pytest.raises(UsageError, match=r"; did you mean 'topk'\?"):
        parse_contender(f"{name}@20")


def test_policies_and_ways_are_told_too() -> None:
    with pytest.raises(ValueError, match=r"got 'GraVAC'; did you mean 'gravac'\?"):
        AdaptiveCompressor(policy="GraVAC")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"did you mean 'layer'\?"):
        AdaptiveCompressor(granularity="layers")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got 'nonsense'$"):
        AdaptiveCompressor("nonsense")


@pytest.mark.parametrize("text", ["100MBps", "1 GBps"])
def test_bytes_a_second_are_not_bits(text: str) -> None:
    with pytest.raises(ValueError, match="a rate is in bits: '100MBps' is '800mbit'"):
        LinkSpec.parse(text)
    with pytest.raises(UsageError, match="in bits: 100MBps is 800mbit"):
        Link.parse("--network", text)
    as_bits = text.replace("B", "b")
    assert LinkSpec.parse(as_bits).bits_per_second == Link.parse("--network", as_bits).rate


@pytest.mark.parametrize(
    "policy",
    [Fixed(5), Schedule({0: 10, 9: 2000}), Warmup(then=Fixed(5)), Fixed(2000)],
)
def test_a_cf_outside_its_range_is_refused_where_it_is_written(policy: object) -> None:
    with pytest.raises(ValueError, match=r"must be 1 \(dense\) or inside cf_range \(10, 1000\)"):
        AdaptiveCompressor(policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [Fixed(10), Fixed(1), Schedule({0: 1, 5: 1000}), Fixed()])
def test_a_cf_inside_its_range_is_not(policy: Fixed) -> None:
    AdaptiveCompressor(policy=policy)
    AdaptiveCompressor("none", (1, 1), policy=policy)
    AdaptiveCompressor("int8", policy=Fixed(4))


def test_a_scheduler_is_not_taken_for_its_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    assert unwrap(None, [scheduler]).optimizers == (scheduler,)


def test_advice_to_install_works_where_the_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a wheel there is no folder to install from."""
    monkeypatch.setattr("runs.needs.installed", lambda: True)
    assert install("tune") == "pip install 'adaptive-compression[tune]'"
    monkeypatch.setattr("runs.needs.installed", lambda: False)
    assert install("tune") == f"pip install '{Path(__file__).parents[2]}[tune]'"


@pytest.mark.parametrize("setup", ["", "logging.basicConfig(format='%(message)s')"])
def test_lines_in_a_users_log_begin_with_the_librarys_name(setup: str) -> None:
    script = f"import logging, adaptive\n{setup}\n"
    script += "logging.getLogger('adaptive').warning('gradients are %s', 'not finite')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "adaptive: gradients are not finite"
