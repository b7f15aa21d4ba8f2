"""Turn judgments into a verdict: how often the merge's answers win, and whether this is enough. All functions are pure.

The judge sees every pair of answers in both orders. A win counts only if the judge decides the same in both; all
other pairs are ties. A prompt scores 1, 1/2 or 0 (the mean of its turns). Prompts are the independent units, with the
interval for graded scores (``gate.graded_difference``). The rule is the gate's (``gate.regression``),
applied to the points by which the win rate falls short of even. The verdict is inconclusive if the judge contradicts
itself too often. Limits on the length of the answers and on the share that the token limit cuts off hold whatever the
judge prefers.

The judge finds a control pair if it prefers the intact answer in both orders. The verdict is inconclusive unless the
share of controls that it finds is shown to be above a limit (assay sensitivity; ICH E10, 2000, section 1.5). The
default limit is one quarter, which coin tosses would find. No judge finds all controls, because damage hardly matters
in a bad answer. Controls do not count in the win rate.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import Outcome, Section, Verdict, severity
from mergegate.tasks.quality.gate import (
    Difference,
    OnInconclusive,
    decide_guard,
    graded_difference,
    graded_documents_needed,
    share_bounds,
)
from mergegate.tasks.quality.judge.answers import AnswerSummary
from mergegate.tasks.quality.judge.settings import JudgeRule

Order = Literal["reference first", "merge first"]
Winner = Literal["reference", "merge", "tie"]
ORDERS: tuple[Order, ...] = ("reference first", "merge first")
SCORES: Mapping[Winner, float] = {"merge": 1.0, "tie": 0.5, "reference": 0.0}


class JudgmentKey(NamedTuple):
    """Identity of a judgment in a run."""

    prompt: str  # ID of the prompt.
    turn: int
    order: Order
    control: str = ""


class Judgment(BaseModel):
    """The judge's decision on one pair of answers in one order, which is a line of ``judgements.jsonl``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str  # ID of the prompt.
    turn: int  # From 0.
    order: Order
    winner: Winner | None  # None if the reply does not state a verdict.
    dimensions: Mapping[str, Winner]
    reasoning: str
    reply: str  # Reply in the judge's own words.
    judge: str  # Name of the judge, as reported by the server.
    # Author and damage of a control pair, in which the reference is intact and the merge is damaged. Empty for others.
    control: str = ""

    @property
    def key(self) -> JudgmentKey:
        return JudgmentKey(self.prompt, self.turn, self.order, self.control)


class Pair(NamedTuple):
    """One pair of answers, with the winner after both orders."""

    prompt: str
    turn: int
    winner: Winner
    consistent: bool | None  # None if the answers are equal and were not judged.


class DimensionRate(BaseModel):
    """Win rate of the merge in one dimension of the rubric."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    win_rate: float  # In [0, 1].


class ControlResult(BaseModel):
    """Share of the control pairs that the judge found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pairs: int
    found: int  # Pairs in which it preferred the intact answer in both orders.
    low: float  # One-sided lower bound of the share.
    min_share: float  # The judge decides only if ``low`` is above this.

    @property
    def passed(self) -> bool:
        """Whether the judge is shown to tell good answers from bad ones."""
        return self.low > self.min_share

    def describe(self) -> str:
        """Return ``the judge found 12 of 40 control pairs (at least 18 %, more than 25 % is required)``."""
        if not self.pairs:
            return "no control pair shows that the judge can tell a good answer from a damaged copy of it"
        return (
            f"the judge found {self.found:,} of {self.pairs:,} control pairs (at least {100 * self.low:.0f} %, more "
            f"than {100 * self.min_share:g} % is required)"
        )


