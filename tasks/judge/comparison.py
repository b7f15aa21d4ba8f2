"""From judgements to a verdict: how often the merge's answers win, and whether that is enough. Pure decisions.

Every pair of answers is judged in both orders, and a win counts only if it survives the swap; all else is a tie. A
prompt scores 1, 1/2 or 0 (the mean of its turns), prompts are the independent units, and their interval is that of
graded scores (``tasks.gate.graded_difference``). The rule is the gate's (``tasks.gate.regression``), on the points by
which the win rate falls short of even. A judge that contradicts itself too often decides nothing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate import Difference, OnInconclusive, decide_guard, graded_difference, graded_documents_needed
from mergegate.tasks.judge.settings import JudgeRule
from mergegate.tasks.stage import Outcome, Section, Verdict

Order = Literal["reference first", "merge first"]
Winner = Literal["reference", "merge", "tie"]
ORDERS: tuple[Order, ...] = ("reference first", "merge first")
SCORES: Mapping[Winner, float] = {"merge": 1.0, "tie": 0.5, "reference": 0.0}


class Judgment(BaseModel):
    """What the judge said about one pair of answers in one order; a line of ``judgements.jsonl``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str  # its id
    turn: int  # from 0
    order: Order
    winner: Winner | None  # None where the reply states no verdict
    dimensions: Mapping[str, Winner]
    reasoning: str
    reply: str  # as the judge wrote it
    judge: str  # who wrote it, as the server says


class Pair(NamedTuple):
    """One pair of answers after both orders."""

    prompt: str
    turn: int
    winner: Winner
    consistent: bool | None  # None where the answers are equal and nobody was asked


class DimensionRate(BaseModel):
    """How often the merge wins in one dimension of the rubric."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    win_rate: float  # in [0, 1]


class JudgeVerdict(BaseModel):
    """The decision about a merge's answers, with all that led to it. Rates are in [0, 1], points from 0 to 100."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str  # name of the model it is compared with
    judge: str
    prompts: int
    pairs: int  # of answers: one a turn
    identical: int  # pairs of equal answers, which are ties that nobody was asked about
    wins: int  # pairs, after both orders
    ties: int
    losses: int
    win_rate: float  # mean over prompts
    low: float  # its interval at ``confidence``, one-sided each way
    high: float
    shortfall: float  # points below even; negative where the merge is better
    confidence: float
    max_shortfall: float  # points
    margin: float  # points: the upper bound of the shortfall must stay within it to pass
    consistency: float | None  # share of pairs judged alike in both orders; None where none was judged
    min_consistency: float
    first_position: float | None  # share of decided judgements for the answer that came first; 0.5 has no bias
    unreadable: int  # replies that state no verdict
    length_ratio: float | None  # characters of the merge's answers over the reference's
    reference_cut_off: int  # answers that ended at the limit of tokens
    merge_cut_off: int
    dimensions: tuple[DimensionRate, ...]
    outcome: Outcome
    on_inconclusive: OnInconclusive
    reason: str  # a sentence: win rate, interval, limit
    prompts_needed: int | None = None  # that would decide it, if the rate is as seen

    @property
    def publishable(self) -> bool:
        """What the outcome and ``on_inconclusive`` make of it."""
        return self.outcome == "pass" or (self.outcome == "inconclusive" and self.on_inconclusive != "block")

    def as_verdict(self) -> Verdict:
        """The same in the shape of every judgement."""
        return Verdict(
            name="judge",
            outcome=self.outcome,
            publishable=self.publishable,
            reasons=() if self.outcome == "pass" else (self.reason,),
            evidence=self,
            section=Section(title="Judged answers", sentences=(self.reason,)),
        )


class AnswerStatistics(NamedTuple):
    """What the verdict says of one model's answers besides who won."""

    name: str
    characters: int
    cut_off: int


def settle(judgements: Iterable[Judgment], identical: Iterable[tuple[str, int]] = ()) -> tuple[Pair, ...]:
    """Every pair of answers after both orders.

    Args:
        judgements: Of each pair one in either order.
        identical: ``(prompt, turn)`` of pairs that were not judged because both answers are equal.
    """
    by_pair: dict[tuple[str, int], list[Judgment]] = defaultdict(list)
    for judgement in judgements:
        by_pair[judgement.prompt, judgement.turn].append(judgement)
    settled = [
        Pair(prompt, turn, _winner([j.winner for j in both]), _is_consistent([j.winner for j in both]))
        for (prompt, turn), both in by_pair.items()
    ]
    return (*settled, *(Pair(prompt, turn, "tie", None) for prompt, turn in identical))


