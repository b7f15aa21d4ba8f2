"""From judgments to a verdict: swapped order, clusters, intervals, and a judge that cannot be trusted."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.gate import graded_difference
from mergegate.tasks.quality.judge.answers import AnswerSummary
from mergegate.tasks.quality.judge.comparison import (
    JudgeVerdict,
    Judgment,
    Order,
    Winner,
    answers_verdict,
    control_result,
    settle,
)
from mergegate.tasks.quality.judge.questions import DAMAGES, MIN_CONTROLS, Damage, damaged_copy
from mergegate.tasks.quality.judge.settings import JudgeRule, JudgeSettings

SAID: list[Winner | None] = ["reference", "merge", "tie", None]


def said(prompt: str, turn: int, order: Order, winner: Winner | None, **dimensions: Winner) -> Judgment:
    pair = {"prompt": prompt, "turn": turn, "order": order, "winner": winner, "dimensions": dimensions}
    return Judgment.model_validate({**pair, "reasoning": "because", "reply": "{}", "judge": "j"})


def both(prompt: str, first: Winner | None, second: Winner | None, turn: int = 0) -> list[Judgment]:
    """Return both judgments of one pair: with the reference first, then with the merge first."""
    return [said(prompt, turn, "reference first", first), said(prompt, turn, "merge first", second)]


def controls(found: int, pairs: int = 20, winner: Winner | None = "tie") -> list[Judgment]:
    """Return the judgments of ``pairs`` control pairs. The judge finds the first ones, the others get ``winner``."""
    return [
        judgment.model_copy(update={"control": "reference, shuffled"})
        for number in range(pairs)
        for judgment in both(f"c{number}", *(("reference",) * 2 if number < found else (winner,) * 2))
    ]


LEAST = JudgeRule().min_controls_found


def answers(model: str, characters: int, cut_off: int) -> AnswerSummary:
    return AnswerSummary(model=model, prompts=100, answers=100, cut_off=cut_off, characters=characters)


BASE, MERGE = answers("base", 1000, 1), answers("merge", 1500, 2)


def verdict(
    judgments: Iterable[Judgment],
    identical: Iterable[tuple[str, int]] = (),
    seen: list[Judgment] | None = None,
    merge: AnswerSummary = MERGE,
    **rule: object,
) -> JudgeVerdict:
    """Return the verdict of a judge that finds all controls, unless ``seen`` has others."""
    together = [*judgments, *(controls(20) if seen is None else seen)]
    return answers_verdict("j", BASE, merge, together, list(identical), JudgeRule.model_validate(rule))


def many(wins: int, ties: int, losses: int) -> list[Judgment]:
    winners: list[Winner] = ["merge"] * wins + ["tie"] * ties + ["reference"] * losses
    return [judgment for n, winner in enumerate(winners) for judgment in both(f"p{n}", winner, winner)]


def test_a_win_counts_only_in_both_orders() -> None:
    for first, second in product(SAID, SAID):
        (pair,) = settle(both("p", first, second))
        survives = first == second and first is not None
        assert (pair.winner, pair.consistent) == (first if survives else "tie", survives)


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


def test_equal_answers_are_ties_and_do_not_affect_consistency() -> None:
    found = verdict([], [(f"p{n}", 0) for n in range(100)])
    assert (found.outcome, found.win_rate, found.consistency) == ("pass", 0.5, None)
    # Equal answers are ties. Placed last, they would tell bets on the late pairs that nothing more can happen.
    names = [f"p{n}" for n in range(200)]
    tied = [(name, 0) for name in names[100:]]
    lost = [judgment for name in names[:100] for judgment in both(name, "reference", "reference")]
    one = verdict(lost, tied)
    other = verdict([*lost, *(j for name, _ in tied for j in both(name, "reference", "merge"))])
    assert (one.low, one.high) == (other.low, other.high)


def test_a_clear_loss_fails_and_hundreds_of_ties_pass() -> None:
    found = verdict(many(20, 100, 80))
    assert (found.outcome, found.publishable) == ("fail", False)
    assert found.reason.startswith("judge: win rate 35.0 % against base [31.")
    assert found.reason.endswith("(limit 47)")
    found = verdict(many(20, 260, 20))
    assert (found.outcome, found.publishable, found.prompts_needed) == ("pass", True, None)


def test_too_few_prompts_are_inconclusive_with_the_number_needed() -> None:
    found = verdict(many(9, 60, 11))
    assert found.outcome == "inconclusive"
    assert found.prompts_needed is not None
    assert found.prompts_needed > 80
    assert f"inconclusive after 80 prompts. About {found.prompts_needed:,} would decide it" in found.reason
    ties = verdict(many(0, 8, 0)).prompts_needed or 0
    outcomes = [verdict(many(0, prompts, 0)).outcome for prompts in (8, ties - 1, ties)]
    assert outcomes == ["inconclusive", "inconclusive", "pass"]
    for policy, publishable in (("block", False), ("warn", True), ("pass", True)):
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


def test_each_dimension_has_its_own_rate() -> None:
    facts: tuple[Winner, ...] = ("reference", "merge", "reference", "reference")
    pairs: list[tuple[str, Order]] = [(name, order) for name in "ab" for order in ("reference first", "merge first")]
    judgments = [
        said(name, 0, order, "merge", clarity="merge", facts=fact)
        for (name, order), fact in zip(pairs, facts, strict=True)
    ]
    found = verdict(judgments)
    assert {rate.name: rate.win_rate for rate in found.dimensions} == {"clarity": 1.0, "facts": 0.25}


def test_one_prompt_is_too_few() -> None:
    with pytest.raises(InvalidInput, match="1 prompt"):
        verdict(both("p", "merge", "merge"))


@pytest.mark.story
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


def test_a_judge_that_calls_everything_a_tie_approves_nothing() -> None:
    found = verdict(many(0, 200, 0), seen=controls(0))
    assert (found.win_rate, found.consistency, found.outcome) == (0.5, 1.0, "inconclusive")
    assert "the judge found 0 of 20 control pairs (at least 0 %, more than 25 % is required)" in found.reason
    assert not found.publishable


def test_controls_are_required_but_do_not_count_in_any_rate() -> None:
    assert verdict(many(150, 30, 20), seen=[]).outcome == "inconclusive"
    assert verdict(many(20, 30, 150), seen=[]).outcome == "inconclusive"
    judgments = many(10, 20, 15)
    with_controls, without = verdict(judgments, seen=controls(20)), verdict(judgments, seen=[])
    different = {"controls", "outcome", "reason", "prompts_needed"}
    assert with_controls.model_dump(exclude=different) == without.model_dump(exclude=different)


@settings(max_examples=40)
@given(st.integers(5, 300), st.data())
def test_the_bound_of_the_controls_is_exact(pairs: int, data: st.DataObject) -> None:
    found = data.draw(st.integers(0, pairs))
    result = control_result([n < found for n in range(pairs)], 0.95, LEAST)
    expected = stats.binomtest(found, pairs, alternative="greater").proportion_ci(0.95, method="exact").low
    assert result.low == pytest.approx(expected)
    assert result.passed == (expected > LEAST)


def test_good_judges_pass_the_controls_and_blind_ones_do_not() -> None:
    rng = np.random.default_rng(1)
    # The share of pairs in which a judge prefers the intact answer in both orders.
    for kind, share, low, high in (("good", 0.9, 0.99, 1.0), ("coin", 0.25, 0.0, 0.05), ("first", 0.0, 0.0, 0.05)):
        passed = [control_result(rng.random(MIN_CONTROLS) < share, 0.95, LEAST).passed for _ in range(800)]
        assert low <= np.mean(passed) <= high, kind


def test_the_documented_chances_to_pass_the_controls_are_exact() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "compare-with-a-judge.md"
    rows = re.findall(r"^\| (\d+) %.* \| ([\d.]+) % \| ([\d.]+) % \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 6
    for share, *chances in rows:
        for pairs, chance in zip((MIN_CONTROLS, 50), chances, strict=True):
            passing = [n for n in range(pairs + 1) if control_result([i < n for i in range(pairs)], 0.95, LEAST).passed]
            assert float(chance) == round(100 * stats.binom.pmf(passing, pairs, int(share) / 100).sum(), 1)


@pytest.mark.parametrize(
    ("merge", "outcome", "reason"),
    [
        (answers("merge", 2001, 0), "fail", "2.0 times as long as those of base; max_length_ratio is 2"),
        (answers("merge", 1000, 7), "fail", "cuts off 7.0 % of the merge's answers and 1.0 % of"),
        (answers("merge", 1000, 6), "inconclusive", "Raise max_new_tokens"),
        (answers("merge", 2000, 5), "pass", "win rate 50.0 %"),
    ],
)
def test_long_and_cut_off_answers_do_not_pass(merge: AnswerSummary, outcome: str, reason: str) -> None:
    found = verdict(many(20, 260, 20), merge=merge)
    assert found.outcome == outcome
    assert reason in found.reason


def test_the_limits_can_be_raised() -> None:
    wordy = answers("merge", 40_000, 75)
    assert verdict(many(20, 260, 20), merge=wordy, max_length_ratio=None, max_cut_off=100).outcome == "pass"
    assert verdict(many(20, 260, 20), merge=wordy).outcome == "fail"


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=400), st.sampled_from(DAMAGES))
def test_a_damaged_copy_differs_loses_content_and_is_reproducible(answer: str, damage: Damage) -> None:
    copy = damaged_copy(answer, damage)
    assert copy == damaged_copy(answer, damage)
    letters = "".join(answer.split())
    if copy is None:
        assert len(letters) < 8 or len(set(answer.split())) <= 1 or len(set(letters)) <= 2 or damage == "shuffled"
    elif damage == "shuffled":
        assert copy != answer
        assert sorted("".join(copy.split())) == sorted(letters)
    else:
        assert 0 < len("".join(copy.split())) < len(letters)
