"""One attempt at a release: a recipe whose parents are found and allowed, and what came of merging and judging it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from flows.assessment import Assessment
from flows.preflight import ClearedCandidate
from flows.profile import Profile
from merge_core.errors import Refused
from merge_core.store import Artifact
from tasks.checkpoints import Model, PinnedCheckpoint, PinnedRecipe
from tasks.explain import Explanation
from tasks.merge import Merged
from tasks.perplexity import Likelihoods
from tasks.preflight import Evidence
from tasks.releases import ReleasedModel
from tasks.stage import JointVerdict, Verdict, combined

E = TypeVar("E", bound=BaseModel)


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
        return combined(self.verdicts)

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
