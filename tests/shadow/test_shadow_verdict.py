"""The verdict: the kill switch takes precedence over the evidence, and an inconsistent judge promotes no candidate."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from watched_project import rows

from mergegate.tasks.shadow import ArmRow, ShadowRule, ShadowVerdict, SwitchRule, shadow_verdict

RULE = ShadowRule(minimum_pairs=50)
WELL, FAILS = rows(0.0, 250), rows(0.0, 250, failing=0.2)


def verdict(
    scores: Sequence[float], consistency: float | None = 1.0, traffic: Sequence[ArmRow] = WELL
) -> ShadowVerdict:
    return shadow_verdict("v1", scores, consistency, traffic, 30.0, RULE, SwitchRule())


BETTER, WORSE, TIES = [1.0, 0.5] * 100, [0.0, 0.5] * 100, [0.5] * 2000


@pytest.mark.parametrize(
    ("found", "outcome", "as_all_others"),
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
def test_what_follows(found: ShadowVerdict, outcome: str, as_all_others: str) -> None:
    said = found.as_verdict()
    assert (found.outcome, said.outcome, said.publishable) == (outcome, as_all_others, outcome == "promote")
    assert said.reasons == (() if outcome == "promote" else (found.reason,))
    assert said.evidence == found
