"""Descriptions of settings, which must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from adaptive.network import agreement


@pytest.mark.parametrize("lines", [("base=a",), ("base=a", "sync=b", "memory=c")])
def test_a_line_that_one_rank_alone_has_is_a_difference(
    lines: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "base=a\nsync=b"

    def gathered(mine: object, group: object) -> list[object]:
        return [mine, ("", "\n".join(lines))]

    monkeypatch.setattr(agreement, "gather_objects", gathered)
    with pytest.raises(RuntimeError, match=r"(?s)set up differently on rank 1.*\(nothing\)"):
        agreement.agree(lambda: own, None)  # type: ignore[arg-type]  # which nothing asks for
