"""Define the verdicts of the gate, and say in one or two sentences what decided about a drop. Pure functions.

How verdict sentences are built: subject, change, reference, then the bound that decides and the limit that it is
compared with. Only that limit is named::

    pass          gsm8k lost 0.4 points against math and at most 1.1; the margin is 3
    fail          gsm8k lost 4.1 points against math, at least 2.3; max_drop is 2
    inconclusive  Not shown to be safe: gsm8k lost 1.4 points against math and may have lost up to 3.1; the margin is 3.
                  All 1,319 documents of this run are used. About 3,570, or margin: 3.5, would decide

A pass depends on the upper bound, so it names the margin, or with ``rule: suite`` the limit of the task. A failure
depends on ``max_drop``. An inconclusive sentence starts with ``UNSAFE`` and ends with the remedy. No
sentence ends with a period, because callers join sentences.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import Outcome, Section, StageValue, Verdict
from mergegate.tasks.quality.evaluation import TaskData
from mergegate.tasks.quality.gate.sequential import InterimLook

UNSAFE = "Not shown to be safe"  # First words of an inconclusive verdict.
UNTESTED = "untested"  # Kind of the finding with the sentence of ``describe_untested``.

OnInconclusive = Literal["block", "warn", "pass"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GateFinding(_Record):
    """Reason, apart from the interval of the drop, why a guard or a whole merge does not pass."""

    kind: str  # Name of the check, such as 'reference' or 'cut answers'.
    outcome: Outcome  # A ``pass`` is a note that does not affect the verdict.
    reason: str  # Sentence with the task, the numbers and the limit.
    chance_left: float | None = None  # Chance that the remaining documents settle it; None if unknown.


class CutAnswers(_Record):
    """Effect of cut-off answers on a drop: its range if they are counted for the merge, or against it."""

    lowest_drop: float  # Points, with the cut-off answers of the merge right and those of the reference wrong.
    highest_drop: float  # Points, with the cut-off answers of the merge wrong and those of the reference right.
    decide: bool  # Whether the outcome depends on how they are counted.

    def describe(self) -> str:
        """Return a sentence, without a period at the end."""
        return (
            "Depending on how they are counted, the drop is between "
            f"{self.lowest_drop + 0.0:.1f} and {self.highest_drop + 0.0:.1f} points"
        )


class AnswerLengths(_Record):
    """How the generated answers of one model ended, over the documents of a guard."""

    cut_off: int  # Documents with an answer that was cut off and might have ended with a larger budget.
    endless: int  # Documents with an answer that never ends (see ``DocumentScore.never_ends``).
    regenerated: int  # Documents that were answered again with a larger budget.
    largest_budget: int | None  # Largest budget of these answers; None: there are none.
    mean_tokens: float | None  # Mean number of tokens per document; None: unknown.


class GuardAnswers(_Record):
    """Generated answers of both models of a guard."""

    reference: AnswerLengths
    merge: AnswerLengths
    budgets: tuple[int, ...]  # Token budgets that cut off an answer, ascending.
    extensible: int  # Number of cut-off answers that may be generated again with a larger budget.
    # Mean tokens of the merge divided by those of the reference, on documents that both answer completely.
    length_ratio: float | None = None
    length_ratio_low: float | None = None  # Its one-sided lower bound.


class GuardVerdict(_Record):
    """Regression guard with its outcome: the merge against its reference on one task.

    Differences are in points (0 to 100) and positive if the merge is worse.
    """

    task: str
    metric: str  # For a group with several metrics, each once: 'acc,none + exact_match,none'.
    reference: str  # Name of the reference model.
    reference_score: float  # In [0, 1].
    merge_score: float
    n: int  # Number of paired documents.
    lost: int  # Documents that the reference gets right and the merge wrong (graded: the merge scores lower).
    won: int  # Documents that the merge gets right and the reference wrong.
    drop: float  # Points.
    low: float  # Bounds of the drop in points; each holds over all looks with the one-sided ``confidence``.
    high: float
    confidence: float  # For example 0.95.
    max_drop: float  # Points.
    margin: float  # Largest upper bound that passes, in points.
    outcome: Outcome
    reason: str  # Sentence with task, drop, interval and threshold.
    documents_needed: int | None = None  # Documents that would decide if the true drop is as observed; None if unknown.
    detectable_drop: float | None = None  # Smallest true drop that these documents show with power 0.8, in points.
    look: InterimLook | None = None  # Look at which the guard was judged.
    documents_left: int = 0  # Documents that further looks can still add.
    alarm_confidence: float | None = None  # Confidence of the test for failure, corrected for the number of guards.
    candidates: int = 1  # Number of parents among which the reference is the best.
    selection_bias: float = 0.0  # Largest part of the drop, in points, that comes from choosing the best parent.
    clusters: int | None = None  # Number of independent groups of documents; None if each document is independent.
    documents_asked: int | None = None  # Number of evaluated documents. All of them have a score.
    leaf_metrics: dict[str, str] = Field(default_factory=dict)  # Metric by task below the group, where they differ.
    data: TaskData | None = None  # Evaluated data; None for result files of lm-eval itself.
    chance_left: float | None = None  # Chance that the remaining documents decide; None if nothing is left to decide.
    weight: float = 1.0  # Weight of the task in the mean over all tasks.
    limit: float | None = None  # Largest drop of this task in a suite, in points; None with ``rule: each``.
    findings: tuple[GateFinding, ...] = ()  # Results of the checks in ``gate.regression``.
    advisory: bool = False  # Whether this verdict is only shown, and does not count in the verdict on the merge.
    answers: GuardAnswers | None = None  # None: no answer was generated, or their ends are unknown.
    cut_answers: CutAnswers | None = None  # None: no answer was cut off, or its end is certain.
    sample_start: int = 0  # Position in the task's order of documents at which the sample starts.

    @property
    def word(self) -> str:
        """Verdict in a word: ``pass``, ``fail`` or ``inconclusive``; ``advisory: fail`` if the guard is advisory."""
        return f"advisory: {self.outcome}" if self.advisory else self.outcome


class PooledDrop(_Record):
    """Likely drop of a task, estimated from its documents and from the other tasks (see ``pooled_drops``)."""

    task: str
    drop: float  # Points.
    pooled: float  # Points, shrunk toward the mean of the suite.


class SuiteVerdict(_Record):
    """Verdict on the mean drop over all tasks. Differences are in points and positive if the merge is worse."""

    tasks: int
    reference: str  # Name of the reference model, or 'their references' if there are several.
    documents: int
    drop: float  # Weighted mean over tasks.
    low: float  # Bounds of ``drop``; each holds over all looks with the one-sided ``confidence``.
    high: float
    confidence: float
    max_drop: float  # Weighted mean over tasks.
    margin: float
    outcome: Outcome  # Outcome of the mean alone.
    reason: str
    detectable_drop: float  # Smallest true mean drop that these documents show with power 0.8.
    documents_needed: int | None = None  # Documents that would decide if the true drop is as observed; None if unknown.
    chance_left: float | None = None  # Chance that the remaining documents decide; None if nothing is left to decide.
    look: InterimLook | None = None
    pooled: tuple[PooledDrop, ...] = ()
    cut_answers: CutAnswers | None = None  # None: no answer was cut off, or its end is certain.

    @property
    def word(self) -> str:
        """Verdict in a word: ``pass``, ``fail`` or ``inconclusive``."""
        return self.outcome


class StratumDrift(_Record):
    """Perplexity of the merge relative to the reference on the documents of one language or source."""

    name: str
    documents: int
    ratio: float
    low: float  # Lower bound at the confidence that Holm's procedure leaves to this stratum.
    high: float
    failed: bool  # Whether the lower bound exceeds the limit.


class DriftVerdict(_Record):
    """Perplexity of the merge relative to the parent that predicts the same documents best."""

    reference: str  # Name of this parent.
    documents: int  # Number of distinct documents.
    unit: Literal["token", "byte"]  # Bytes if tokenizers differ.
    ratio: float | None  # Geometric mean over documents. None if the merge's likelihood is not finite.
    low: float | None
    high: float | None
    max_ratio: float  # For example 1.05.
    warn_ratio: float  # For example 1.02.
    outcome: Outcome
    broken: bool  # Not finite, or above BROKEN_RATIO: the costly tasks are not worth running.
    warning: bool
    reason: str  # Sentence that decided.
    total_ratio: float | None = None  # Ratio over all tokens of the text, which long documents dominate. Not judged.
    duplicates: int = 0  # Number of documents that were dropped because they repeat another one.
    broken_documents: int = 0
    broken_low: float = 0.0  # Bounds of the share of broken documents, in [0, 1].
    broken_high: float = 1.0
    max_broken_documents: float = 0.01  # Limit on this share.
    strata: tuple[StratumDrift, ...] = ()  # Strata with enough documents, in alphabetical order.
    findings: tuple[GateFinding, ...] = ()  # Broken documents, failed strata and duplicates.

    @property
    def word(self) -> str:
        """Verdict in a word: ``pass``, ``fail`` or ``inconclusive``."""
        return self.outcome


class SkippedGuard(_Record):
    """Guard whose task was not evaluated, because another guard had already failed."""

    task: str
    reference: str  # The guard's ``guarded_by``.
    limit: float  # Limit of this task alone, in points.
    decided_by: str  # Task whose guard failed.
    documents: int  # Number of documents that might have been evaluated; 0 if unknown.

    @property
    def word(self) -> str:
        """Reason why there is no verdict: ``skipped: gsm8k had already failed``."""
        return f"skipped: {self.decided_by} had already failed"


class GateVerdict(StageValue):
    """Decision about a merge, with the verdicts that it is based on."""

    outcome: Outcome  # Most severe outcome of all verdicts.
    publishable: bool  # Whether ``outcome`` and ``on_inconclusive`` allow publication.
    guards: tuple[GuardVerdict, ...]
    drift: DriftVerdict | None
    overall_drop: float | None  # Mean over tasks, in points.
    overall_low: float | None
    overall_high: float | None
    on_inconclusive: OnInconclusive
    reasons: tuple[str, ...]  # Why the merge did not pass, most severe reason first.
    notes: tuple[str, ...] = ()  # Guards against a champion that does not exist yet, one sentence each.
    # Verdict on the mean over all tasks, if it is judged: first without the anchor, then against the anchor only.
    suites: tuple[SuiteVerdict, ...] = ()
    not_run: tuple[SkippedGuard, ...] = ()
    findings: tuple[GateFinding, ...] = ()  # Findings about the whole merge; those about a guard are in ``guards``.
    advisory: tuple[GuardVerdict, ...] = ()  # Advisory guards, which do not affect ``outcome`` or the other fields.

    @property
    def all_guards(self) -> tuple[GuardVerdict, ...]:
        """All guards with a verdict, the advisory ones last."""
        return (*self.guards, *self.advisory)

    @property
    def untested_note(self) -> str:
        """Sentence about what no task tested, such as how the merge reads pictures. Empty if there is nothing."""
        return next((finding.reason for finding in self.findings if finding.kind == UNTESTED), "")

    def summary(self) -> str:
        if not self.publishable:
            return self.reasons[0]
        if self.outcome != "pass":
            return f"{self.outcome}, but publishable: {self.reasons[0]}"
        if self.suites:
            return f"{self.suites[0].tasks} tasks passed"
        if self.guards:
            return "1 guard passed" if len(self.guards) == 1 else f"{len(self.guards)} guards passed"
        return "no drift" if self.drift else "; ".join(self.notes) or "nothing to judge"

    def refuses(self) -> bool:
        return not self.publishable

    def as_verdict(self) -> Verdict:
        """Return this decision in the common form of verdicts."""
        return Verdict(
            name="gate",
            outcome=self.outcome,
            publishable=self.publishable,
            reasons=self.reasons,
            evidence=self,
            section=Section(title="Gate", sentences=self.reasons or (self.summary(),)),
        )


JudgedDrop = GuardVerdict | SuiteVerdict


def passing_bound(verdict: JudgedDrop) -> tuple[str, float]:
    """Return the name of the setting that limits the upper bound of a drop, and the limit in points."""
    if isinstance(verdict, SuiteVerdict):
        return "mean margin", verdict.margin
    return ("margin", verdict.margin) if verdict.limit is None else ("per-task limit", verdict.limit)


def drop_sentence(verdict: JudgedDrop, planned_documents: int, comparisons: int = 1) -> str:
    """Return a verdict by its interval in the form that the module docstring describes.

    Args:
        verdict: Verdict with everything but its reason.
        planned_documents: Number of documents that this run may use.
        comparisons: Number of comparisons of this run, among which a guard may deviate by chance.
    """
    subject, reference, supplement, deviates = _describe_comparison(verdict)
    digits = _digits_of(verdict)
    drop, low, high = (
        f"{round(value, digits) + 0.0:.{digits}f}" for value in (verdict.drop, verdict.low, verdict.high)
    )  # + 0.0 turns -0.0 into 0.0
    gained = drop.startswith("-")
    change = f"gained {drop[1:]} points over" if gained else f"lost {drop} points against"
    change = f"{subject} {change} {reference}"
    setting, limit = passing_bound(verdict)
    max_drop, bound = f"max_drop is {verdict.max_drop:.4g}", f"the {setting} is {limit:.4g}"
    documents = _documents_of(verdict)
    early = f", after {documents:,} of {planned_documents:,} documents" if documents < planned_documents else ""
    if verdict.outcome == "fail":
        # A drop may exceed max_drop although its lower bound, which excludes chance, does not.
        least = f", at least {low}" if verdict.low > verdict.max_drop else f", and not by chance (at least {low})"
        return f"{change}{least}; {max_drop}{early}{supplement}"
    if verdict.outcome == "pass":
        most = f", at least {high.removeprefix('-')}" if high.startswith("-") else f" and at most {high}"
        most = f" and lost at most {high}" if gained and not high.startswith("-") else most
        return f"{change}{most}; {bound}{early}{supplement}"
    if verdict.high > limit:
        reason = f"{change} {'but' if gained else 'and'} may have lost up to {high}; {bound}"
    else:
        reason = f"{change}, which may be chance; {max_drop}"
    if deviates and comparisons > 1:
        reason += f". One of {comparisons} comparisons may deviate by chance"
    return f"{UNSAFE}: {reason}. {_remedy(verdict, planned_documents)}{supplement}"


def _describe_comparison(verdict: JudgedDrop) -> tuple[str, str, str, bool]:
    """Return the subject, the reference, a further sentence, and whether a guard deviates from equality."""
    if isinstance(verdict, SuiteVerdict):
        return f"the mean of {format_count(verdict.tasks, 'task')}", verdict.reference, "", False
    if verdict.limit is not None:
        deviates = verdict.low > verdict.max_drop
    else:
        deviates = verdict.low > 0 and verdict.drop > (verdict.margin if verdict.documents_left else verdict.max_drop)
    if verdict.candidates == 1:
        return verdict.task, verdict.reference, "", deviates
    reference = f"{verdict.reference} (the best of {verdict.candidates} parents)"
    supplement = f". Choosing the best parent adds up to {verdict.selection_bias:.1f} points to the drop"
    return verdict.task, reference, supplement, deviates


def _documents_of(verdict: JudgedDrop) -> int:
    if isinstance(verdict, SuiteVerdict):
        return verdict.documents
    return verdict.look.documents if verdict.look else verdict.n


def _digits_of(verdict: JudgedDrop) -> int:
    """Return the fewest decimals (1 to 3) that show each value on the correct side of its limits."""
    _, limit = passing_bound(verdict)
    pairs = [(value, other) for value in (verdict.drop, verdict.high) for other in (verdict.max_drop, limit)]
    pairs += [(verdict.low, verdict.max_drop), (verdict.low, 0.0)]
    shown = (
        digits for digits in (1, 2) if all((round(value, digits) > other) == (value > other) for value, other in pairs)
    )
    return next(shown, 3)


def _remedy(verdict: JudgedDrop, planned_documents: int) -> str:
    """Return the number of documents used, and the remedy: more documents, or a wider margin."""
    documents, needed = _documents_of(verdict), verdict.documents_needed
    setting, limit = passing_bound(verdict)
    used = (
        f"{documents:,} of {planned_documents:,} documents"
        if documents < planned_documents
        else f"All {documents:,} documents"
    )
    used += " of this run are used"
    ways = [f"about {needed:,} documents"] if needed else []
    is_enough = needed is not None and needed <= planned_documents
    if verdict.high > limit and verdict.drop <= verdict.max_drop and not is_enough:
        wider = math.ceil(2 * verdict.high) / 2  # Settings are usually multiples of half a point.
        ways += [f"a {setting} of {wider:g}"] if wider <= 100 else []
    if not ways:
        return used
    text = " or ".join(f"{way}," for way in ways) if len(ways) == 2 else ways[0]
    return f"{used}. {text[0].upper()}{text[1:]} would decide"
