"""Judge a guard by how the generated answers of both models ended.

An answer that reached its token budget is cut off. Its score measures the budget, not the model. Each guard, and the
mean of a suite, is therefore decided three times: as measured, with all cut-off answers counted for the merge, and with
all of them counted against it. If the three outcomes differ, the outcome is inconclusive, and mergegate generates the
cut-off answers again with twice the budget. Complete answers lie between the two extreme cases. A merge that passes
in the worst case therefore also passes with complete answers, and generating answers again adds no error.

An answer that is cut off at the largest budget never ends. No one who runs the model gets it, so it counts as measured.

Two findings do not depend on the scores. The answers of the merge must not be much longer than those of the reference,
and the merge must not have many more answers that never end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mergegate.tasks.evaluation import DocumentScore
from mergegate.tasks.gate.evidence import (
    AnswerLengths,
    CutAnswers,
    GateFinding,
    GuardAnswers,
    GuardEvidence,
    GuardVerdict,
)
from mergegate.tasks.gate.sentences import UNSAFE
from mergegate.tasks.gate.statistics import binary_difference
from mergegate.tasks.stage import Outcome

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
    tokens = [
        sum(filter(None, row.answer_tokens)) for row in rows if row.answer_tokens and None not in row.answer_tokens
    ]
    return AnswerLengths(
        cut_off=sum(row.is_cut_off for row in rows) - endless,
        endless=endless,
        regenerated=sum(len(row.budgets) > 1 for row in rows),
        largest_budget=max((row.budgets[-1] for row in rows if len(row.budgets) > 1), default=None),
        mean_tokens=sum(tokens) / len(tokens) if tokens else None,
    )


def _length_ratio(evidence: GuardEvidence, confidence: float) -> tuple[float | None, float | None]:
    """Return the mean length of the merge's answers divided by that of the reference's, and its lower bound.

    Only documents count that both models answer completely. The bound is Fieller's (1954, J. R. Stat. Soc. B 16:175).
    """
    from scipy.special import stdtrit

    pairs = [
        tuple(float(sum(filter(None, row.answer_tokens))) for row in pair)
        for pair in evidence.rows
        if all(row.ended and not row.is_cut_off and None not in row.answer_tokens for row in pair)
    ]
    n = len(pairs)
    if n < 2 or not (reference := sum(pair[0] for pair in pairs) / n):
        return None, None
    merge = sum(pair[1] for pair in pairs) / n
    reference_variance, merge_variance, covariance = (
        sum((pair[a] - means[a]) * (pair[b] - means[b]) for pair in pairs) / (n - 1) / n
        for a, b in ((0, 0), (1, 1), (0, 1))
        for means in [(reference, merge)]
    )
    # The ratio r is refuted if merge - r * reference exceeds its error by the quantile: the smaller root of
    # (merge - r * reference)^2 = quantile^2 * (merge_variance - 2 r covariance + r^2 reference_variance).
    square = float(stdtrit(n - 1, confidence)) ** 2
    a = reference**2 - square * reference_variance
    b = merge * reference - square * covariance
    c = merge**2 - square * merge_variance
    root = b * b - a * c
    low = (b - math.sqrt(root)) / a if a > 0 and root >= 0 else 0.0
    return merge / reference, max(0.0, low)


def answer_cases(guard_evidence: Sequence[GuardEvidence]) -> list[Sequence[GuardEvidence]]:
    """Return the evidence as measured and, if cut-off answers may change it, in the best and the worst case."""
    best, worst = (
        [evidence.counting_cut_answers(for_merge=for_merge) for evidence in guard_evidence]
        for for_merge in (True, False)
    )
    is_certain = all(a is b is c for a, b, c in zip(guard_evidence, best, worst, strict=True))
    return [guard_evidence] if is_certain else [guard_evidence, best, worst]


def common_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of all cases, or inconclusive if they differ."""
    return outcomes[0] if len(set(outcomes)) == 1 else "inconclusive"


def compare_cases(evidence: GuardEvidence, outcomes: Sequence[Outcome]) -> CutAnswers | None:
    """Return the range of a guard's drop over all ways to count cut-off answers; None if there is only one.

    ``outcomes`` are those of the cases.
    """
    low, high = (
        100 * math.fsum(evidence.counting_cut_answers(for_merge=for_merge).differences) / len(evidence.differences)
        for for_merge in (True, False)
    )
    if low == high:
        return None
    return CutAnswers(lowest_drop=low, highest_drop=high, decide=len(set(outcomes)) > 1)


def check_cut_answers(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterable[GateFinding]:
    """Yield a finding if the outcome depends on answers that were cut off."""
    answers, cut = verdict.answers, verdict.cut_answers
    if answers is not None and cut is not None and cut.decide:
        n = len(evidence.rows)
        bound = f"the margin is {verdict.margin:g}"
        if verdict.limit is not None:
            bound = f"the per-task limit is {verdict.limit:g}"
        reason = (
            f"{UNSAFE}: {evidence.guard.task}: {100 * answers.reference.cut_off / n:.1f} % of the answers of "
            f"{evidence.reference} and {100 * answers.merge.cut_off / n:.1f} % of those of the merge were cut off"
            f"{describe_budgets(answers.budgets)}. {cut.describe()}; {bound}. "
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
    """Return what decides a verdict that depends on cut-off answers, of which ``extensible`` may be longer."""
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
