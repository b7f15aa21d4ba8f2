"""The registry has all of mergekit's methods, and another package can add one with an entry point."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from family import load, merge_text, plan_recipe

from mergegate.merge_core import EngineSettings, methods, open_checkpoint
from mergegate.merge_core.analysis import Tally
from mergegate.merge_core.engine.forecast import Needs, estimate_needs
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.gate import GateVerdict
from mergegate.tasks.release.explain.remedies import Diagnosis, Remedy, suggest_remedies

PEER = {
    *("linear", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic", "ties", "dare_linear", "dare_ties"),
    *("della", "della_linear", "breadcrumbs", "breadcrumbs_ties", "model_stock", "sce", "ram", "ramplus_tl"),
    *("nearswap", "arcee_fusion", "passthrough"),
}


def louder(task: methods.TensorTask):  # type: ignore[no-untyped-def]
    """Divide the first model by its mean magnitude."""
    total = yield methods.fold_sums(lambda block: block.grain_sums(block.inputs[0].abs()))
    return methods.Map(lambda block: block.inputs[0] * float(task.numel / total))


LOUDER = methods.Method("louder", "Divide by the mean magnitude", "", "ordinary", (1, None), (), louder)
PROJECT = Path(__file__).parents[2]


class Point:
    """An installed entry point."""

    name = "extra"

    def __init__(self, value: object) -> None:
        self.load = lambda: value


def suggested(method: str, conflict: float) -> tuple[Remedy, ...]:
    """Return remedies for a refused merge of two models whose task vectors conflict in this share of their weights."""
    moved, opposed = 1000, round(1000 * conflict)
    whole = Tally(
        elements=moved, vectors=2, origin=1.0, gram=((1.0, 0.0), (0.0, 1.0)),
        moved=moved, opposed=opposed, pair_moved=(moved,), pair_opposed=(opposed,),
    )  # fmt: skip
    verdict = GateVerdict(
        outcome="fail", publishable=False, guards=(), drift=None, overall_drop=None, overall_low=None,
        overall_high=None, on_inconclusive="block", reasons=("lost",),
    )  # fmt: skip
    recipe = {"merge_method": method, "base_model": "base", "models": [{"model": "a"}, {"model": "b"}]}
    names = ("a", "b")
    return suggest_remedies(Diagnosis(recipe, names, names, ("base", "base"), True, whole, verdict))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Point]]:
    """Entry points that the registry finds."""
    points: list[Point] = []
    monkeypatch.setattr(methods.registry, "entry_points", lambda group: points if group == "mergegate.methods" else [])
    methods.registry.merge_methods.cache_clear()
    yield points
    methods.registry.merge_methods.cache_clear()


def test_every_method_of_mergekit_exists_and_has_a_summary() -> None:
    assert set(methods.registry.merge_methods()) >= PEER
    for method in methods.registry.merge_methods().values():
        assert method.summary
        assert all(parameter.summary for parameter in method.parameters)


def test_the_method_in_the_guide_merges(family: Path, installed: list[Point]) -> None:
    guide = (PROJECT / "docs" / "how-to" / "extend-mergegate.md").read_text(encoding="utf-8")
    code, recipe = (re.findall(rf"```{language}\n(.*?)```", guide, re.DOTALL)[0] for language in ("python", "text"))
    names: dict[str, object] = {}
    exec(code, names)
    installed.append(Point(names["LOUDER"]))
    merge_text(recipe, family)
    for name, tensor in load(family / "out").items():
        source = load(family / "a")[name]
        np.testing.assert_allclose(tensor, 2 * source / np.abs(source).mean(), rtol=1e-6)


@pytest.mark.parametrize("value", [[3], [LOUDER, LOUDER]])
def test_methods_of_other_packages_are_validated(installed: list[Point], value: object) -> None:
    installed.append(Point(value))
    with pytest.raises(InvalidInput, match="extra"):
        methods.registry.merge_methods()


def test_declared_costs_of_another_package_are_in_the_estimate(family: Path, installed: list[Point]) -> None:
    costs = methods.Costs(map=0.5, fold=7.0, folds=lambda task: 2 if len(task.shape) > 1 else 0)
    installed.append(Point([LOUDER, replace(LOUDER, name="measured", costs=costs)]))

    def needs(method: str) -> Needs:
        plan = plan_recipe(f"merge_method: {method}\nmodels: [{{model: a}}]", family)
        return estimate_needs(plan, EngineSettings(), cores=2, device="cpu")

    sizes = [tensor.shape for tensor in open_checkpoint(family / "a").tensors.values()]
    units = sum(math.prod(shape) * (14.5 if len(shape) > 1 else 0.5) for shape in sizes)
    assert needs("measured").units == pytest.approx(units)
    assert (needs("measured").passes, needs("measured").assumed_cost) == (3, ())
    assert needs("louder").assumed_cost == ("louder",)


def test_the_traits_of_a_method_of_another_package_decide_the_remedies(installed: list[Point]) -> None:
    weight = methods.Parameter("weight", "float", "non_base", methods.REQUIRED, "factor")
    density = methods.Parameter("density", "float", "non_base", 1.0, "share")
    plain = methods.Method("adding", "Add up", "", "required", (1, None), (weight, density), louder)
    adding = replace(plain, traits=methods.Traits(adds_up=True, sparse=True))
    peace = methods.ConflictRemedy("lets them talk", settings={"patience": 3}, additions={"weight": 0.5, "calm": True})
    installed.append(Point([adding, replace(plain, name="peace", traits=methods.Traits(conflict_remedy=peace))]))
    found = suggested("adding", conflict=0.48)
    assert [remedy.change for remedy in found] == [
        {"merge_method": "ties", "density": 0.3},
        {"merge_method": "peace", "patience": 3, "calm": True},
        {"density": 0.5},
    ]
    assert found[1].reason.endswith("adding adds opposed changes, which cancel, while peace lets them talk.")
    assert suggested("peace", conflict=0.48) == ()


@pytest.mark.story
def test_no_method_is_named_outside_the_files_of_the_methods() -> None:
    naming = set()
    for floor in ("merge_core", "tasks", "flows"):
        for file in (PROJECT / floor).rglob("*.py"):
            place = file.relative_to(PROJECT)
            texts = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
            if not place.is_relative_to("merge_core/methods") and texts & PEER:
                naming.add(place.as_posix())
    assert naming == set()


@pytest.mark.story
def test_reading_recipes_and_planning_need_no_torch() -> None:
    code = "import sys, mergegate.merge_core as core; core.load_recipe, core.plan_merge, core.merge_methods(); "
    code += "sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