class JudgeVerdict(BaseModel):
    """Decision about a merge's answers, with all its evidence. Rates are in [0, 1], points from 0 to 100."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str  # Name of the reference model.
    judge: str
    prompts: int
    pairs: int  # Pairs of answers, one per turn.
    identical: int  # Pairs of equal answers, which count as ties without being judged.
    wins: int  # Pairs that the merge wins, after both orders.
    ties: int
    losses: int
    win_rate: float  # Mean over prompts.
    low: float  # Interval at ``confidence``, one-sided in each direction.
    high: float
    shortfall: float  # Points below even; negative if the merge is better.
    confidence: float
    max_shortfall: float  # Points.
    margin: float  # Largest upper bound of the shortfall that passes, in points.
    consistency: float | None  # Share of pairs with the same choice in both orders; None if no pair was judged.
    min_consistency: float
    first_position: float | None  # Share of decided judgments in favor of the first answer; 0.5 means no bias.
    unreadable: int  # Replies that do not state a verdict.
    length_ratio: float | None  # Characters of the merge's answers divided by the reference's.
    answers: int  # Answers of each model, one per turn.
    reference_cut_off: int  # Answers that ended at the token limit.
    merge_cut_off: int
    dimensions: tuple[DimensionRate, ...]
    outcome: Outcome
    on_inconclusive: OnInconclusive
    reason: str  # Sentence with win rate, interval and limit.
    prompts_needed: int | None = None  # Prompts that would decide, if the rate is as observed.
    controls: ControlResult | None = None  # None if no pair was judged.

    @property
    def publishable(self) -> bool:
        return self.outcome == "pass" or (self.outcome == "inconclusive" and self.on_inconclusive != "block")

    def as_verdict(self) -> Verdict:
        return Verdict(
            name="judge",
            outcome=self.outcome,
            publishable=self.publishable,
            reasons=() if self.outcome == "pass" else (self.reason,),
            evidence=self,
            section=Section(title="Judged answers", sentences=(self.reason,)),
        )


def settle(judgments: Iterable[Judgment], identical: Iterable[tuple[str, int]] = ()) -> tuple[Pair, ...]:
    """Combine the judgments in both orders into one result for each pair of answers.

    ``identical`` holds ``(prompt, turn)`` of the pairs that were not judged because both answers are equal.
    """
    by_pair: dict[tuple[str, int], list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        if not judgment.control:
            by_pair[judgment.prompt, judgment.turn].append(judgment)
    settled = [
        Pair(prompt, turn, _winner([j.winner for j in both]), _is_consistent([j.winner for j in both]))
        for (prompt, turn), both in by_pair.items()
    ]
    return (*settled, *(Pair(prompt, turn, "tie", None) for prompt, turn in identical))


def controls_found(judgments: Iterable[Judgment]) -> tuple[bool, ...]:
    """Return for each control that was judged in both orders whether the judge preferred the intact answer in both."""
    winners: dict[tuple[str, int, str], list[Winner | None]] = defaultdict(list)
    for judgment in judgments:
        if judgment.control:
            winners[judgment.prompt, judgment.turn, judgment.control].append(judgment.winner)
    return tuple(_winner(both) == "reference" for both in winners.values() if len(both) == len(ORDERS))


def control_result(hits: Sequence[bool], confidence: float, min_share: float) -> ControlResult:
    """Return the share of controls that were found, with its exact bound.

    ``hits`` says for each control whether the judge preferred the intact answer in both orders. ``confidence`` is that
    of the lower bound, in (0, 1).
    """
    low, _ = share_bounds(sum(hits), len(hits), confidence)
    return ControlResult(pairs=len(hits), found=sum(hits), low=low, min_share=min_share)


def answers_verdict(
    judge: str,
    reference: AnswerSummary,
    merge: AnswerSummary,
    judgments: Sequence[Judgment],
    identical: Sequence[tuple[str, int]],
    rule: JudgeRule,
) -> JudgeVerdict:
    """Return the verdict on all judgments of one merge against one reference, including those of control pairs.

    For ``identical``, see ``settle``.
    """
    controls = control_result(controls_found(judgments), rule.confidence, rule.min_controls_found)
    judgments = [judgment for judgment in judgments if not judgment.control]
    pairs = settle(judgments, identical)
    winners = Counter(pair.winner for pair in pairs)
    shortfall = _shortfall(pairs, rule.confidence)
    judged = [pair for pair in pairs if pair.consistent is not None]
    consistency = sum(bool(pair.consistent) for pair in judged) / len(judged) if judged else None
    drop, low, high = (100 * value for value in (shortfall.mean, shortfall.low, shortfall.high))
    outcome = decide_guard(drop, low, high, rule.max_shortfall, rule.upper_limit)
    needed = None
    if outcome == "inconclusive":
        distance = drop if drop > rule.max_shortfall else rule.upper_limit - drop
        if distance > 0:
            # The lead is in [-1, 1], and the shortfall is half of it.
            needed = graded_documents_needed(4 * shortfall.variance, 2 * distance / 100, rule.confidence)
    reason = _sentence(reference.model, shortfall, rule, outcome, len({pair.prompt for pair in pairs}), needed)
    if consistency is not None and consistency < rule.min_consistency:
        outcome, needed = "inconclusive", None
        reason = (
            f"judge: makes the same choice in both orders for {100 * consistency:.0f} % of the pairs, "
            f"{100 * rule.min_consistency:.0f} % are required; {reason.removeprefix('judge: ')}, is not a verdict"
        )
    elif judged and not controls.passed:
        outcome, needed = "inconclusive", None
        reason = f"judge: {controls.describe()}; {reason.removeprefix('judge: ')}, is not a verdict"
    length_ratio = merge.characters / reference.characters if reference.characters else None
    if problem := _answer_problem(reference, merge, length_ratio, rule):
        found_outcome, sentence = problem
        if severity(found_outcome) > severity(outcome):
            outcome, reason, needed = found_outcome, sentence, None
    decided = [j for j in judgments if j.winner in ("reference", "merge")]
    first = [j for j in decided if (j.winner == "reference") == (j.order == "reference first")]
    # Win rates by dimension, over pairs, by the same rule as the verdict: a win in both orders.
    winners_by_dimension: dict[str, dict[tuple[str, int], list[Winner | None]]] = defaultdict(lambda: defaultdict(list))
    for judgment in judgments:
        for name, winner in judgment.dimensions.items():
            winners_by_dimension[name][judgment.prompt, judgment.turn].append(winner)
    rates = []
    for name, by_pair in winners_by_dimension.items():
        scores = [SCORES[_winner(both)] for both in by_pair.values()] + [0.5] * len(identical)
        rates.append(DimensionRate(name=name, win_rate=sum(scores) / len(scores)))
    return JudgeVerdict(
        reference=reference.model,
        judge=judge,
        prompts=len({pair.prompt for pair in pairs}),
        pairs=len(pairs),
        identical=len(identical),
        wins=winners["merge"],
        ties=winners["tie"],
        losses=winners["reference"],
        win_rate=0.5 - shortfall.mean,
        low=max(0.0, 0.5 - shortfall.high),
        high=min(1.0, 0.5 - shortfall.low),
        shortfall=drop,
        confidence=rule.confidence,
        max_shortfall=rule.max_shortfall,
        margin=rule.upper_limit,
        consistency=consistency,
        min_consistency=rule.min_consistency,
        first_position=len(first) / len(decided) if decided else None,
        unreadable=sum(judgment.winner is None for judgment in judgments),
        length_ratio=length_ratio,
        answers=merge.answers,
        reference_cut_off=reference.cut_off,
        merge_cut_off=merge.cut_off,
        dimensions=tuple(rates),
        outcome=outcome,
        on_inconclusive=rule.on_inconclusive,
        reason=reason,
        prompts_needed=needed,
        controls=controls if judged else None,
    )


def _answer_problem(
    reference: AnswerSummary, merge: AnswerSummary, length_ratio: float | None, rule: JudgeRule
) -> tuple[Outcome, str] | None:
    """Return why lengths and ends of the answers rule out a pass, whatever the judge prefers, or None."""
    if rule.max_length_ratio is not None and length_ratio is not None and length_ratio > rule.max_length_ratio:
        return "fail", (
            f"judge: the merge's answers are {length_ratio:.1f} times as long as those of {reference.model}; "
            f"max_length_ratio is {rule.max_length_ratio:g}"
        )
    excess = merge.cut_off_percent - reference.cut_off_percent
    most = max(merge.cut_off_percent, reference.cut_off_percent)
    if most <= rule.max_cut_off:
        return None
    return "fail" if excess > rule.max_cut_off else "inconclusive", (
        f"judge: the token limit cuts off {merge.cut_off_percent:.1f} % of the merge's answers and "
        f"{reference.cut_off_percent:.1f} % of those of {reference.model}; max_cut_off is {rule.max_cut_off:g} %. "
        "Raise max_new_tokens to compare complete answers"
    )


def _winner(winners: Sequence[Winner | None]) -> Winner:
    return winners[0] if winners[0] is not None and _is_consistent(winners) else "tie"


def _is_consistent(winners: Sequence[Winner | None]) -> bool:
    return len(winners) == 2 and winners[0] is not None and winners[0] == winners[1]


def _shortfall(pairs: Sequence[Pair], confidence: float) -> Difference:
    """Return 0.5 minus the win rate, over prompts."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        by_prompt[pair.prompt].append(SCORES[pair.winner])
    if len(by_prompt) < 2:
        raise InvalidInput("judge", found=f"{len(by_prompt)} prompt", expected="at least 2, preferably hundreds")
    # Losses minus wins, in [-1, 1] like any paired difference of scores. The shortfall is half of it.
    # The order must be independent of the scores, and equal answers come last and are all ties, so shuffle by hash.
    shuffled = sorted(by_prompt, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    lead = [1.0 - 2.0 * sum(by_prompt[prompt]) / len(by_prompt[prompt]) for prompt in shuffled]
    difference = graded_difference(lead, confidence)
    return Difference(difference.mean / 2, difference.low / 2, difference.high / 2, difference.variance / 4)


def _sentence(
    reference: str, shortfall: Difference, rule: JudgeRule, outcome: Outcome, prompts: int, prompts_needed: int | None
) -> str:
    rate, low, high = (100 * (0.5 - value) for value in (shortfall.mean, shortfall.high, shortfall.low))
    lowest = 50 - rule.max_shortfall
    # A rate of 46.96 is below a limit of 47, so show enough digits to make this visible.
    digits = next((d for d in (1, 2) if (round(rate, d) < lowest) == (rate < lowest)), 3)
    interval = f"[{max(0.0, low):.{digits}f}, {min(100.0, high):.{digits}f}]"
    sentence = f"judge: win rate {rate:.{digits}f} % against {reference} {interval} (limit {lowest:g})"
    if outcome != "inconclusive":
        return sentence
    hint = f". About {prompts_needed:,} would decide it" if prompts_needed else ""
    return f"{sentence}: inconclusive after {prompts:,} prompts{hint}"
