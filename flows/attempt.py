"""One attempt at a release: a recipe whose parents are found and allowed, and what came of merging and judging it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flows.candidates import Candidate
from flows.judging import Assessment
from merge_core.errors import Refused
from merge_core.store import Artifact
from tasks.checkpoints import PinnedRecipe, ResolvedCheckpoint
from tasks.explain import Explanation
from tasks.gate import GateVerdict
from tasks.judge import JudgeVerdict
from tasks.merge import Merged
from tasks.perplexity import Likelihoods
from tasks.preflight.licenses import LicenseVerdict
from tasks.serve import ServedModels


@dataclass(frozen=True)
class ClearedCandidate:
    """A recipe that may be merged, as far as licences, headers and disk tell. No weight has been read."""

    candidate: Candidate
    found: tuple[ResolvedCheckpoint, ...]
    license: Artifact[LicenseVerdict]


@dataclass(frozen=True)
class Attempt:
    """A merge with all that was found out about it."""

    examined: ClearedCandidate
    pinned: PinnedRecipe
    merged: Artifact[Merged]
    judged: Assessment
    explanation: Explanation
    ensemble: Artifact[Likelihoods] | None = None
    answers: JudgeVerdict | None = None
    expected_head: str | None = None  # of the target, when the champion was looked up: what may be replaced
    served: ServedModels | None = None

    @property
    def is_good(self) -> bool:
        """Whether it may be published."""
        return self.verdict.publishable

    @property
    def verdict(self) -> GateVerdict:
        """Of the gate, and of all that came after it."""
        verdict = self.judged.verdict.value
        if self.answers:
            verdict = verdict.and_also(self.answers.outcome, self.answers.publishable, self.answers.reason)
        if self.served:
            served = self.served.verdict
            verdict = verdict.and_also(served.outcome, served.outcome == "pass", f"served: {served.summary()}")
        return verdict


@dataclass(frozen=True)
class AlreadyReleased:
    """A recipe whose merge is what is released today: there is nothing to hold it against."""

    examined: ClearedCandidate
    location: Path
    is_good: bool = True


@dataclass(frozen=True)
class FailedMerge:
    """A recipe whose merge was no model (NaN, zeros): there was nothing to judge."""

    examined: ClearedCandidate
    refusal: Refused
    is_good: bool = False
