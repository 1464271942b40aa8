"""The gains of GraVAC's ladder by model size: the experiment of docs/papers.md.

    python -m docs.studies.gains --data DIR
    python -m docs.studies.gains --data DIR --model resnet101 --steps 30 --batch-size 4

Two workers send CF 10 in all steps, top-k with values of 32 bits, tensor by tensor, with plain
error feedback, and measure the gains of GraVAC's ladder besides. Each gain is a ratio of sums over
the second half of the steps. DIR holds cifar-10-batches-py and wikitext-2. What is not named in
--help goes on to `python -m runs train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import nan
from pathlib import Path

from adaptive import StepReport
from docs.studies.common import columns, train, write
from policies.base import GainKind
from runs.models import MODELS
from runs.records import TIMELINE_FILE, read_records

LADDER = (10.0, 20.0, 40.0, 160.0, 1000.0)
"""GraVAC's exponential scaling, of which every run sends the first."""

MODELS_OF_PAPERS = (
    *("resnet8", "resnet18", "vgg11", "vgg16", "resnet50", "resnet101"),
    "lstm-2x1500",
)

KINDS: dict[str, GainKind] = {
    "paper: ||g_c||²/||a||²": "error_fed",
    "code: ||g_c||/||g||": "raw",
    "of the gradient": "gradient",
}
"""The gains of the tables, and their names in `GainKind`."""

LR = {"lstm-2x1500": "0.1"}
"""Learning rates, where they are not --lr."""


def gains(reports: Sequence[StepReport], kind: GainKind) -> dict[float, float]:
    """By CF of the ladder: the ratio of the sums of these steps, in which it was measured."""
    found = {}
    for cf in LADDER:
        terms = [r.measurements[cf].terms(kind) for r in reports if cf in r.measurements]
        top, bottom = (sum(part) for part in zip(*terms, strict=True)) if terms else (nan, nan)
        found[cf] = top / bottom if bottom else nan
    return found


def trained(model: str, words: Sequence[str], folder: Path, data: Path) -> None:
    """One run, unless its records are there."""
    words_task = model.startswith("lstm")
    probe = f"({', '.join(f'{cf:g}' for cf in LADDER[1:])},)"
    how = ["--policy", f"Fixed({LADDER[0]:g}, probe={probe})", "--base", "topk+fp32"]
    how += ["--granularity", "layer", "--memory", "residual", "--model", model]
    how += ["--task", "words" if words_task else "cifar10"]
    how += ["--data", str(data / "wikitext-2" if words_task else data)]
    train("train", [*how, *words], folder)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--model", nargs="+", default=MODELS_OF_PAPERS, choices=sorted(MODELS), metavar="MODEL")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=8)
    add("--lr", default="0.002", help="of image models: small, as batches are")
    add("--log-dir", type=Path, default=Path("logs/study-gains"))
    given, rest = parser.parse_known_args(words)
    rows: list[Sequence[str]] = [
        ("model", "steps", "gain", *(f"CF {cf:g}" for cf in LADDER)),
    ]
    for model in given.model:
        folder = given.log_dir / model
        if not (folder / TIMELINE_FILE).exists():
            how = ["--steps", f"{given.steps}", "--batch-size", f"{given.batch_size}"]
            how += ["--lr", LR.get(model, given.lr)]
            trained(model, [*how, *rest], folder, given.data)
        reports = [record.report for record in read_records(folder / TIMELINE_FILE).steps]
        late = reports[len(reports) // 2 :]
        for name, kind in KINDS.items():
            found = gains(late, kind)
            shown = [f"{found[cf]:.3f}" for cf in LADDER]
            rows.append((model, f"{len(reports)}", name, *shown))
    write(columns(rows), given.log_dir)


if __name__ == "__main__":
    main()
