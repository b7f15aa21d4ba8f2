"""Split test parameters: a sample for the quick suite, the rest for a longer one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], often: Collection[Any], rest: Any = pytest.mark.story) -> list[Any]:
    """Return `values`, and mark those outside `often` with `rest`."""
    return [value if value in often else pytest.param(value, marks=rest) for value in values]


def sampled_rows(rows: Iterable[tuple[Any, ...]], often: Collection[Any], rest: Any = pytest.mark.story) -> list[Any]:
    """Return `rows` of several arguments each, and mark those outside `often` with `rest`."""
    return [row if row in often else pytest.param(*row, marks=rest) for row in rows]
