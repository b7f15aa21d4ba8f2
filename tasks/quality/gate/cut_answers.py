"""Judge a guard by how the generated answers of both models ended.

An answer that reached its token budget is cut off. Its score measures the budget, not the model. Each guard, and the
mean of a suite, is therefore decided three times: as measured, with all cut-off answers counted for the merge, and with
all of them counted against it. If the three outcomes differ, the outcome is inconclusive, and mergegate generates the
cut-off answers again with twice the budget. Complete answers lie between the two extreme cases. A merge that passes
in the worst case therefore also passes with complete answers, and generating answers again adds no error.

An answer that is cut off at the largest budget never ends. No one who runs the model gets it, so it counts as measured.

Two findings do not depend on the scores: a merge fails if its answers are much longer than those of the reference, or
if it has many more answers that never end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.evaluation import DocumentScore
from mergegate.tasks.quality.gate.evidence import GuardEvidence
from mergegate.tasks.quality.gate.statistics import binary_difference
from mergegate.tasks.quality.gate.verdicts import (
    UNSAFE,
    AnswerLengths,
    CutAnswers,
    GateFinding,
    GuardAnswers,
    GuardVerdict,
    passing_bound,
)

REPORTED_RATIO = 1.5  # Ratio of answer lengths from which a verdict mentions it.


def summarize_answers(evidence: GuardEvidence, confidence: float) -> GuardAnswers | None:
    """Return how the answers of both models ended; None if no answer was generated or no end is known.

    ``confidence`` is that of the lower bound of the length ratio, at the current look.
    """
    if not any(any(row.ended) for pair in evidence.rows for row in pair):
        return None
    limit = evidence.answer_limit
    sides = tuple(_lengths([pair[side] for pair in evidence.rows], limit) for side in (0, 1))
    rows = [row for pair in evidence.rows for row in pair]
    ratio, ratio_low = _length_ratio(evidence, confidence)
    return GuardAnswers(
        reference=sides[0],
        merge=sides[1],
        budgets=tuple(sorted({row.budgets[-1] for row in rows if row.is_cut_off and row.budgets})),
        extensible=count_extensible([evidence]),
        length_ratio=ratio,
        length_ratio_low=ratio_low,
    )


def count_extensible(guard_evidence: Iterable[GuardEvidence]) -> int:
    """Return the number of cut-off answers that may be generated again with a larger budget."""
    return sum(
        row.next_budget(evidence.answer_limit) is not None
        for evidence in guard_evidence
        for pair in evidence.rows
        for row in pair
    )


def _lengths(rows: Sequence[DocumentScore], limit: int | None) -> AnswerLengths:
    endless = sum(row.never_ends(limit) for row in rows)
    tokens = [row.tokens for row in rows if row.tokens is not None]
    return AnswerLengths(
        cut_off=sum(row.is_cut_off for row in rows) - endless,
        endless=endless,
        regenerated=sum(len(row.budgets) > 1 for row in rows),
        largest_budget=max((row.budgets[-1] for row in rows if len(row.budgets) > 1), default=None),
        mean_tokens=sum(tokens) / len(tokens) if tokens else None,
    )


def _length_ratio(evidence: GuardEvidence, confidence: float) -> tuple[float | None, float | None]:
    """Return the ratio of ``length_ratio`` with its bound, over documents that both models answer completely."""
    pairs = [
        [row.tokens for row in pair]
        for pair in evidence.rows
        if all(row.ended and not row.is_cut_off and row.tokens is not None for row in pair)
    ]
    if len(pairs) < 2:
        return None, None
    lengths = np.asarray(pairs, dtype=np.float64)
    if not lengths[:, 0].any():
        return None, None
    ratio, low = length_ratio(lengths[:, 0], lengths[:, 1], confidence)
    return float(ratio), float(low)


def length_ratio(
    reference: NDArray[np.float64], merge: NDArray[np.float64], confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean length of the merge's answers divided by that of the reference's, and its lower bound.

    The bound is Fieller's for paired samples (1954, J. R. Stat. Soc. B 16:175). It is 0 if the mean length of the
    reference is not shown to be above 0.

    Args:
        reference: Lengths in tokens, ``[..., documents]``, at least 2 documents.
        merge: Lengths of the same documents.
        confidence: One-sided confidence of the bound.
    """
    from scipy.special import stdtrit

    n = reference.shape[-1]
    means = reference.mean(-1), merge.mean(-1)
    deviations = reference - means[0][..., None], merge - means[1][..., None]
    # A ratio r is refuted if merge - r * reference exceeds its error by the quantile. The bound is the smaller root of
    # (merge - r * reference)^2 = quantile^2 * (variance of merge - 2 r * covariance + r^2 * variance of reference).
    square = float(stdtrit(n - 1, confidence)) ** 2 / (n * (n - 1))
    a = means[0] ** 2 - square * (deviations[0] ** 2).sum(-1)
    b = means[0] * means[1] - square * (deviations[0] * deviations[1]).sum(-1)
    c = means[1] ** 2 - square * (deviations[1] ** 2).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(a > 0, (b - np.sqrt(np.maximum(b * b - a * c, 0.0))) / a, 0.0)
        return means[1] / means[0], np.maximum(low, 0.0)