def answers_verdict(
    judge: str,
    reference: AnswerStatistics,
    merge: AnswerStatistics,
    judgements: Sequence[Judgment],
    identical: Sequence[tuple[str, int]],
    rule: JudgeRule,
) -> JudgeVerdict:
    """The verdict on all judgements of one merge against one reference.

    Raises:
        InvalidInput: when there are too few prompts to say anything.
    """
    pairs = settle(judgements, identical)
    shortfall = _shortfall(pairs, rule.confidence)
    judged = [pair for pair in pairs if pair.consistent is not None]
    consistency = sum(bool(pair.consistent) for pair in judged) / len(judged) if judged else None
    drop, low, high = (100 * value for value in (shortfall.mean, shortfall.low, shortfall.high))
    outcome = decide_guard(drop, low, high, rule.max_shortfall, rule.upper_limit)
    needed = None
    if outcome == "inconclusive":
        distance = drop if drop > rule.max_shortfall else rule.upper_limit - drop
        if distance > 0:
            # Of the lead in [-1, 1], of which the shortfall is half.
            needed = graded_documents_needed(4 * shortfall.variance, 2 * distance / 100, rule.confidence)
    reason = _sentence(reference.name, shortfall, rule, outcome, len({pair.prompt for pair in pairs}), needed)
    if consistency is not None and consistency < rule.min_consistency:
        outcome, needed = "inconclusive", None
        reason = (
            f"judge: agrees with itself on {100 * consistency:.0f} % of the pairs when they are swapped, "
            f"{100 * rule.min_consistency:.0f} % are needed; {reason.removeprefix('judge: ')}, decides nothing"
        )
    decided = [j for j in judgements if j.winner in ("reference", "merge")]
    first = [j for j in decided if (j.winner == "reference") == (j.order == "reference first")]
    return JudgeVerdict(
        reference=reference.name,
        judge=judge,
        prompts=len({pair.prompt for pair in pairs}),
        pairs=len(pairs),
        identical=len(identical),
        wins=sum(pair.winner == "merge" for pair in pairs),
        ties=sum(pair.winner == "tie" for pair in pairs),
        losses=sum(pair.winner == "reference" for pair in pairs),
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
        unreadable=sum(judgement.winner is None for judgement in judgements),
        length_ratio=merge.characters / reference.characters if reference.characters else None,
        reference_cut_off=reference.cut_off,
        merge_cut_off=merge.cut_off,
        dimensions=_dimension_rates(judgements, identical),
        outcome=outcome,
        on_inconclusive=rule.on_inconclusive,
        reason=reason,
        prompts_needed=needed,
    )


def _winner(said: Sequence[Winner | None]) -> Winner:
    """The winner of a pair: whoever wins in both orders."""
    return said[0] if said[0] is not None and _is_consistent(said) else "tie"


def _is_consistent(said: Sequence[Winner | None]) -> bool:
    return len(said) == 2 and said[0] is not None and said[0] == said[1]


def _shortfall(pairs: Sequence[Pair], confidence: float) -> Difference:
    """0.5 minus the win rate, over prompts."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        by_prompt[pair.prompt].append(SCORES[pair.winner])
    if len(by_prompt) < 2:
        raise InvalidInput("judge", found=f"{len(by_prompt)} prompt", expected="2 or more, better hundreds")
    # Losses minus wins, in [-1, 1] like any paired difference of scores; half of it is the shortfall.
    # In an order that has nothing to do with the scores: equal answers stand last, and all of them are ties.
    mixed = sorted(by_prompt, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    lead = [1.0 - 2.0 * sum(by_prompt[prompt]) / len(by_prompt[prompt]) for prompt in mixed]
    found = graded_difference(lead, confidence)
    return Difference(found.mean / 2, found.low / 2, found.high / 2, found.variance / 4)


def _dimension_rates(judgements: Sequence[Judgment], identical: Sequence[tuple[str, int]]) -> tuple[DimensionRate, ...]:
    """Win rates over pairs, with the rule of the whole: a win in both orders."""
    said: dict[str, dict[tuple[str, int], list[Winner | None]]] = defaultdict(lambda: defaultdict(list))
    for judgement in judgements:
        for name, winner in judgement.dimensions.items():
            said[name][judgement.prompt, judgement.turn].append(winner)
    rates = []
    for name, by_pair in said.items():
        scores = [SCORES[_winner(winners)] for winners in by_pair.values()] + [0.5] * len(identical)
        rates.append(DimensionRate(name=name, win_rate=sum(scores) / len(scores)))
    return tuple(rates)


def _sentence(
    reference: str, shortfall: Difference, rule: JudgeRule, outcome: Outcome, prompts: int, needed: int | None
) -> str:
    rate, low, high = (100 * (0.5 - value) for value in (shortfall.mean, shortfall.high, shortfall.low))
    lowest = 50 - rule.max_shortfall
    # 46.96 is below a limit of 47, and must be seen to be.
    digits = next((d for d in (1, 2) if (round(rate, d) < lowest) == (rate < lowest)), 3)
    interval = f"[{max(0.0, low):.{digits}f}, {min(100.0, high):.{digits}f}]"
    sentence = f"judge: win rate {rate:.{digits}f} % against {reference} {interval}, limit {lowest:g}"
    if outcome != "inconclusive":
        return sentence
    would = f"; about {needed:,} would decide it" if needed else ""
    return f"{sentence}: undecided after {prompts:,} prompts{would}"
