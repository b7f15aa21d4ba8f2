"""Check whether a guard could have shown a loss, before its interval is believed. Pure functions.

If the reference itself scores at chance, or if the prompts were truncated, a broken merge has the same score as its
reference, and "no worse" means nothing. A reference is therefore compared with two models that know nothing:

* A model that answers at random. Its score is 1 / number of choices, or 0 for free answers. The lower bound of the
  reference must be above it by at least the margin, with the bounds that the guard uses for drops.
* For choice tasks, a model that always gives the most frequent answer. Its score on these documents is known exactly.
  The reference must be above it by at least the margin.

If a merge knows nothing, then either its drop exceeds the margin, or its reference does not beat it by the margin. In
each case the merge passes at most as often as the confidence allows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation import DocumentScore, PairedScores, Scores, form_of_metric
from mergegate.tasks.quality.gate.evidence import GuardEvidence, measure_guard, stored_rows
from mergegate.tasks.quality.gate.sequential import chance_to_decide
from mergegate.tasks.quality.gate.settings import Guard
from mergegate.tasks.quality.gate.statistics import normal_quantile
from mergegate.tasks.quality.gate.verdicts import UNSAFE, GateFinding, GuardVerdict

MAX_CUT_SHARE = 0.01  # Largest share of documents with a truncated prompt that a guard accepts.
NO_POWER = "power"  # Kind of a finding about too few documents.
_NAMED = 5  # Number of tasks that a note names.


class ReferenceStrength(NamedTuple):
    """Score of a reference next to that of a model that knows nothing, in points."""

    score: float
    low: float  # Lower bound of the score above ``baseline``.
    error: float  # Standard error of the score above ``baseline``.
    baseline: float  # Score of the better of the two models that know nothing.
    baseline_name: str
    form: TaskForm = "text"  # What the task asks of the model.

    def comparison(self, reference: str) -> str:
        """Return how the reference compares with the model that knows nothing."""
        if self.form == "transcription":
            return (
                f"{reference} has an error rate of {100 - self.score:.1f}, and {self.baseline_name} would have "
                f"{100 - self.baseline:.1f}"
            )
        return f"{reference} scores {self.score:.1f}, and {self.baseline_name} would score {self.baseline:.1f}"

    @property
    def better_than(self) -> str:
        """What a reference must exceed by the margin: 'above 25.0', or for an error rate 'below 100.0'."""
        return f"below {100 - self.baseline:.1f}" if self.form == "transcription" else f"above {self.baseline:.1f}"

    def sentence(self, task: str, reference: str, margin: float) -> str:
        """Return why the reference cannot show a loss of ``margin`` points, and what to do."""
        prompt = ", or check its prompt and chat template" if self.form == "text" else ""
        return (
            f"{UNSAFE}: {task} cannot show a loss, because {self.comparison(reference)}. The difference must be shown "
            f"to be at least the margin ({margin:.4g}). Use a task that {reference} can do{prompt}"
        )


def _form_of(guard: Guard) -> TaskForm:
    """Return what the task asks of a model, by the metric that a built-in task sets.

    The evidence in a release does not have the settings of a built-in task, and must lead to the same sentence.
    """
    metric, _, answers = guard.metric.partition(",") if isinstance(guard.metric, str) else ("", "", "")
    return form_of_metric(metric) if answers == "none" else "text"


def reference_strength(evidence: GuardEvidence, confidence: float, level: float) -> ReferenceStrength:
    """Compare the reference with the models that know nothing.

    Args:
        evidence: Evidence with ``rows``.
        confidence: Confidence over all looks together.
        level: Confidence of the current look.
    """
    rows = [row for row, _ in evidence.rows]
    scores = [oriented_score(row, evidence.guard) for row in rows]
    n = len(rows)
    chance = sum(chance_of(row, evidence.guard) for row in rows) / n
    above = replace(evidence, differences=tuple(scores)).interval(confidence, level)
    error = math.sqrt(above.variance / n)
    form = _form_of(evidence.guard)
    nothing = {"retrieval": "a model that finds nothing", "transcription": "an empty transcript"}
    name = "a random answer" if chance else nothing.get(form, "an empty answer")
    strengths = [(above.low - chance, error, chance, name)]
    score = sum(scores) / n
    # The score of a constant answer on these documents is known exactly. If the reference beats it by the margin, so
    # does the drop of a merge that gives this answer, and the guard does not pass.
    targets = Counter(row.target_hash for row in rows if chance_of(row, evidence.guard))
    frequent = max(targets.values(), default=0) / n
    if frequent > chance:
        strengths.append((score - frequent, error, frequent, "the most frequent answer alone"))
    low, error, baseline, name = min(strengths)
    low -= evidence.selection_bias  # The best of several parents scores higher than it truly is.
    return ReferenceStrength(100 * score, 100 * low, 100 * error, 100 * baseline, name, form)


def known_reference_strength(
    guard: Guard, parts: Sequence[Artifact[Scores]], confidence: float, documents: int
) -> ReferenceStrength | None:
    """Return the strength of a reference that its stored scores predict for a number of ``documents``.

    Return None if fewer than 2 documents have a score by the metric of the guard.
    """
    if not (rows := stored_rows(guard, parts)):
        return None
    keys, scores = tuple((row.task, row.doc_id) for row in rows), tuple(row.outcome for row in rows)
    clusters, pairs = tuple(row.cluster for row in rows), tuple((row, row) for row in rows)
    paired = PairedScores(keys, scores, scores, clusters, pairs)
    try:
        evidence = measure_guard(guard, rows[0].metric, paired, rows[0].higher_is_better)
    except InvalidInput:  # The gate reports this error.
        return None
    known = reference_strength(evidence, confidence, confidence)
    above = known.score - known.baseline
    narrower = math.sqrt(min(1.0, len(rows) / documents))
    return known._replace(low=above - narrower * (above - known.low), error=narrower * known.error)


def oriented_score(row: DocumentScore, guard: Guard) -> float:
    """Return the score of a document from 0 (worst) to 1 (best)."""
    low, high = guard.score_range
    share = min(1.0, max(0.0, (row.outcome - low) / (high - low)))
    return share if row.higher_is_better else 1 - share


def chance_of(row: DocumentScore, guard: Guard) -> float:
    """Return the score of a random answer in [0, 1]. It is 0 for free answers, and if it is unknown."""
    return row.chance if row.higher_is_better and guard.score_range == (0, 1) else 0.0


def check_reference(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a finding if the reference is not shown to beat chance by the margin, and a note on tasks at chance."""
    if not evidence.rows or verdict.look is None:
        return
    strength = reference_strength(evidence, verdict.confidence, verdict.look.confidence)
    if strength.low < verdict.margin:
        chance_left = None
        if verdict.documents_left:
            share = verdict.look.documents / (verdict.look.documents + verdict.documents_left)
            difference = strength.score - strength.baseline
            needed = verdict.margin + normal_quantile(verdict.confidence) * strength.error * math.sqrt(share)
            chance_left = chance_to_decide(-difference, strength.error, share, -needed, math.inf)
        yield GateFinding(
            kind="reference",
            outcome="inconclusive",
            reason=strength.sentence(verdict.task, verdict.reference, verdict.margin),
            chance_left=chance_left,
        )
    elif weak := _leaves_at_chance(evidence, verdict):
        names = ", ".join(weak[:_NAMED]) + (f" and {len(weak) - _NAMED} more" if len(weak) > _NAMED else "")
        yield GateFinding(
            kind="reference",
            outcome="pass",
            reason=f"{verdict.task}: {verdict.reference} is not shown to be above chance on {names}, so a loss on "
            f"{'this task' if len(weak) == 1 else 'these tasks'} would not show",
        )


