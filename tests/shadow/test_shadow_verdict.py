"""The verdict: the kill switch takes precedence over the evidence, and an inconsistent judge promotes no candidate."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from watched_project import rows

from mergegate.tasks.shadow import ArmRow, JudgedTotals, ShadowSettings, ShadowVerdict, shadow_verdict

SERVER = {"url": "http://127.0.0.1:9/v1"}
SETTINGS = ShadowSettings.model_validate(
    {"parent": SERVER, "candidate": SERVER, "judge": {"model": "judge", **SERVER}, "rule": {"minimum_pairs": 50}}
)
WELL, FAILS = rows(0.0, 250), rows(0.0, 250, failing=0.2)


def verdict(
    scores: Sequence[float],
    consistency: float | None = 1.0,
    traffic: Sequence[ArmRow] = WELL,
    found: float = 0.9,
    **totals: tuple[float, float],
) -> ShadowVerdict:
    """Return the verdict if the judge found the share ``found`` of 40 control pairs."""
    controls = [number < 40 * found for number in range(40)]
    judged = JudgedTotals(scores, consistency, controls, **totals)  # type: ignore[arg-type]
    return shadow_verdict("v1", judged, traffic, 30.0, SETTINGS)


BETTER, WORSE, TIES = [1.0, 0.5] * 100, [0.0, 0.5] * 100, [0.5] * 2000


@pytest.mark.parametrize(
    ("shadow", "outcome", "stage_outcome"),
    [
        (verdict(BETTER), "promote", "pass"),
        (verdict(TIES, None), "promote", "pass"),
        (verdict(TIES, 0.1), "wait", "inconclusive"),
        (verdict(BETTER[:10]), "wait", "inconclusive"),
        (verdict(WORSE), "roll back", "fail"),
        (verdict(WORSE, 0.1), "roll back", "fail"),
        (verdict(BETTER, traffic=FAILS), "kill", "fail"),
    ],
)
def test_the_kill_switch_comes_first_then_the_evidence(shadow: ShadowVerdict, outcome: str, stage_outcome: str) -> None:
    stage_verdict = shadow.as_verdict()
    assert (shadow.outcome, stage_verdict.outcome) == (outcome, stage_outcome)
    assert stage_verdict.publishable == (outcome == "promote")
    assert stage_verdict.reasons == (() if outcome == "promote" else (shadow.reason,))
    assert stage_verdict.evidence == shadow


@pytest.mark.parametrize(
    ("shadow", "reason"),
    [
        (verdict(TIES[:500], found=0.0), "the judge found 0 of 40 control pairs (at least 0 %, more than 25 %"),
        (verdict(BETTER, found=0.3), "the judge found 12 of 40 control pairs"),
        (verdict(BETTER, characters=(1000, 2100)), "2.1 times as long as the parent's, and max_length_ratio is 2"),
        (verdict(BETTER, cut_off=(1.0, 6.5)), "cuts off 6.5 % of the candidate's answers and 1.0 % of the parent's"),
    ],
)
def test_blind_judges_and_long_or_cut_off_answers_do_not_promote(shadow: ShadowVerdict, reason: str) -> None:
    assert (shadow.outcome, shadow.as_verdict().publishable) == ("wait", False)
    assert reason in shadow.reason


def test_limits_do_not_prevent_a_rollback() -> None:
    assert verdict(WORSE, found=0.0, characters=(10, 1000), cut_off=(0.0, 90.0)).outcome == "roll back"
