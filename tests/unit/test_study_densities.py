"""The study of gradients' densities draws what was there, and a density is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from docs.studies.densities import density, main
from tests.unit.test_tasks_images import write_cifar10


def test_a_density_integrates_to_one_without_zeros() -> None:
    edges = np.linspace(-5, 5, 41)
    values = torch.cat([torch.randn(1000).clamp(-4.9, 4.9), torch.zeros(9000)])
    shares = density(values, edges)
    assert float((shares * np.diff(edges)).sum()) == pytest.approx(1)
    assert not density(torch.zeros(3), edges).any()


def test_it_draws_a_panel_for_each_cf(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_cifar10(tmp_path, 1, 8)
    out = tmp_path / "out.png"
    words = ["--data", str(tmp_path), "--steps", "2", "--batch-size", "2", "--out", str(out)]
    main([*words, "--cf", "10", "100"])
    assert out.read_bytes().startswith(b"\x89PNG")
