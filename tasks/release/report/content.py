"""Define the content of a report as one frozen value, for the page, the terminal table and the Markdown output.

A released report holds no times, durations or machine paths, so the same merge judged on the same evidence gives the
same bytes. Serving costs depend on the machine: they are marked ``NotInKey`` and appear only on the local page.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.recipe import RunWindow
from mergegate.tasks.base.stage import Outcome, Section
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.merge import RepairedRouting, RouterDistance
from mergegate.tasks.quality.evaluation import Scores, Scoring
from mergegate.tasks.quality.gate import GateVerdict
from mergegate.tasks.quality.judge import JudgeVerdict
from mergegate.tasks.quality.perplexity import Likelihoods, WindowSettings
from mergegate.tasks.quality.serve import Check, ServingCost
from mergegate.tasks.quality.variants import VariantVerdict
from mergegate.tasks.release.explain import Explanation


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReportedModel(_Part):
    """One model in this run with its measurements.

    ``name`` is the model's name in *this* run, and the verdict uses it. The names inside ``scores`` and ``likelihoods``
    come from the run that measured them, which may have used different names. They are never shown.
    """

    name: str
    role: Literal["parent", "base", "merge"]
    ref: str  # as written in the recipe; for the merge, the name of the release
    revision: str | None = None  # commit of a Hub repository
    digest: str  # 64 hex digits
    licence: str = ""  # SPDX identifier if one exists; empty if licenses were not checked
    scores: Scores | None = None  # None if not evaluated
    likelihoods: Likelihoods | None = None


class MergedFile(_Part):
    """One file of the merged checkpoint."""

    name: str
    size: int = Field(ge=0)  # bytes
    sha256: str


class Library(_Part):
    """A library whose version affects the numbers in the report."""

    name: str
    version: str


class ReportedAttempt(_Part):
    """A recipe that was merged and judged in this run, either as written or with a remedy."""

    recipe: str  # 'ties of 2 over base'
    change: str  # change by the remedy: '{density: 0.3}'; empty for the recipe as written
    outcome: Outcome
    reason: str  # the most severe reason; empty if the attempt passed
    digest: str = ""  # 64 hex digits; digest of the merged checkpoint
    # Changes from the first recipe, as lines that start with '-' or '+'.
    diff: Annotated[tuple[str, ...], Field(exclude_if=lambda lines: not lines)] = ()


class ReportedPlace(_Part):
    """Distances between one model and the others, in median lengths of a task vector."""

    name: str
    length: float | None  # None if the model contains values that are not finite
    apart: float | None  # median distance to the other models
    left_out: str = ""  # reason for leaving the model out; empty if it takes part


class ReportedServing(_Part):
    """Cost of serving one model."""

    name: str
    measured: ServingCost
    problem: str = ""  # reason why nothing was measured


class StoredArtifact(_Part):
    """Artifact in the store that holds part of the evidence."""

    stage: str
    subject: str  # model or task; empty if the stage has only one subject
    key: str  # 64 hex digits


# Fields of the judge's verdict in ``report.json``, which has the name of the judge as ``model``.
_JUDGE_KEY = (
    "reference prompts wins ties losses win_rate low high confidence consistency length_ratio answers "
    "reference_cut_off merge_cut_off max_shortfall outcome reason"
)


class ReportContent(_Part):
    """All content of a report."""

    name: str  # name of the profile
    method: str  # 'ties of 3 over llama-base'
    # Kind of the merge. For an adapter, the kind of its base model.
    kind: Annotated[ModelKind, Field(exclude_if=lambda kind: kind == TEXT_GENERATOR)] = TEXT_GENERATOR
    recipe: str = ""  # YAML; empty if nothing was merged
    models: tuple[ReportedModel, ...]  # the merge and its parents, in the recipe's order
    # Checkpoints of each training run that was merged, by name.
    runs: Annotated[tuple[RunWindow, ...], Field(exclude_if=lambda runs: not runs)] = ()
    licence: str = ""  # license the merge may carry: 'apache-2.0'; empty if licenses were not checked
    obligations: tuple[str, ...] = ()  # obligations of a publisher under this license, one sentence each
    verdict: GateVerdict
    scoring: Scoring | None = None  # settings of the evaluation
    # Prompt settings that differ from the defaults, by task: 'num_fewshot 5, chat template'.
    asked: Annotated[dict[str, str], Field(exclude_if=lambda tasks: not tasks)] = Field(default_factory=dict)
    windows: WindowSettings | None = None  # windows over the held-out text
    # Reason why models were evaluated in a format other than the one they are stored in.
    computed: Annotated[str, Field(exclude_if=lambda why: not why)] = ""
    # Positions of the models relative to each other, if the recipe uses them. The order is that of the recipe.
    places: Annotated[tuple[ReportedPlace, ...], Field(exclude_if=lambda places: not places)] = ()
    files: tuple[MergedFile, ...]
    versions: tuple[Library, ...]
    reproduce: tuple[str, ...]  # shell commands
    explanation: Explanation | None = None
    attempts: tuple[ReportedAttempt, ...] = ()  # in the order of execution
    judge: JudgeVerdict | None = None  # of the judged answers of the merge and of a reference model
    # Verdicts on the quantized variants, in the profile's order.
    variants: Annotated[tuple[VariantVerdict, ...], Field(exclude_if=lambda variants: not variants)] = ()
    served: tuple[Check, ...] = ()  # in the order of execution; empty if the merge was not served
    server: str = ""  # 'vllm 0.33.0'
    # How an adapter was served: as LoRA on its base, or merged into the base, with the reason.
    served_as: Annotated[str, Field(exclude_if=lambda way: not way)] = ""
    serving: Annotated[tuple[ReportedServing, ...], NotInKey] = ()  # parents in the recipe's order, then the merge
    # Distances between the experts and routers of parents that are mixtures of experts.
    experts: Annotated[tuple[RouterDistance, ...], Field(exclude_if=lambda experts: not experts)] = ()
    # Effect of the repair of the routers. None if they stay as merged.
    routers: Annotated[RepairedRouting | None, Field(exclude_if=lambda routers: routers is None)] = None
    ensemble: Likelihoods | None = None  # ensemble of the parents, on the same text
    artifacts: tuple[StoredArtifact, ...] = ()
    # Profile settings that this run overrides, as KEY=VALUE.
    overrides: Annotated[tuple[str, ...], Field(exclude_if=lambda overrides: not overrides)] = ()
    # Recipe keys and parameters that were ignored, one sentence each.
    recipe_warnings: Annotated[tuple[str, ...], Field(exclude_if=lambda warnings: not warnings)] = ()
    # Sections of verdicts that have no plot in the report.
    sections: Annotated[tuple[Section, ...], Field(exclude_if=lambda sections: not sections)] = ()

    def content_key(self) -> object:
        # The kind is in the key only if it is not a text generator, so that existing pages keep their keys.
        fields = type(self).model_fields
        names = [name for name in fields if NotInKey not in fields[name].metadata and name not in ("kind", "runs")]
        key = {name: getattr(self, name) for name in names}
        key |= {"runs": [asdict(run) for run in self.runs]} if self.runs else {}
        # Observations and their places differ between runs.
        key["served"] = [check.model_dump(exclude={"seen", "where"}) for check in self.served]
        if self.judge:
            controls = self.judge.controls
            key["judge"] = {name: getattr(self.judge, name) for name in _JUDGE_KEY.split()} | {
                "model": self.judge.judge
            }
            key["judge"]["controls"] = (controls.found, controls.pairs) if controls else None
        return key if self.kind == TEXT_GENERATOR else {**key, "kind": asdict(self.kind)}

    @property
    def model_groups(self) -> tuple[tuple[ReportedModel, ...], ...]:
        """Models in order. The checkpoints of a training run form one group, and each other model has its own."""
        run_of = {name: run for run in self.runs for name in run.checkpoints}
        groups: dict[object, tuple[ReportedModel, ...]] = {}
        for model in self.models:
            key = run_of.get(model.name, model.name)
            groups[key] = (*groups.get(key, ()), model)
        return tuple(groups.values())

    @property
    def parents(self) -> tuple[ReportedModel, ...]:
        """Models that went into the merge, including the base."""
        return tuple(model for model in self.models if model.role != "merge")