def answer_cases(guard_evidence: Sequence[GuardEvidence]) -> list[Sequence[GuardEvidence]]:
    """Return the evidence as measured and, if cut-off answers may change it, in the best and the worst case."""
    best, worst = (
        [evidence.counting_cut_answers(for_merge=for_merge) for evidence in guard_evidence]
        for for_merge in (True, False)
    )
    is_certain = all(a is b is c for a, b, c in zip(guard_evidence, best, worst, strict=True))
    return [guard_evidence] if is_certain else [guard_evidence, best, worst]


def compare_cases(cases: Sequence[GuardEvidence], outcomes: Sequence[Outcome]) -> CutAnswers | None:
    """Return the range of a guard's drop over all ways to count cut-off answers; None if there is only one.

    ``cases`` are those of ``answer_cases``, and ``outcomes`` their outcomes.
    """
    if len(cases) == 1:
        return None
    low, high = (100 * math.fsum(case.differences) / len(case.differences) for case in cases[1:])
    if low == high:
        return None
    return CutAnswers(lowest_drop=low, highest_drop=high, decide=len(set(outcomes)) > 1)


def check_cut_answers(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterable[GateFinding]:
    """Yield a finding if the outcome depends on answers that were cut off."""
    answers, cut = verdict.answers, verdict.cut_answers
    if answers is not None and cut is not None and cut.decide:
        n = len(evidence.rows)
        setting, limit = passing_bound(verdict)
        reason = (
            f"{UNSAFE}: {evidence.guard.task}: {100 * answers.reference.cut_off / n:.1f} % of the answers of "
            f"{evidence.reference} and {100 * answers.merge.cut_off / n:.1f} % of those of the merge were cut off"
            f"{describe_budgets(answers.budgets)}. {cut.describe()}; the {setting} is {limit:g}. "
            f"{describe_remedy(answers.extensible, evidence.answer_limit)}"
        )
        yield GateFinding(kind="cut-off answers", outcome="inconclusive", reason=reason)


def describe_budgets(budgets: tuple[int, ...]) -> str:
    """Return `` at 40 to 80 tokens``, or an empty text if no budget is known."""
    return (
        f" at {' to '.join(f'{each:,}' for each in dict.fromkeys(budgets[:1] + budgets[-1:]))} tokens"
        if budgets
        else ""
    )


def describe_remedy(extensible: int, limit: int | None) -> str:
    """Return what would decide a verdict that depends on cut-off answers. A larger budget may extend some of them."""
    if extensible:
        return "Longer answers would decide"
    if limit is not None:
        return f"evaluate.max_answer_tokens above {limit:,} would decide"
    return "A larger max_gen_toks would decide"


def check_lengths(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterable[GateFinding]:
    """Yield findings about answers of the merge that are much longer than those of the reference, or never end."""
    answers, limit, task = verdict.answers, evidence.max_length_ratio, evidence.guard.task
    if answers is None:
        return
    if answers.length_ratio is not None and answers.length_ratio >= min(REPORTED_RATIO, limit):
        sentence = (
            f"{task}: answers of the merge are {answers.length_ratio:.1f} times as long as those of "
            f"{evidence.reference}"
        )
        if answers.length_ratio <= limit:
            yield GateFinding(kind="answer length", outcome="pass", reason=f"{sentence} (max_length_ratio {limit:g})")
        elif answers.length_ratio_low is not None and answers.length_ratio_low > limit:
            reason = f"{sentence}, which exceeds max_length_ratio {limit:g}"
            yield GateFinding(kind="answer length", outcome="fail", reason=reason)
        else:
            reason = f"{sentence}. More documents would show whether this exceeds max_length_ratio {limit:g}"
            yield GateFinding(kind="answer length", outcome="inconclusive", reason=reason)
    ends = [tuple(row.never_ends(evidence.answer_limit) for row in pair) for pair in evidence.rows]
    if not any(map(any, ends)):
        return
    n = len(ends)
    sentence = (
        f"{task}: {answers.reference.endless:,} of {n:,} answers of {evidence.reference} and "
        f"{answers.merge.endless:,} of the merge never end"
    )
    more, fewer = sum(m and not r for r, m in ends), sum(r and not m for r, m in ends)
    confidence = evidence.look(verdict.alarm_confidence or verdict.confidence).confidence
    interval = binary_difference(more, fewer, n, confidence)
    mean, low, high = (100 * value for value in interval[:3])
    max_drop = evidence.guard.max_drop
    if low > max_drop:
        reason = f"{sentence}. {mean:.1f} points more [{low:.1f}, {high:.1f}] exceed max_drop {max_drop:g}"
        yield GateFinding(kind="endless answers", outcome="fail", reason=reason)
    else:
        yield GateFinding(kind="endless answers", outcome="pass", reason=f"{sentence}. They count as measured")
