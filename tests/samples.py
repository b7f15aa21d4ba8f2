"""Parameters of tests of which the fast suite has a sample, and the slow one the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """``values``, of which those that are not among ``often`` are tried in the slow suite alone."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.slow) for value in values]
