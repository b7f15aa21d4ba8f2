"""A merge that copies a parent, by its weights or by all its answers, is refused unless the profile accepts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_samples import outcome, part

from mergegate.tasks.gate import GatePlan, GateRule, GateVerdict, Guard, gate
from mergegate.tasks.gate.copies import find_copies

GUARDS = (Guard(task="reverse", guarded_by="reverser", max_drop=3),)


def judged(tmp_path: Path, merge: list[str], *, n: int = 400, answers: bool = True, **plan: object) -> GateVerdict:
    """Judge a merge that scores like both parents. ``merge`` holds the answers that differ from those of 'reverser'."""
    texts = [f"answer {doc}" if answers else "" for doc in range(n)]

    def scored(name: str, own: list[str]) -> list:  # type: ignore[type-arg]
        rows = [outcome(doc, answer=text) for doc, text in enumerate([*own, *texts[len(own) :]])]
        return [part(tmp_path / name, rows)]

    models = {"reverser": scored("reverser", []), "base": scored("base", ["own"] * 5), "merge": scored("merge", merge)}
    return gate.work(GUARDS, models, {}, None, GatePlan(GateRule(), **plan))  # type: ignore[arg-type]


def test_a_merge_with_the_answers_of_a_parent_is_refused(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [])
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert verdict.reasons[0].startswith("the merge behaves like a copy of reverser: all 400 answers are equal")
    assert "checks.copies.accepted: [reverser]" in verdict.reasons[0]
    assert [finding.kind for finding in verdict.findings] == ["copy"]


def test_a_parent_that_no_guard_compares_with_can_be_copied_too(tmp_path: Path) -> None:
    assert "copy of base" in judged(tmp_path, ["own"] * 5).reasons[0]


def test_one_other_answer_is_enough_to_differ(tmp_path: Path) -> None:
    assert judged(tmp_path, ["other"]).outcome == "pass"


def test_few_documents_or_unknown_answers_show_no_copy(tmp_path: Path) -> None:
    few = find_copies("", {"base": [(outcome(doc, answer="a"), outcome(doc, answer="a")) for doc in range(99)]}, ())
    assert not list(few)
    assert judged(tmp_path, [], answers=False).outcome == "pass"


def test_an_accepted_copy_is_noted(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [], accepted_copies=("reverser",), copy_of="reverser")
    assert verdict.outcome == "pass"
    (note,) = verdict.findings
    assert (note.outcome, note.reason) == ("pass", "the merge is a copy of reverser: all weights are equal")


def test_equal_weights_are_refused_without_any_score() -> None:
    scores = {"reverser": [], "merge": []}
    verdict = gate.work(GUARDS, scores, {}, None, GatePlan(GateRule(on_inconclusive="pass"), copy_of="reverser"))
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert verdict.summary().startswith("the merge is a copy of reverser: all weights are equal")
    assert "publish reverser itself" in verdict.summary()


@pytest.mark.parametrize("name", ["champion", "anchor"])
def test_the_champion_is_not_a_parent(tmp_path: Path, name: str) -> None:
    """A merge that answers like the published release is judged like any other."""
    rows = [outcome(doc, answer=str(doc)) for doc in range(200)]
    own = [*rows[:-1], outcome(199, answer="own")]
    models = {"reverser": [part(tmp_path / "a", own)], name: [part(tmp_path / "b", rows)]}
    models["merge"] = [part(tmp_path / "c", rows)]
    assert gate.work(GUARDS, models, {}, None, GatePlan(GateRule())).outcome == "pass"