def _leaves_at_chance(evidence: GuardEvidence, verdict: GuardVerdict) -> list[str]:
    """Return the tasks of a group on which the score of the reference may be chance, in order of occurrence."""
    leaves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, _ in evidence.rows:
        leaves[row.task].append((oriented_score(row, evidence.guard), chance_of(row, evidence.guard)))
    quantile = normal_quantile(verdict.confidence)

    def is_weak(values: Sequence[tuple[float, float]]) -> bool:
        n = len(values)
        mean, chance = (sum(column) / n for column in zip(*values, strict=True))
        spread = sum((score - mean) ** 2 for score, _ in values) / n
        return bool(mean - quantile * math.sqrt(spread / n) <= chance)

    return [leaf for leaf, values in leaves.items() if is_weak(values)] if len(leaves) > 1 else []


def check_prompts(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a finding if more than one in a hundred prompts of a model were truncated to fit."""
    for name, rows in zip((verdict.reference, "the merge"), zip(*evidence.rows, strict=True), strict=False):
        cuts = [row.prompt_cut for row in rows if row.prompt_cut]
        if len(cuts) > MAX_CUT_SHARE * len(rows):
            yield GateFinding(
                kind="truncated prompts",
                outcome="inconclusive",
                reason=f"{UNSAFE}: {verdict.task} truncated {len(cuts):,} of {len(rows):,} prompts for {name}; at most "
                f"{100 * MAX_CUT_SHARE:g} % may be truncated. The longest prompt is {format_count(max(cuts), 'token')} "
                "too long. Increase evaluate.max_length, or use fewer few-shot examples",
            )
            return


def note_detectable_drop(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a note if the documents are too few to detect a drop as large as the limit of the task."""
    limit = evidence.guard.catastrophe
    if verdict.detectable_drop is not None and verdict.detectable_drop > limit:
        yield GateFinding(
            kind=NO_POWER,
            outcome="pass",
            reason=f"{verdict.task}: {verdict.n:,} documents can detect a drop of {verdict.detectable_drop:.1f} points "
            f"(80 % of the time); the limit of one task is {limit:.4g}",
        )
