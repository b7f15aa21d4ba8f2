"""From judgments to a verdict: swapped order, clusters, intervals, and a judge that cannot be trusted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate import graded_difference
from mergegate.tasks.judge.comparison import (
    AnswerStatistics,
    JudgeVerdict,
    Judgment,
    Order,
    Winner,
    answers_verdict,
    settle,
)
from mergegate.tasks.judge.settings import JudgeRule, JudgeSettings

SAID: list[Winner | None] = ["reference", "merge", "tie", None]


def said(prompt: str, turn: int, order: Order, winner: Winner | None, **dimensions: Winner) -> Judgment:
    return Judgment(
        prompt=prompt,
        turn=turn,
        order=order,
        winner=winner,
        dimensions=dimensions,
        reasoning="because",
        reply="{}",
        judge="j",
    )


def both(prompt: str, first: Winner | None, second: Winner | None, turn: int = 0) -> list[Judgment]:
    """Return both judgments of one pair: with the reference first, then with the merge first."""
    return [said(prompt, turn, "reference first", first), said(prompt, turn, "merge first", second)]


def verdict(judgments: Iterable[Judgment], identical: Iterable[tuple[str, int]] = (), **rule: object) -> JudgeVerdict:
    ours, theirs = AnswerStatistics("base", 1000, 1), AnswerStatistics("merge", 1500, 2)
    return answers_verdict("j", ours, theirs, list(judgments), list(identical), JudgeRule.model_validate(rule))


def many(wins: int, ties: int, losses: int) -> list[Judgment]:
    winners: list[Winner] = ["merge"] * wins + ["tie"] * ties + ["reference"] * losses
    return [judgment for n, winner in enumerate(winners) for judgment in both(f"p{n}", winner, winner)]


@pytest.mark.parametrize("first", SAID)
@pytest.mark.parametrize("second", SAID)
def test_a_win_counts_only_in_both_orders(first: Winner | None, second: Winner | None) -> None:
    (pair,) = settle(both("p", first, second))
    survives = first == second and first is not None
    assert pair.winner == (first if survives else "tie")
    assert pair.consistent is survives


def test_rates_lengths_and_the_judges_own_health_are_reported() -> None:
    judgments = [
        *both("won", "merge", "merge"),
        *both("lost", "reference", "reference"),
        *both("biased", "reference", "merge"),  # The judge prefers the first answer.
        *both("unread", "merge", None),
    ]
    found = verdict(judgments, [("equal", 0)])
    assert (found.wins, found.ties, found.losses) == (1, 3, 1)
    assert (found.prompts, found.pairs, found.identical, found.unreadable) == (5, 5, 1, 1)
    assert found.win_rate == 0.5
    assert found.consistency == 0.5  # Four pairs were judged.
    assert found.first_position == 4 / 7
    assert found.length_ratio == 1.5
    assert (found.reference_cut_off, found.merge_cut_off) == (1, 2)


def test_the_interval_is_that_of_graded_scores_over_prompts_not_over_turns() -> None:
    rng = np.random.default_rng(7)
    scores = rng.choice([0.0, 0.5, 1.0], size=(60, 2), p=[0.5, 0.3, 0.2])
    names: dict[float, Winner] = {0.0: "reference", 0.5: "tie", 1.0: "merge"}
    judgments = [
        judgment
        for prompt, turns in enumerate(scores)
        for turn, score in enumerate(turns)
        for judgment in both(str(prompt), names[score], names[score], turn)
    ]
    found = verdict(judgments, confidence=0.9)
    means = scores.mean(axis=1)
    mixed = sorted(range(60), key=lambda prompt: hashlib.sha256(str(prompt).encode()).digest())
    wanted = graded_difference([1 - 2 * means[prompt] for prompt in mixed], 0.9)
    assert found.win_rate == pytest.approx(means.mean())
    assert (found.low, found.high) == pytest.approx(((1 - wanted.high) / 2, (1 - wanted.low) / 2))
    assert found.shortfall == pytest.approx(100 * (0.5 - means.mean()))
    assert found.pairs == 120
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.9, 59) * stats.sem(means), rel=0.2)


def test_equal_answers_do_not_come_last() -> None:
    # Equal answers are ties. Placed last, they would tell bets on the late pairs that nothing more can happen.
    names = [f"p{n}" for n in range(200)]
    tied = [(name, 0) for name in names[100:]]
    lost = [judgment for name in names[:100] for judgment in both(name, "reference", "reference")]
    one = verdict(lost, tied)
    other = verdict([*lost, *(j for name, _ in tied for j in both(name, "reference", "merge"))])
    assert (one.low, one.high) == (other.low, other.high)


def test_a_clear_loss_fails_with_a_reason() -> None:
    found = verdict(many(20, 100, 80))
    assert found.outcome == "fail"
    assert found.reason.startswith("judge: win rate 35.0 % against base [31.")
    assert found.reason.endswith("(limit 47)")
    assert not found.publishable


def test_hundreds_of_ties_pass() -> None:
    found = verdict(many(20, 260, 20))
    assert found.outcome == "pass"
    assert found.prompts_needed is None
    assert found.publishable


def test_too_few_prompts_are_inconclusive_with_the_number_needed() -> None:
    found = verdict(many(9, 60, 11))
    assert found.outcome == "inconclusive"
    assert found.prompts_needed is not None
    assert found.prompts_needed > 80
    assert f"inconclusive after 80 prompts. About {found.prompts_needed:,} would decide it" in found.reason


def test_the_needed_number_of_ties_decides() -> None:
    few = verdict(many(0, 8, 0))
    assert few.outcome == "inconclusive"
    assert few.prompts_needed is not None
    assert verdict(many(0, few.prompts_needed, 0)).outcome == "pass"
    assert verdict(many(0, few.prompts_needed - 1, 0)).outcome == "inconclusive"


@pytest.mark.parametrize(("policy", "publishable"), [("block", False), ("warn", True), ("pass", True)])
def test_the_profile_sets_the_effect_of_an_inconclusive_verdict(policy: str, publishable: bool) -> None:
    assert verdict(many(9, 60, 11), on_inconclusive=policy).publishable is publishable


@pytest.mark.parametrize("rest", [(200, 0, 0), (0, 0, 200)])
def test_a_judge_that_contradicts_itself_decides_nothing(rest: tuple[int, int, int]) -> None:
    biased = [judgment for n in range(100) for judgment in both(f"b{n}", "reference", "merge")]
    found = verdict([*many(*rest), *biased])
    assert found.consistency == pytest.approx(2 / 3)
    assert found.outcome == "inconclusive"
    assert "makes the same choice in both orders for 67 % of the pairs, 70 % are required" in found.reason
    trusted = verdict([*many(*rest), *biased], min_consistency=0.6)
    assert trusted.outcome == ("pass" if rest[0] else "fail")


def test_equal_answers_are_ties_and_do_not_affect_consistency() -> None:
    found = verdict([], [(f"p{n}", 0) for n in range(100)])
    assert (found.outcome, found.win_rate, found.consistency) == ("pass", 0.5, None)


def test_each_dimension_has_its_own_rate() -> None:
    judgments = [
        said("a", 0, "reference first", "merge", clarity="merge", facts="reference"),
        said("a", 0, "merge first", "merge", clarity="merge", facts="merge"),
        said("b", 0, "reference first", "merge", clarity="merge", facts="reference"),
        said("b", 0, "merge first", "merge", clarity="merge", facts="reference"),
    ]
    found = verdict(judgments)
    assert {rate.name: rate.win_rate for rate in found.dimensions} == {"clarity": 1.0, "facts": 0.25}


def test_one_prompt_is_too_few() -> None:
    with pytest.raises(InvalidInput, match="1 prompt"):
        verdict(both("p", "merge", "merge"))


@given(st.lists(st.tuples(st.sampled_from(SAID), st.sampled_from(SAID)), min_size=2, max_size=40))
def test_swapping_the_two_models_mirrors_the_verdict(pairs: list[tuple[Winner | None, Winner | None]]) -> None:
    other: dict[Winner | None, Winner | None] = {"reference": "merge", "merge": "reference", "tie": "tie", None: None}
    ours = verdict(j for n, (first, second) in enumerate(pairs) for j in both(str(n), first, second))
    # The answers also change places.
    theirs = verdict(j for n, (first, second) in enumerate(pairs) for j in both(str(n), other[second], other[first]))
    assert theirs.win_rate == pytest.approx(1 - ours.win_rate)
    assert (theirs.wins, theirs.losses, theirs.consistency) == (ours.losses, ours.wins, ours.consistency)
    assert ours.low <= ours.win_rate <= ours.high
    assert not math.isnan(ours.high)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"url": "localhost:8000"}, "expected an HTTP address"),
        ({"url": "http://me:secret@host/v1"}, "contains credentials"),
        ({"margin": 2}, "must be at least max_shortfall"),
        ({"dimensions": {"verdict": "x"}}, "part of every judgment"),
        ({"dimensions": {}}, "at least 1"),
        ({"modle": "m"}, "not permitted"),
        ({"sample": 1}, "greater than or equal to 2"),
    ],
)
def test_contradictory_settings_are_refused(wrong: dict[str, object], words: str) -> None:
    right: dict[str, object] = {"url": "http://h/v1", "model": "m", "prompts": "p.jsonl", "guarded_by": "base"}
    JudgeSettings.model_validate(right)
    with pytest.raises(ValidationError, match=words):
        JudgeSettings.model_validate(right | wrong)
