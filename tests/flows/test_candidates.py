"""Candidate recipes are a profile's own recipe and its remedies; if none passes, the closest attempt is reported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any, cast

import pytest
import yaml

from mergegate.flows import release
from mergegate.flows.attempt import Attempt, FailedMerge, distance_from_passing
from mergegate.flows.candidates import candidate_recipes
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.gate import GateRule, GuardVerdict
from mergegate.tasks.quality.gate.stage import gate_verdict

LINEAR: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": "a", "parameters": {"weight": 0.5}}, {"model": "b", "parameters": {"weight": 0.5}}],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "linear.yaml").write_text(yaml.safe_dump(LINEAR))
    return Path("recipes/linear.yaml")


def test_a_remedy_may_change_the_recipe_or_be_another_one(tmp_path: Path, recipe: Path) -> None:
    slerp = {"merge_method": "slerp", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"t": 0.5}}
    (tmp_path / "slerp.yaml").write_text(yaml.safe_dump(slerp))
    ties = {"merge_method": "ties", "base_model": "base", "density": 0.5}
    remedies = [ties, Path("slerp.yaml"), {**LINEAR, "dtype": "float32"}]
    found = candidate_recipes(recipe, remedies, tmp_path, "profile x")
    summaries = ["linear of 2", "ties of 2 over base", "slerp of 2", "linear of 2"]
    assert [candidate.recipe.summary() for candidate in found] == summaries
    changes = ["", "merge_method: ties, base_model: base, density: 0.5", "slerp.yaml", "another recipe"]
    assert [candidate.remedy for candidate in found] == changes


def test_a_changed_recipe_has_its_own_text_and_finds_its_models_where_the_first_one_does(
    tmp_path: Path, recipe: Path
) -> None:
    first, second = candidate_recipes(recipe, [{"weight": 1.0}], tmp_path, "profile x")
    assert first.recipe.directory == second.recipe.directory == tmp_path / "recipes"
    assert first.text == (tmp_path / recipe).read_text()
    models = [{"model": "a"}, {"model": "b"}]
    assert yaml.safe_load(second.text) == {"merge_method": "linear", "models": models, "parameters": {"weight": 1.0}}


def test_a_misspelt_remedy_says_which_one(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(InvalidInput, match=r"profile x: remedies\[1\]"):
        candidate_recipes(recipe, [{"dtype": "float32"}, {"wieght": 1}], tmp_path, "profile x")


def test_several_documents_cannot_be_changed_in_part(tmp_path: Path) -> None:
    documents = [{"name": "one", **LINEAR}, {**LINEAR, "models": [{"model": "one", "parameters": {"weight": 1}}]}]
    (tmp_path / "steps.yaml").write_text(yaml.safe_dump_all(documents))
    with pytest.raises(InvalidInput, match="changes of a recipe with several documents"):
        candidate_recipes(Path("steps.yaml"), [{"dtype": "float32"}], tmp_path, "profile x")


def attempt(outcome: Outcome, drop: float) -> Any:
    guard = GuardVerdict(
        task="t", metric="acc", reference="a", reference_score=0.9, merge_score=0.9 - drop / 100, n=100, lost=0, won=0,
        drop=drop, low=drop - 1, high=drop + 1, confidence=0.95, max_drop=3, margin=4, outcome=outcome, reason="why",
    )  # fmt: skip
    verdict = gate_verdict([guard], None, "block")
    assessment = Some(verdict=Some(value=verdict), evidence=Some(tasks=()))
    values = {"assessment": assessment, "verdicts": (verdict.as_verdict(),), "pinned": None, "merged": None}
    return Attempt(**values, explanation=None, cleared=Some(candidate=Some(remedy="")))  # type: ignore[arg-type]


def tried(monkeypatch: pytest.MonkeyPatch, *attempts: Any, proposals: int = 0, limit: int = 0) -> tuple[Any, list[Any]]:
    """Return the result of a run whose candidates, and then up to ``proposals`` remedies, end with ``attempts``."""
    remaining = iter(attempts)
    monkeypatch.setattr(release, "make_attempt", lambda *_: next(remaining))
    evidence: Any = Some(rule=GateRule(), _replace=lambda rule: None)
    cleared = [each.cleared for each in attempts]
    written, proposed = (
        iter(cleared[: len(cleared) - proposals]),
        iter(cleared[len(cleared) - proposals :] + [None] * bool(proposals)),
    )
    monkeypatch.setattr(release, "proposed_remedy", lambda *_: next(proposed))
    profile: Any = Some(max_proposed_remedies=proposals)
    return release.try_candidates(written, profile, evidence, (), cast("Any", None), limit=limit or len(attempts))


def test_the_smallest_excess_is_the_closest_and_inconclusive_is_closer_than_failed() -> None:
    attempts = [attempt("fail", 20), attempt("inconclusive", 3.5), attempt("fail", 4), attempt("inconclusive", 1)]
    drops = [each.assessment.verdict.value.guards[0].drop for each in sorted(attempts, key=distance_from_passing)]
    assert drops == [1, 3.5, 4, 20]


def test_the_best_attempt_is_reported_and_all_are_listed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [attempt("fail", 9), attempt("fail", 5), attempt("fail", 30)]
    best, listed = tried(monkeypatch, *attempts)
    assert best is attempts[1]
    assert listed == attempts


def test_the_attempt_that_passes_is_reported_even_if_it_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [attempt("fail", 9), attempt("pass", 2)]
    assert tried(monkeypatch, *attempts)[0] is attempts[1]


def test_a_broken_last_merge_does_not_hide_the_attempts_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = FailedMerge(cast("Any", Some(candidate=Some(remedy=""))), Refused("w", found="NaN"))
    judged = attempt("fail", 9)
    assert tried(monkeypatch, judged, broken) == (judged, [judged, broken])
    with pytest.raises(Refused, match="NaN"):
        tried(monkeypatch, broken)


def test_only_as_many_remedies_are_proposed_as_the_profile_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [attempt("fail", 9), attempt("fail", 5), attempt("fail", 30)]
    assert tried(monkeypatch, *attempts, proposals=2)[1] == attempts
    # A search for the scale may find nothing: its attempt is not replaced by a proposal that the profile forbids.
    assert tried(monkeypatch, attempts[0], limit=2)[1] == attempts[:1]
