"""The registry has the peer's methods, and another package can add one with an entry point."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from family import load, merge_text

from merge_core.errors import InvalidInput
from merge_core.methods import registry
from merge_core.methods.contract import Map, Method, TensorTask, fold_sums

PEER = {
    "linear",
    "slerp",
    "nuslerp",
    "multislerp",
    "karcher",
    "task_arithmetic",
    "ties",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "breadcrumbs",
    "breadcrumbs_ties",
    "model_stock",
    "sce",
    "ram",
    "ramplus_tl",
    "nearswap",
    "arcee_fusion",
    "passthrough",
}


def louder(task: TensorTask):  # type: ignore[no-untyped-def]
    """The first model, divided by its mean magnitude."""
    total = yield fold_sums(lambda block: block.grain_sums(block.inputs[0].abs()))
    return Map(lambda block: block.inputs[0] * float(task.numel / total))


LOUDER = Method("louder", "Divide by the mean magnitude", "", "ordinary", (1, None), (), louder)


class Point:
    """An installed entry point."""

    name = "extra"

    def __init__(self, value: object) -> None:
        self.load = lambda: value


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Point]]:
    """Entry points that the registry finds."""
    points: list[Point] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "mergegate.methods" else [])
    registry.merge_methods.cache_clear()
    yield points
    registry.merge_methods.cache_clear()


def test_every_method_of_the_peer_is_there_and_says_what_it_is() -> None:
    assert set(registry.merge_methods()) >= PEER
    for method in registry.merge_methods().values():
        assert method.summary
        assert all(parameter.summary for parameter in method.parameters)


def test_a_method_of_another_package_is_used_like_our_own(family: Path, installed: list[Point]) -> None:
    installed.append(Point(LOUDER))
    merge_text("merge_method: louder\nmodels: [{model: a}]", family)
    for name, tensor in load(family / "out").items():
        source = load(family / "a")[name]
        np.testing.assert_allclose(tensor, source / np.abs(source).mean(), rtol=1e-6)


@pytest.mark.parametrize("value", [[3], [LOUDER, LOUDER]])
def test_what_another_package_registers_is_checked(installed: list[Point], value: object) -> None:
    installed.append(Point(value))
    with pytest.raises(InvalidInput, match="extra"):
        registry.merge_methods()


def test_reading_recipes_and_planning_need_no_torch() -> None:
    code = "import sys, merge_core; merge_core.load_recipe, merge_core.plan_merge, merge_core.merge_methods(); "
    code += "sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
