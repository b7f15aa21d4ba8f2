"""The verdict: the kill switch takes precedence over the evidence, and an inconsistent judge promotes no candidate."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from watched_project import rows

from mergegate.tasks.shadow import ArmRow, ShadowSettings, ShadowVerdict, shadow_verdict

SERVER = {"url": "http://127.0.0.1:9/v1"}
SETTINGS = ShadowSettings.model_validate(
    {"parent": SERVER, "candidate": SERVER, "judge": {"model": "judge", **SERVER}, "rule": {"minimum_pairs": 50}}
)
WELL, FAILS = rows(0.0, 250), rows(0.0, 250, failing=0.2)


def verdict(
    scores: Sequence[float], consistency: float | None = 1.0, traffic: Sequence[ArmRow] = WELL
) -> ShadowVerdict:
    return shadow_verdict("v1", scores, consistency, traffic, 30.0, SETTINGS)


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
