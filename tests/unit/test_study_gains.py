"""The study of gains: what it counts, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from docs.studies.gains import LADDER, Energies, gains, main
from tests.unit.test_tasks_images import write_cifar10


def test_a_gain_is_the_energy_of_the_largest_elements() -> None:
    a, energies = torch.randn(4000), Energies()
    kept = energies.add(a, a)
    assert len(kept) == 400
    paper, code = gains([energies])
    descending = a.abs().sort(descending=True).values.double()
    for cf, gain, norms in zip(LADDER, paper, code, strict=True):
        expected = float(descending[: int(4000 / cf)].square().sum() / descending.square().sum())
        assert gain == pytest.approx(expected)
        assert norms == pytest.approx(expected**0.5)


def test_it_prints_the_gains_of_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cifar10(tmp_path, 1, 8)
    words = ["--data", str(tmp_path), "--model", "resnet8", "--steps", "2", "--batch-size", "2"]
    main([*words, "--log-dir", str(tmp_path / "log")])
    table = (tmp_path / "log" / "table.txt").read_text().splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["resnet8", "0.078"]] * 3
    assert "resnet8: " in capsys.readouterr().out
