"""Remedies propose the change that the measurements support, as a recipe that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.results import build, gate_verdict
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core import load_recipe
from mergegate.merge_core.analysis.interference import Tally
from mergegate.merge_core.recipe import apply_overrides
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.gate.verdicts import DriftVerdict, GateVerdict, GuardVerdict
from mergegate.tasks.release.explain.remedies import (
    Diagnosis,
    Remedy,
    drop_tried_remedies,
    normalize_recipe,
    relative_movement,
    suggest_documents,
    suggest_remedies,
)
from mergegate.tasks.release.explain.stage import named_base


def tally(
    cosines: dict[tuple[int, int], float] | None = None,
    *,
    vectors: int = 2,
    conflict: float = 0.2,
    merge: tuple[float, ...] | None = (0.5, 0.5),
) -> Tally:
    """Return the tally of unit-length task vectors with these cosines and of a merge that combines them."""
    angles = cosines or {}
    gram = [
        [1.0 if i == k else angles.get((min(i, k), max(i, k)), 0.0) for k in range(vectors)] for i in range(vectors)
    ]
    if merge is not None:
        cross = [sum(share * gram[i][k] for i, share in enumerate(merge)) for k in range(vectors)]
        own = sum(share * x for share, x in zip(merge, cross, strict=True))
        gram = [[*row, x] for row, x in zip(gram, cross, strict=True)] + [[*cross, own]]
    pairs = vectors * (vectors - 1) // 2
    return Tally(
        elements=1000, vectors=vectors, origin=100.0, gram=tuple(map(tuple, gram)), moved=1000,
        opposed=round(1000 * conflict), pair_moved=(1000,) * pairs, pair_opposed=(round(1000 * conflict),) * pairs,
    )  # fmt: skip


def guard(task: str = "reversing", reference: str = "a", drop: float = 9.0) -> GuardVerdict:
    measured = {"reference_score": 0.9, "merge_score": 0.8, "lost": 50, "won": 5, "max_drop": 2}
    bounds = {"drop": drop, "low": drop - 2, "high": drop + 2}
    return build(GuardVerdict, task=task, reference=reference, outcome="fail", reason="lost", **measured, **bounds)


def refused(*guards: GuardVerdict, drift: DriftVerdict | None = None, outcome: Outcome = "fail") -> GateVerdict:
    return gate_verdict(guards, drift, ("lost",), outcome)


RISEN = DriftVerdict(
    reference="a", documents=100, unit="token", ratio=1.2, low=1.1, high=1.3, max_ratio=1.05, warn_ratio=1.02,
    outcome="fail", broken=False, warning=False, reason="risen",
)  # fmt: skip


def recipe(method: str, *, names: Sequence[str] = "ab", base: bool = True, **parameters: Any) -> dict[str, Any]:
    weighted = method not in ("slerp", "karcher")
    among = ["base"] if base and method in ("linear", "karcher") else []  # these methods list the base among the models
    return {
        "merge_method": method,
        **({"base_model": "base"} if base else {}),
        "models": [
            {"model": name, **({"parameters": {"weight": 0.5, **parameters}} if weighted else {})}
            for name in (*among, *names)
        ],
        **({"parameters": {"t": 0.5}} if method == "slerp" else {}),
        "dtype": "bfloat16",
    }


def suggestions(
    found: dict[str, Any], whole: Tally, verdict: GateVerdict | None = None, **about: Any
) -> tuple[Remedy, ...]:
    names = tuple("abcd"[: whole.vectors])
    origin = {"origin": ("base", "base"), "has_base": "base_model" in found}
    given = {"names": names, "refs": names, **origin, **about}
    return suggest_remedies(Diagnosis(recipe=found, tally=whole, verdict=verdict or refused(guard()), **given))


def changes(
    found: dict[str, Any], whole: Tally, verdict: GateVerdict | None = None, **about: Any
) -> list[dict[str, Any]]:
    return [remedy.change for remedy in suggestions(found, whole, verdict, **about)]


def weights(change: dict[str, Any]) -> list[float]:
    return [entry["parameters"]["weight"] for entry in change["models"]]


def test_ties_is_proposed_where_opposed_changes_cancel() -> None:
    remedies = suggestions(recipe("task_arithmetic"), tally(conflict=0.48))
    assert remedies[0].change == {"merge_method": "ties", "density": 0.3}
    assert remedies[0].reason.startswith(
        "48 % of the weights that several parents change have opposite signs (50 % by chance); task_arithmetic"
    )


def test_signs_are_elected_only_where_task_vectors_disagree_and_there_is_a_base() -> None:
    assert {"merge_method": "ties", "density": 0.3} not in changes(recipe("task_arithmetic"), tally(conflict=0.2))
    assert all("merge_method" not in change for change in changes(recipe("linear", base=False), tally(conflict=0.5)))


@pytest.mark.parametrize(
    ("now", "lower"),
    [
        (1.0, 0.5),
        (0.5, 0.3),
        (0.4, 0.3),
        (0.3, 0.2),
        (0.2, 0.1),
        (0.1, None),  # none below the smallest
        ([0.2, {"filter": "mlp", "value": 0.9}], 0.5),  # the largest of a gradient counts
    ],
)
def test_a_method_with_a_density_keeps_less(now: object, lower: float | None) -> None:
    found = changes(recipe("ties", density=now), tally(conflict=0.45))
    assert [change["density"] for change in found if "density" in change] == ([] if lower is None else [lower])


def test_a_merge_that_moved_too_far_gets_a_smaller_factor() -> None:
    whole = tally(merge=(1.0, 1.0))
    assert relative_movement(whole) == pytest.approx(math.sqrt(2))
    (first, *_) = suggestions(recipe("task_arithmetic"), whole)
    assert first.change == {"lambda": 0.71}
    assert "1.4 times as far" in first.reason


def test_a_remedy_reduces_a_factor_that_is_already_set_and_adds_none_to_other_methods() -> None:
    whole = tally(merge=(1.0, 1.0))
    assert changes({**recipe("task_arithmetic"), "parameters": {"lambda": 2.0}}, whole)[0] == {"lambda": 1.4}
    assert all("lambda" not in change for change in changes(recipe("linear"), whole))


def test_higher_perplexity_leads_to_a_smaller_factor() -> None:
    assert {"lambda": 0.7} in changes(recipe("ties"), tally(), refused(drift=RISEN))
    assert {"lambda": 0.7} not in changes(recipe("ties"), tally(), refused(guard()))


def test_a_remedy_removes_a_parent_that_opposes_all_others_but_not_one_of_two() -> None:
    whole = tally({(0, 1): 0.3, (0, 2): -0.2, (1, 2): -0.1}, vectors=3, merge=(0.3, 0.3, 0.3))
    found = changes(recipe("ties", names="abc"), whole)
    (change,) = [change for change in found if "models" in change and len(change["models"]) == 2]
    assert [entry["model"] for entry in change["models"]] == ["a", "b"]
    found = changes(recipe("ties"), tally({(0, 1): -0.4}))
    assert all(len(change.get("models", "ab")) == 2 for change in found)


def test_the_parent_whose_skill_was_lost_and_is_farthest_gets_more_weight() -> None:
    whole = tally(merge=(0.2, 0.8))
    (change,) = [change for change in changes(recipe("ties"), whole) if "models" in change]
    assert weights(change) == [0.75, 0.5]
    assert not any("models" in c for c in changes(recipe("ties"), whole, refused(guard(reference="b"))))


@pytest.mark.parametrize(
    ("reference", "share", "before", "after"),
    [
        ("first", 0.5, [0.5, 0.5], [0.75, 0.5]),  # the first model is a parent like the others
        ("a", 0.5, [0.5, 0.5], [0.5, 0.75]),
        ("a", 0.1, [0.5, 0.5], [0.5, 0.75]),
        ("a", 0.1, [0.9, 0.1], [0.9, 0.9]),  # a parent that hardly counted counts as much as any other
        ("first", 0.1, [0.5, 0.5], None),  # a parent that is near gets no more weight
    ],
)
def test_without_a_base_a_distant_parent_gets_more_weight(
    reference: str, share: float, before: list[float], after: list[float] | None
) -> None:
    found = recipe("linear", names=["first", "a"], base=False)
    for entry, weight in zip(found["models"], before, strict=True):
        entry["parameters"]["weight"] = weight
    whole = tally(vectors=1, merge=(share,))
    proposed = changes(found, whole, refused(guard(reference=reference)), origin=("first", "first"))
    assert [weights(change) for change in proposed] == ([] if after is None else [after])


def test_a_merge_that_passed_needs_no_remedy() -> None:
    assert changes(recipe("linear"), tally(conflict=0.5), refused(outcome="pass")) == []


@pytest.mark.story
@given(
    method=st.sampled_from(
        ["linear", "task_arithmetic", "ties", "dare_ties", "dare_linear", "slerp", "multislerp", "karcher"]
    ),
    conflict=st.floats(0, 1),
    shares=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2), st.floats(0.1, 2)),
    cosine=st.floats(-0.3, 0.9),
    extra=st.booleans(),
)
def test_every_suggestion_makes_a_recipe_that_can_be_read_and_is_another(
    method: str, conflict: float, shares: tuple[float, float, float], cosine: float, extra: bool
) -> None:
    vectors = 3 if extra and method != "slerp" else 2
    names = "abc"[:vectors]
    known = method in ("ties", "dare_ties", "dare_linear")
    found = recipe(method, names=names, **({"density": 0.5} if known else {}))
    load_recipe(found)
    whole = tally({(0, 2): cosine, (1, 2): cosine}, vectors=vectors, conflict=conflict, merge=shares[:vectors])
    for remedy in suggestions(found, whole, refused(guard(), drift=RISEN)):
        changed = load_recipe(apply_overrides(found, remedy.change, "remedy"))
        assert changed.canonical() != load_recipe(found).canonical()
        assert remedy.reason.endswith(".")
        assert yaml.safe_load(remedy.text()) == remedy.change


def weighed(*weights: float, prefix: str = "m", **parameters: object) -> dict[str, Any]:
    models = [{"model": f"{prefix}{at}", "parameters": {"weight": weight}} for at, weight in enumerate(weights)]
    return {"merge_method": "linear", "models": models, "parameters": dict(parameters)}


@pytest.mark.parametrize(
    ("proposed", "tried", "is_new"),
    [
        (weighed(0.9, 0.9), [weighed(0.9, 0.1), weighed(0.5, 0.5)], False),  # after normalization, the same merge
        (weighed(0.9, 0.9), [weighed(0.9, 0.1)], True),
        (weighed(0.9, 0.9, normalize=False), [weighed(0.5, 0.5, normalize=False)], True),
        (weighed(0.9, 0.1), [weighed(0.9, 0.1)], False),
    ],
)
def test_refused_recipes_are_not_proposed_again(
    proposed: dict[str, Any], tried: list[dict[str, Any]], is_new: bool
) -> None:
    remedy = Remedy(change={"models": proposed["models"]}, reason="because")
    recipe = {**proposed, "models": tried[0]["models"]}
    assert (drop_tried_remedies([remedy], recipe, tried) == (remedy,)) is is_new


def test_a_remedy_uses_the_base_that_all_models_name() -> None:
    found, whole = recipe("linear", names=["first", "a"], base=False), tally(vectors=1, merge=(0.1,))
    verdict, origin = refused(guard(reference="first")), ("first", "first")
    assert not any("base_model" in change for change in changes(found, whole, verdict, origin=origin))
    offered = changes(found, whole, verdict, origin=origin, named_base="../base")
    (ties,) = (change for change in offered if change.get("merge_method") == "ties")
    assert ties == {"merge_method": "ties", "base_model": "../base", "density": 0.3, "weight": 1.0}
    assert "ties of 2 over base" in load_recipe(apply_overrides(found, ties, "remedy")).summary()


def test_a_remedy_is_valid_in_a_profile() -> None:
    remedy = Remedy(change=weighed(0.5, 0.5), reason="because")
    assert remedy.block().startswith("remedies:\n  - ")
    assert yaml.safe_load(remedy.block()) == {"remedies": [remedy.change]}
    assert yaml.safe_load(f"name: a\n{remedy.block()}\npublish: null\n")["remedies"] == [remedy.change]


def test_models_of_two_directories_are_compared_by_what_they_hold() -> None:
    proposed = Remedy(change={"models": weighed(0.9, 0.9)["models"]}, reason="because")
    elsewhere = weighed(0.5, 0.5, prefix="../m")
    here, there = {"m0": "abc", "m1": "def"}, {"../m0": "abc", "../m1": "def"}
    for known, kept in ((there, ()), ({"../m0": "abc"}, (proposed,))):
        assert drop_tried_remedies([proposed], weighed(0.9, 0.1), [normalize_recipe(elsewhere, known)], here) == kept


def test_the_named_base_is_that_of_all_cards(tmp_path: Path) -> None:
    def card(name: str, *bases: str) -> Path:
        place = tmp_path / "models" / name
        place.mkdir(parents=True, exist_ok=True)
        named = "".join(f"\n- {base}" for base in bases)
        (place / "README.md").write_text(f"---\nbase_model:{named}\n---\n")
        return place

    base, one, two = card("base"), card("one", "../base"), card("two", "../base")
    assert named_base([one, two], tmp_path / "recipes") == "../models/base"
    assert named_base([card("three", "org/name"), card("four", "org/name")], tmp_path) == "org/name"
    assert named_base([one, card("five", "../one")], tmp_path) is None  # they differ
    assert named_base([one, base], tmp_path) is None  # the base's card names none
    assert named_base([one, card("six", "../base", "../two")], tmp_path) is None


def inconclusive(needed: int | None, evaluated: int = 100, left: int = 0) -> GateVerdict:
    counts = {"documents_asked": evaluated, "documents_needed": needed, "documents_left": left}
    update = {"outcome": "inconclusive", "n": evaluated, **counts}
    return refused(guard(drop=1.0).model_copy(update=update), outcome="inconclusive")


def test_an_inconclusive_merge_is_told_to_evaluate_more_documents() -> None:
    remedy = suggest_documents(inconclusive(300), {"reversing": 400})
    assert remedy is not None
    assert (remedy.kind, remedy.change) == ("profile", {"evaluate": {"extend": True}})
    assert remedy.reason.startswith("The gate is inconclusive after 100 of 400 available documents, and about 300")
    assert yaml.safe_load(remedy.block()) == remedy.change
    assert "remedies" not in remedy.instruction()


@pytest.mark.parametrize(
    ("verdict", "available"),
    [
        (inconclusive(500), 400),  # all documents do not suffice
        (inconclusive(None), 400),  # no number of documents decides
        (inconclusive(300, evaluated=400), 400),  # all are evaluated
        (inconclusive(300, left=300), 400),  # the run stopped because the others are unlikely to decide
        (refused(guard()), 400),  # the verdict is decided
    ],
)
def test_documents_are_only_proposed_if_they_would_decide(verdict: GateVerdict, available: int) -> None:
    assert suggest_documents(verdict, {"reversing": available}) is None
