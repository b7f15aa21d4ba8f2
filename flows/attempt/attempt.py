"""Define an attempt: a candidate recipe, its merge, and the verdicts about it, by the gate, a judge and a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from mergegate.flows.attempt.assessment import Assessment
from mergegate.flows.candidates import changed_candidate
from mergegate.flows.preflight import ClearedCandidate, clear_further
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import CannotDecide, InvalidInput, MergegateError, Refused
from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.base.stage import (
    JointVerdict,
    Outcome,
    Verdict,
    announce,
    combine_verdicts,
    home,
    runtime,
    severity,
)
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.merge import MergeSummary
from mergegate.tasks.models.checkpoints import Model, PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.preflight import Evidence
from mergegate.tasks.quality.judge import judge_models
from mergegate.tasks.quality.perplexity import Likelihoods
from mergegate.tasks.quality.serve import serve_models
from mergegate.tasks.quality.variants import VariantFormat, VariantRecord, VariantVerdict
from mergegate.tasks.release.explain import Explanation, Remedy, drop_tried_remedies, normalize_recipe
from mergegate.tasks.release.publish.releases import ReleasedModel
from mergegate.tasks.release.report import read_history

E = TypeVar("E", bound=BaseModel)

_DIGITS = 16  # digits of a digest in the history


@dataclass(frozen=True)
class JudgedMerge:
    """A merge that has passed all judgments so far, with everything that the next one may need.

    ``model`` is a directory that any library can load. If the merge is an adapter, ``adapted`` contains its base and
    the adapter.
    """

    profile: Profile
    evidence: Evidence
    model: Model
    parents: tuple[PinnedCheckpoint, ...]
    adapted: PinnedCheckpoint | None = None


# A judgment after the gate. It returns None if the profile does not configure it. To add one, write a function and add
# it to ``JUDGMENTS`` in ``flows.release``.
FurtherJudgment = Callable[[JudgedMerge], Verdict | None]


def judge_answers(merge: JudgedMerge) -> Verdict | None:
    """Let a judge compare the merge's answers with those of the parent that the profile selects."""
    comparison = merge.evidence.answers
    if comparison is None:
        return None
    reference = next(parent for parent in merge.parents if parent.name == comparison.settings.guarded_by)
    return judge_models(reference, merge.model, comparison.prompts, comparison.settings, runtime()).verdict.as_verdict()


def serve_merge(merge: JudgedMerge) -> Verdict | None:
    """Run the smoke test of the merge on a real server, and measure its parents there if the profile requests it."""
    served = serve_models(merge.profile.serve, merge.profile.root, merge.model, merge.parents, merge.adapted)
    return served.as_verdict() if served else None


@dataclass(frozen=True)
class JudgedVariant:
    """A quantized variant of a merge, with its verdict.

    Without ``artifact``, the variant could not be built. Without ``assessment``, a check refused it before its
    evaluation.
    """

    settings: VariantFormat
    verdict: VariantVerdict
    artifact: Artifact[VariantRecord] | None = None
    assessment: Assessment | None = None


@dataclass(frozen=True)
class Attempt:
    """A merge with its measurements and verdicts.

    The gate's verdict comes first in ``verdicts``, which are about the merge alone. ``expected_head`` is the head of
    the target at the time when mergegate looked up the champion. Publication may replace only this head.
    """

    cleared: ClearedCandidate
    pinned: PinnedRecipe
    merged: Artifact[MergeSummary]
    assessment: Assessment
    explanation: Explanation
    verdicts: tuple[Verdict, ...]
    ensemble: Artifact[Likelihoods] | None = None
    expected_head: str | None = None
    variant_heads: Mapping[str, str] = field(default_factory=dict)  # the same for the places of variants, by suffix
    variants: tuple[JudgedVariant, ...] = ()  # empty unless every verdict before them allows publication
    released: ReleasedModel | None = None  # the current release, if it is this merge: only variants can be missing
    sample_notes: tuple[str, ...] = ()  # scores of the champion on documents that did not select it, as sentences

    @property
    def is_good(self) -> bool:
        """Whether the merge may be published."""
        return self.verdict.publishable

    @property
    def verdict(self) -> JointVerdict:
        """Joint verdict of all judgments, and of the variants that the profile requires."""
        required = [variant.verdict.as_verdict() for variant in self.variants if variant.verdict.required]
        return combine_verdicts(required if self.released else (*self.verdicts, *required))

    @property
    def outcome(self) -> Outcome:
        """Outcome for the list of attempts on the report page."""
        return self.verdict.outcome

    @property
    def reason(self) -> str:
        """First reason for the outcome, or an empty string."""
        return next(iter(self.verdict.reasons), "")

    def evidence_of(self, kind: type[E]) -> E | None:
        """Return the first evidence of type ``kind`` among the verdicts, or None if there is none."""
        return next((verdict.evidence for verdict in self.verdicts if isinstance(verdict.evidence, kind)), None)


