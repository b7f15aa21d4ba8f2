"""A run whose attempts all fail reports the attempt that came closest to passing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mergegate.flows import release
from mergegate.flows.attempt import Attempt, FailedMerge, distance_from_passing
from mergegate.merge_core.errors import Refused
from mergegate.tasks.gate.evidence import GuardVerdict
from mergegate.tasks.gate.settings import GateRule
from mergegate.tasks.gate.stage import gate_verdict
from mergegate.tasks.stage import Outcome


def attempt(outcome: Outcome, drop: float, name: str = "") -> Attempt:
    guard = GuardVerdict(
        task="t", metric="acc", reference="a", reference_score=0.9, merge_score=0.9 - drop / 100, n=100, lost=0, won=0,
        drop=drop, low=drop - 1, high=drop + 1, confidence=0.95, max_drop=3, margin=4, outcome=outcome, reason="why",
    )  # fmt: skip
    verdict = gate_verdict([guard], None, "block")
    values = dict.fromkeys(("pinned", "merged", "explanation"))
    return Attempt(
        **cast("Any", values),
        cleared=cast("Any", SimpleNamespace(candidate=SimpleNamespace(remedy=name))),
        assessment=cast(
            "Any", SimpleNamespace(verdict=SimpleNamespace(value=verdict), evidence=SimpleNamespace(tasks=()))
        ),
        verdicts=(verdict.as_verdict(),),
    )


def tried(
    monkeypatch: pytest.MonkeyPatch, *attempts: Attempt | FailedMerge, proposals: int = 0
) -> tuple[Any, list[Any]]:
    """Return the result of a run whose candidates, and then up to ``proposals`` remedies, end with ``attempts``."""
    remaining = iter(attempts)
    monkeypatch.setattr(release, "make_attempt", lambda *_: next(remaining))
    evidence = SimpleNamespace(rule=GateRule(), _replace=lambda rule: None)
    cleared = [each.cleared for each in attempts]
    written, proposed = iter(cleared[: len(cleared) - proposals]), iter([*cleared[len(cleared) - proposals :], None])
    monkeypatch.setattr(release, "proposed_remedy", lambda *_: next(proposed))
    return release.try_candidates(
        cast("Any", written),
        cast("Any", SimpleNamespace(max_proposed_remedies=proposals)),
        cast("Any", evidence),
        (),
        cast("Any", None),
        limit=len(attempts),
    )


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
    broken = FailedMerge(cast("Any", SimpleNamespace(candidate=SimpleNamespace(remedy=""))), Refused("w", found="NaN"))
    judged = attempt("fail", 9)
    assert tried(monkeypatch, judged, broken) == (judged, [judged, broken])
    with pytest.raises(Refused, match="NaN"):
        tried(monkeypatch, broken)


def test_only_as_many_remedies_are_proposed_as_the_profile_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [attempt("fail", 9), attempt("fail", 5), attempt("fail", 30)]
    assert tried(monkeypatch, *attempts, proposals=2)[1] == attempts
    # A search for the scale may find nothing: its attempt is not replaced by a proposal that the profile forbids.
    proposed: list[object] = []
    monkeypatch.setattr(release, "make_attempt", lambda *_: attempts[0])
    monkeypatch.setattr(release, "proposed_remedy", lambda *arguments: proposed.append(arguments))
    evidence = SimpleNamespace(rule=GateRule(), _replace=lambda rule: None)
    profile = SimpleNamespace(max_proposed_remedies=0)
    release.try_candidates(iter([attempts[0].cleared]), profile, evidence, (), None, limit=2)  # type: ignore[arg-type]
    assert proposed == []
