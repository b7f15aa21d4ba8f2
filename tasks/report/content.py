"""What a report says: one frozen value, put together by the flow, read by the page, the terminal table and Markdown.

A release holds no time, duration or path of a machine: the same merge judged on the same evidence gives the same bytes.
What a machine took to serve the model is marked ``NotInKey``, and stands only on the page that stays here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.evaluation import Scores, Scoring
from mergegate.tasks.explain import Explanation
from mergegate.tasks.gate import GateVerdict
from mergegate.tasks.merge import RouterDistance
from mergegate.tasks.perplexity import Likelihoods, WindowSettings
from mergegate.tasks.serve import ServingCost
from mergegate.tasks.stage import Outcome, Section
from mergegate.tasks.store import NotInKey


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReportedModel(_Part):
    """A model of this run and what was measured of it.

    ``name`` is its name in *this* run; the verdict speaks of models by it. The names inside ``scores`` and
    ``likelihoods`` are those of the run that measured, perhaps long ago and under another name, and are never shown.
    """

    name: str
    role: Literal["parent", "base", "merge"]
    ref: str  # as the recipe writes it; for the merge, what the release will be called
    revision: str | None = None  # commit of a Hub repository
    digest: str  # 64 hex digits
    licence: str = ""  # SPDX identifier where there is one; empty where it was not looked at
    scores: Scores | None = None  # None when it was not evaluated
    likelihoods: Likelihoods | None = None


class MergedFile(_Part):
    """A file of the merged checkpoint."""

    name: str
    size: int = Field(ge=0)  # bytes
    sha256: str


class Library(_Part):
    """A library whose version decides numbers of this report."""

    name: str
    version: str


class ReportedAttempt(_Part):
    """One recipe that was merged and judged in this run: as it was written, or with a remedy."""

    recipe: str  # 'ties of 2 over base'
    change: str  # what the remedy changed: '{density: 0.3}'; empty for the recipe as it was written
    outcome: Outcome
    reason: str  # the worst; empty where it passed
    digest: str = ""  # 64 hex digits of what was merged


class ReportedJudge(_Part):
    """What a model that judges answers said of the merge's. A win is one in both orders; all else is a tie."""

    model: str  # that judged
    reference: str  # whose answers the merge's are compared with
    prompts: int = Field(ge=0)
    wins: int = Field(ge=0)  # of the merge
    ties: int = Field(ge=0)
    losses: int = Field(ge=0)
    win_rate: float = Field(ge=0, le=1)  # a tie counts half
    low: float  # interval of the win rate
    high: float
    confidence: float  # one-sided each way
    consistency: float | None  # share of prompts with the same judgement in both orders; None where all were equal
    length_ratio: float | None  # length of the merge's answers over the reference's; None where that has none
    max_shortfall: float  # points below an even 50 % that are allowed
    outcome: Outcome
    reason: str  # a sentence


class ReportedCheck(_Part):
    """What was asked of the served model, and whether the answer was right."""

    name: str
    outcome: Literal["pass", "fail", "not offered"]
    expected: str
    remedy: str = ""
    where: Annotated[str, NotInKey] = ""  # tensor, file or field, where there is one
    seen: Annotated[str, NotInKey] = ""


class ReportedPlace(_Part):
    """Where a model lies among the others, in median lengths of a task vector."""

    name: str
    length: float | None  # None: it holds what is no number
    apart: float | None  # median distance to the others
    left_out: str = ""  # why; empty where it takes part


class ReportedServing(_Part):
    """What serving a model took."""

    name: str
    measured: ServingCost
    problem: str = ""  # why nothing was measured


class StoredArtifact(_Part):
    """Where a part of the evidence lies in the store."""

    stage: str
    subject: str  # model or task; empty where there is one only
    key: str  # 64 hex digits


class ReportContent(_Part):
    """Everything that stands in a report."""

    name: str  # of the profile
    method: str  # 'ties of 3 over llama-base'
    recipe: str = ""  # YAML; empty where nothing was merged
    models: tuple[ReportedModel, ...]  # parents in the recipe's order, the merge among them
    licence: str = ""  # that the merge may carry: 'apache-2.0'; empty where none was looked at
    obligations: tuple[str, ...] = ()  # what it asks of a publisher, a sentence each
    verdict: GateVerdict
    scoring: Scoring | None = None  # how the models were scored
    # By task, what is said of it alone: 'num_fewshot 5, chat template'.
    asked: Annotated[dict[str, str], Field(exclude_if=lambda tasks: not tasks)] = Field(default_factory=dict)
    windows: WindowSettings | None = None  # how the held-out text was read
    # Why models were computed in another format than they are stored in.
    computed: Annotated[str, Field(exclude_if=lambda why: not why)] = ""
    # Where the models lie among each other, where the recipe asks for that; in its order.
    places: Annotated[tuple[ReportedPlace, ...], Field(exclude_if=lambda places: not places)] = ()
    files: tuple[MergedFile, ...]
    versions: tuple[Library, ...]
    reproduce: tuple[str, ...]  # shell commands
    explanation: Explanation | None = None
    attempts: tuple[
        ReportedAttempt, ...
    ] = ()  # in the order in which they were tried; the last is what this report is about
    judge: ReportedJudge | None = None
    served: tuple[ReportedCheck, ...] = ()  # in the order in which they were made; empty where it was not served
    server: str = ""  # 'vllm 0.33.0'
    # Of an adapter: as LoRA on its base, or merged and why.
    served_as: Annotated[str, Field(exclude_if=lambda way: not way)] = ""
    serving: Annotated[tuple[ReportedServing, ...], NotInKey] = ()  # parents in the recipe's order, then the merge
    # How far apart the experts and routers of parents are that are mixtures of experts.
    experts: Annotated[tuple[RouterDistance, ...], Field(exclude_if=lambda experts: not experts)] = ()
    ensemble: Likelihoods | None = None  # of the parents together, on the same text
    artifacts: tuple[StoredArtifact, ...] = ()
    # What this run was told otherwise than the profile says, as KEY=VALUE.
    overrides: Annotated[tuple[str, ...], Field(exclude_if=lambda overrides: not overrides)] = ()
    # Keys and parameters of the recipe that were ignored, a sentence each.
    recipe_warnings: Annotated[tuple[str, ...], Field(exclude_if=lambda warnings: not warnings)] = ()
    # Of verdicts that have no drawing of their own here.
    sections: Annotated[tuple[Section, ...], Field(exclude_if=lambda sections: not sections)] = ()

    def as_released(self) -> ReportContent:
        """Without what a machine took: what is left is in the key, and the same for everybody."""
        checks = tuple(check.model_copy(update={"where": "", "seen": ""}) for check in self.served)
        return self.model_copy(update={"served": checks, "serving": ()})

    @property
    def parents(self) -> tuple[ReportedModel, ...]:
        """The models that went into the merge, the base among them."""
        return tuple(model for model in self.models if model.role != "merge")
