"""One attempt at a release: a recipe whose parents are found and allowed, and what came of merging and judging it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from mergegate.flows.attempt.assessment import Assessment
from mergegate.flows.candidates import changed_candidate
from mergegate.flows.preflight import ClearedCandidate, clear_further
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import ChangedInput, DiskRefused, InvalidInput, MergegateError, Refused
from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.checkpoints import Model, PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.explain import Explanation, Remedy, drop_tried_remedies, normalize_recipe
from mergegate.tasks.gate import GateVerdict
from mergegate.tasks.merge import Merged
from mergegate.tasks.perplexity import Likelihoods
from mergegate.tasks.preflight import Evidence
from mergegate.tasks.publish.releases import ReleasedModel
from mergegate.tasks.report import RunRecord, read_history
from mergegate.tasks.stage import JointVerdict, Verdict, announce, combine_verdicts, home
from mergegate.tasks.store import Artifact

E = TypeVar("E", bound=BaseModel)

_DIGITS = 16  # of a digest, as the history keeps it


@dataclass(frozen=True)
class JudgedMerge:
    """A merge that passed so far, with all that another judgement may ask for.

    Args:
        model: As a directory that any library loads.
        adapted: Base and adapter, where the merge is an adapter.
    """

    profile: Profile
    evidence: Evidence
    model: Model
    parents: tuple[PinnedCheckpoint, ...]
    adapted: PinnedCheckpoint | None = None


# A further judgement of a merge, or None where the profile does not ask for it.
FurtherJudgement = Callable[[JudgedMerge], Verdict | None]


@dataclass(frozen=True)
class Attempt:
    """A merge with all that was found out about it.

    Args:
        verdicts: Every judgement in the order in which it was asked for, the gate's first.
        expected_head: Of the target, when the champion was looked up: what may be replaced.
    """

    cleared: ClearedCandidate
    pinned: PinnedRecipe
    merged: Artifact[Merged]
    assessment: Assessment
    explanation: Explanation
    verdicts: tuple[Verdict, ...]
    ensemble: Artifact[Likelihoods] | None = None
    expected_head: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it may be published."""
        return self.verdict.publishable

    @property
    def verdict(self) -> JointVerdict:
        """What all judgements come to together."""
        return combine_verdicts(self.verdicts)

    def evidence_of(self, kind: type[E]) -> E | None:
        """The evidence of that kind, if any judgement has it."""
        return next((one.evidence for one in self.verdicts if isinstance(one.evidence, kind)), None)


@dataclass(frozen=True)
class AlreadyReleased:
    """A recipe whose merge is what is released today: there is nothing to compare it with."""

    cleared: ClearedCandidate
    release: ReleasedModel
    is_good: bool = True


@dataclass(frozen=True)
class FailedMerge:
    """A recipe whose merge was no model (NaN, zeros): there was nothing to judge."""

    cleared: ClearedCandidate
    refusal: Refused
    is_good: bool = False


def open_remedies(attempt: Attempt, tried: Sequence[Attempt | FailedMerge]) -> tuple[Remedy, ...]:
    """What may help an attempt, without what this run, or an earlier one under as strict a guard, was refused for.

    Args:
        tried: All attempts of the run.
    """
    recipe = attempt.cleared.candidate.document
    if recipe is None:
        return attempt.explanation.remedies
    contents = {name: digest for one in tried if isinstance(one, Attempt) for name, digest in _contents(one).items()}
    refused = [*_refused_before(attempt, frozenset(contents.values()))]
    for one in tried:
        if (document := one.cleared.candidate.document) is not None:
            refused.append(normalize_recipe(document, _contents(one) if isinstance(one, Attempt) else contents))
    return drop_tried_remedies(attempt.explanation.remedies, recipe, refused, contents)


def proposed_remedy(tried: Sequence[Attempt | FailedMerge], profile: Profile) -> ClearedCandidate | None:
    """The remedy with the most to gain that all checks allow: of the attempt that came nearest to passing, the one with
    the strongest reason. None where there is none left."""
    for attempt in sorted((one for one in tried if isinstance(one, Attempt)), key=_shortfall):
        for remedy in open_remedies(attempt, tried):
            where = f"profile {profile.name}: the proposed remedy"
            candidate = changed_candidate(attempt.cleared.candidate, remedy.change, profile.root, where)
            try:
                return clear_further(candidate, profile)
            except (ChangedInput, DiskRefused):
                raise  # It says nothing about the recipe.
            except MergegateError as error:
                announce(f"not tried: {remedy.text()}: {error.found}")
    return None


def _shortfall(attempt: Attempt) -> float:
    """Points by which the worst guard fell more than it may; infinite for a model that is no more a model."""
    gate = attempt.assessment.verdict.value
    if gate.drift is not None and gate.drift.broken:
        return math.inf
    return max((guard.drop - guard.max_drop for guard in gate.guards), default=0.0)


def _contents(attempt: Attempt) -> dict[str, str]:
    return {parent.ref: parent.digest[:_DIGITS] for parent in attempt.pinned.parents}


def _refused_before(attempt: Attempt, known: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Recipes of runs that were refused for what would be refused here, too; by what their models hold, where that is
    one of the ``known``."""
    gate = attempt.assessment.verdict.value
    for record in read_history(home() / "reports").records:
        if record.status != "refused" or not _as_strict(gate, record):
            continue
        try:
            documents = parse_yaml(record.recipe, "a recipe of the history")
        except InvalidInput:  # of a long one only the beginning is kept
            continue
        if len(documents) == 1 and isinstance(documents[0], Mapping):
            held = {parent.ref: parent.digest for parent in record.parents if parent.digest in known}
            yield normalize_recipe(documents[0], held)


def _as_strict(gate: GateVerdict, record: RunRecord) -> bool:
    """Whether a guard that refused that run stands here, too, and allows no more."""
    lost = {(score.task, score.reference): score.max_drop for score in record.scores if score.outcome == "fail"}
    # Of a guard that was not asked the limit of a suite may be all that is known: where in doubt, propose another.
    unasked = {(guard.task, guard.reference) for guard in gate.not_run}
    allowed = ((lost.get((guard.task, guard.reference)), guard.max_drop) for guard in gate.guards)
    return not unasked.isdisjoint(lost) or any(then is not None and now <= then for then, now in allowed)
