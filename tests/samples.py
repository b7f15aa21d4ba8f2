"""Parameters of tests of which a quicker suite has a sample, and a longer one the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], often: Collection[Any], rest: Any = pytest.mark.slow) -> list[Any]:
    """``values``, of which those that are not among ``often`` have the mark ``rest``."""
    return [value if value in often else pytest.param(value, marks=rest) for value in values]


def sampled_rows(rows: Iterable[tuple[Any, ...]], often: Collection[Any], rest: Any = pytest.mark.slow) -> list[Any]:
    """The same of rows, each a value for every one of several arguments."""
    return [row if row in often else pytest.param(*row, marks=rest) for row in rows]