@dataclass(frozen=True)
class AlreadyReleased:
    """A recipe whose merge is the current release. There is nothing to judge."""

    cleared: ClearedCandidate
    release: ReleasedModel
    is_good: bool = True


@dataclass(frozen=True)
class FailedMerge:
    """A recipe whose merge is not a usable model, for example because of NaN or zeros. There is nothing to judge."""

    cleared: ClearedCandidate
    refusal: Refused
    is_good: bool = False
    outcome: Outcome = "fail"

    @property
    def reason(self) -> str:
        """Finding of the check that refused the merge."""
        return str(self.refusal.found)


def open_remedies(attempt: Attempt, attempts: Sequence[Attempt | FailedMerge]) -> tuple[Remedy, ...]:
    """Return the proposed remedies of an attempt, without those whose recipe was already refused.

    A recipe counts as refused if one of ``attempts`` in this run used it, or if an earlier run refused it under a guard
    at least as strict.
    """
    recipe = attempt.cleared.candidate.document
    if recipe is None:
        return attempt.explanation.remedies

    def digests_of(judged_attempt: Attempt) -> dict[str, str]:
        return {parent.ref: parent.digest[:_DIGITS] for parent in judged_attempt.pinned.parents}

    digests: dict[str, str] = {}
    for previous in attempts:
        digests |= digests_of(previous) if isinstance(previous, Attempt) else {}
    refused = []

    gate = attempt.assessment.verdict.value
    # The history may know only the suite limit for a guard that did not run. If in doubt, propose another remedy.
    skipped = {(guard.task, guard.reference) for guard in gate.not_run}
    for record in read_history(home() / "reports").records:
        limits = {(score.task, score.reference): score.max_drop for score in record.scores if score.outcome == "fail"}
        # A guard that refused that run is in this gate too, and allows no more.
        is_as_strict = not skipped.isdisjoint(limits) or any(
            (limit := limits.get((guard.task, guard.reference))) is not None and guard.max_drop <= limit
            for guard in gate.guards
        )
        if record.status != "refused" or not is_as_strict:
            continue
        documents: Sequence[object] = ()
        with suppress(InvalidInput):  # the history truncates long recipes
            documents = parse_yaml(record.recipe, "a recipe of the history")
        if len(documents) == 1 and isinstance(documents[0], Mapping):
            # Replace a model name by its digest if a model of this run has the same digest.
            names = {parent.ref: parent.digest for parent in record.parents if parent.digest in digests.values()}
            refused.append(normalize_recipe(documents[0], names))

    for previous in attempts:
        if (document := previous.cleared.candidate.document) is not None:
            names = digests_of(previous) if isinstance(previous, Attempt) else digests
            refused.append(normalize_recipe(document, names))
    proposals = attempt.explanation.remedies
    recipe_changes = [remedy for remedy in proposals if remedy.kind == "recipe"]
    settings = tuple(remedy for remedy in proposals if remedy.kind == "profile")
    return (*settings, *drop_tried_remedies(recipe_changes, recipe, refused, digests))


def distance_from_passing(attempt: Attempt) -> tuple[int, float]:
    """Return a sort key that is smallest for the attempt that came closest to passing.

    First comes the most severe outcome: an inconclusive merge is better than a failed one. Then comes the number of
    points by which the worst drop exceeds its limit, which is infinite for a broken model.
    """
    gate = attempt.assessment.verdict.value
    if gate.drift is not None and gate.drift.broken:
        return severity(attempt.outcome), math.inf
    excess = [guard.drop - guard.max_drop for guard in gate.guards]
    excess += [suite.drop - suite.max_drop for suite in gate.suites]
    return severity(attempt.outcome), max(excess, default=0.0)


def proposed_remedy(attempts: Sequence[Attempt | FailedMerge], profile: Profile) -> ClearedCandidate | None:
    """Return the candidate of the most promising remedy that passes all checks, or None if no remedy is left.

    mergegate first tries the remedies of the attempt that came closest to passing, in order of the strength of their
    reasons.
    """
    judged = (attempt for attempt in attempts if isinstance(attempt, Attempt))
    for attempt in sorted(judged, key=distance_from_passing):
        for remedy in open_remedies(attempt, attempts):
            if remedy.kind != "recipe":
                continue
            location = f"profile {profile.name}: the proposed remedy"
            try:
                candidate = changed_candidate(attempt.cleared.candidate, remedy.change, profile.root, location)
                return clear_further(candidate, profile)
            except CannotDecide:
                raise
            except MergegateError as error:
                announce(f"skipped the remedy {remedy.text()}: {error.found}")
    return None
