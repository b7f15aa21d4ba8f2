"""Define the keys of a profile, the file in which a user describes how a merge is released.

A profile is a YAML file or the typed parameter of a Prefect deployment. It rejects unknown keys, and combines the
settings of all stages. Relative paths are relative to the file (``root``), so a profile and its files can be moved
together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mergegate.flows.candidates import AUTO, MOST_PROPOSED, TUNE, Written
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.base.runners import RunnerSettings
from mergegate.tasks.base.stage import Limits
from mergegate.tasks.merge import MergeSettings
from mergegate.tasks.preflight import CodeSettings, CopySettings, TokenizerSettings
from mergegate.tasks.preflight.licenses import LicenseSettings
from mergegate.tasks.quality.evaluation import find_backend
from mergegate.tasks.quality.gate import BEST_PARENT, RELEASES, EvaluateSettings
from mergegate.tasks.quality.judge import JudgeSettings
from mergegate.tasks.quality.perplexity import PerplexitySettings
from mergegate.tasks.quality.serve import ServeSettings
from mergegate.tasks.quality.variants import Variant
from mergegate.tasks.release.publish import ApprovalSettings
from mergegate.tasks.release.publish.targets import Target
from mergegate.tasks.shadow import ShadowSettings
from mergegate.tasks.sweep import SweepSettings

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class ProfileSection(BaseModel):
    """A group of settings. It is frozen and rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Checks(ProfileSection):
    """Checks that run before any weight is read, and the check whether the merge copies a parent."""

    license: LicenseSettings = LicenseSettings()
    code: CodeSettings = CodeSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    copies: CopySettings = CopySettings()


Remedies = Annotated[
    tuple[Literal["auto"] | Written, ...],
    BeforeValidator(
        lambda remedies: (remedies,) if remedies == AUTO else remedies,
        json_schema_input_type=Literal["auto"] | tuple[Literal["auto"] | Written, ...],
    ),
]
RemedyChoice = Literal["written", "auto"]


class ProfileSettings(ProfileSection):
    """Settings of a profile. They are checked without reading any file."""

    name: str = Field(pattern=NAME_PATTERN, description="Name of the release.")
    recipe: Written = Field(description="Recipe in mergekit's dialect: a file, or its content inline.")
    merge: MergeSettings = MergeSettings()
    checks: Checks = Checks()
    perplexity: PerplexitySettings | None = None
    evaluate: EvaluateSettings | None = None
    judge: JudgeSettings | None = Field(default=None, description="LLM that compares answers. Default: none.")
    serve: ServeSettings | None = Field(default=None, description="Smoke test of the served merge. Default: none.")
    variants: tuple[Variant, ...] = Field(
        default=(),
        description="Quantized variants of the release, such as {format: gguf, types: [Q8_0]}. Each has its own "
        "verdict, with the merge as its reference, and is published next to the merge. Default: none.",
    )
    remedies: Remedies = Field(
        default=(),
        description="Remedies to try in order when the gate refuses: a change ('density: 0.3') or another recipe. "
        "'tune: scale', after them, searches for the best scale on documents that the gate does not use. 'auto', alone "
        "or as the last one, then tries up to three remedies that follow from the refusal.",
    )
    runner: RunnerSettings = Field(
        default=RunnerSettings(),
        description="Where models are evaluated in parallel. Default: on this machine, one at a time.",
    )
    publish: Target | None = Field(
        default=None, description="Target of the release. Default: none; the gate decides, and nothing is published."
    )
    limits: Limits = Field(default=Limits(), description="Time and memory limits.")
    sweep: SweepSettings | None = Field(
        default=None,
        description="Free parameters of the recipe and the objective of the search ('mergegate sweep'). A release uses "
        "the hand-written values, and is evaluated on documents that the search does not use.",
    )
    shadow: ShadowSettings | None = Field(
        default=None, description="Test on users' traffic before a release is promoted. Default: none."
    )
    root: LocalPath = Field(default=Path(), description="Directory that relative paths are relative to.")
    overrides: tuple[str, ...] = Field(default=(), description="Settings that this run overrides, as KEY=VALUE.")

    def approval_for(self, flow: str) -> ApprovalSettings | None:
        """Return the approval settings for the last step of a flow, or None if it needs no approval."""
        if flow != "shadow":
            return self.publish.approval_settings if self.publish else None
        settings = self.shadow.approval if self.shadow else False
        return (ApprovalSettings() if settings else None) if isinstance(settings, bool) else settings

    @model_validator(mode="after")
    def _require_evidence_to_publish(self) -> Self:
        if self.publish and not (self.perplexity or self.evaluate):
            raise ValueError("publish needs evidence: add perplexity, evaluate, or both")
        return self

    @model_validator(mode="before")
    @classmethod
    def _resolve_interpreters(cls, profile: Any) -> Any:
        """Make the interpreters of variants absolute: opening a variant does not know the directory of the profile."""
        if not isinstance(profile, dict) or not isinstance(profile.get("variants"), list | tuple):
            return profile
        root = Path(profile.get("root", Path()))
        entries = [
            {**entry, "python": root / entry["python"]}
            if isinstance(entry, dict) and isinstance(entry.get("python"), str | Path)
            else entry
            for entry in profile["variants"]
        ]
        return {**profile, "variants": entries}

    @field_validator("variants")
    @classmethod
    def _set_backends(cls, variants: tuple[Variant, ...], info: ValidationInfo) -> tuple[Variant, ...]:
        evaluate = info.data.get("evaluate")
        return tuple(variant.for_backend(evaluate.backend) for variant in variants) if evaluate else variants

    @model_validator(mode="after")
    def _require_distinct_variants(self) -> Self:
        if self.variants and not (self.perplexity or self.evaluate):
            raise ValueError("variants need evidence: add perplexity, evaluate, or both")
        types = [name for variant in self.variants for name in variant.variant_types]
        if repeated := next((name for name in types if types.count(name) > 1), None):
            raise ValueError(f"variants: {repeated} is listed twice")
        suffixes = [variant.place_suffix.lower() for variant in self.variants]  # Registries have lowercase names.
        if repeated := next((suffix for suffix in suffixes if suffixes.count(suffix) > 1), None):
            raise ValueError(f"variants: two entries would be published at '…-{repeated}': give one of them a suffix")
        return self

    @model_validator(mode="after")
    def _require_guard_that_counts(self) -> Self:
        if self.evaluate and not (self.perplexity or self.judge) and all(g.advisory for g in self.evaluate.tasks):
            raise ValueError(
                "all guards of evaluate are advisory, so the gate would refuse nothing: remove 'advisory' from a "
                "guard, or add perplexity or judge"
            )
        return self

    @model_validator(mode="after")
    def _require_in_memory_backend(self) -> Self:
        if self.sweep and self.evaluate and self.evaluate.backend != "hf":
            raise ValueError("a sweep evaluates models in memory: set evaluate.backend to hf")
        return self

    @model_validator(mode="after")
    def _require_searchable_tasks(self) -> Self:
        built_in = [guard.task for guard in self.evaluate.tasks if guard.built_in] if self.evaluate else []
        if name := next((name for name in built_in if self.sweep and name in self.sweep.task_names), None):
            raise ValueError(
                f"{name}: a search scores trials on lm-eval's tasks only: write the scale into the recipe, or search "
                "on a task of lm-eval"
            )
        return self

    @model_validator(mode="after")
    def _require_guards_of_any_soup(self) -> Self:
        guards = self.evaluate.tasks if self.evaluate and self.sweep and self.sweep.soup == "greedy" else ()
        if guard := next((guard for guard in guards if guard.guarded_by not in (BEST_PARENT, *RELEASES)), None):
            raise ValueError(
                f"{guard.task}: guarded_by: {guard.guarded_by} is one model, which a greedy soup may leave out: write "
                f"'guarded_by: {BEST_PARENT}'"
            )
        return self

    @model_validator(mode="after")
    def _require_backend_for_checkpoints(self) -> Self:
        if self.evaluate and find_backend(self.evaluate.backend).variants_only:
            raise ValueError(
                f"evaluate.backend: {self.evaluate.backend} evaluates only variants: set it to hf, and list the types "
                "to evaluate and publish under 'variants'"
            )
        return self

    @model_validator(mode="after")
    def _require_matching_visibility(self) -> Self:
        public = self.publish is not None and self.publish.is_public
        if public and self.checks.license.visibility != "public":
            raise ValueError("publish is public: set checks.license.visibility to public")
        return self

    @model_validator(mode="after")
    def _require_auto_last(self) -> Self:
        if AUTO in self.remedies[:-1]:
            raise ValueError("remedies: 'auto' must be the last one, because its proposals follow the written remedies")
        return self

    @model_validator(mode="after")
    def _require_tune_after_written(self) -> Self:
        tune_remedies = [remedy for remedy in self.remedies if isinstance(remedy, dict) and "tune" in remedy]
        if unsupported := next((remedy for remedy in tune_remedies if remedy != TUNE), None):
            raise ValueError(f"remedies: {unsupported!r:.60}: only the scale can be tuned: write 'tune: scale'")
        if tune_remedies and (
            len(tune_remedies) > 1 or next(remedy for remedy in reversed(self.remedies) if remedy != AUTO) != TUNE
        ):
            raise ValueError("remedies: write 'tune: scale' once, after all written remedies")
        return self

    @property
    def max_proposed_remedies(self) -> int:
        """Maximum number of remedies that mergegate proposes after refusals, in addition to the written ones."""
        return MOST_PROPOSED if AUTO in self.remedies else 0

    @property
    def max_further_attempts(self) -> int:
        """Maximum number of merges after the written recipes: at the scale that a search finds, and proposed ones.

        All merges of a run share the error rate of the gate.
        """
        return (TUNE in self.remedies) + self.max_proposed_remedies

    def with_remedies(self, choice: RemedyChoice | None) -> Self:
        """Return this profile with another choice of remedies.

        ``written`` tries only the remedies in the profile. ``auto`` also tries those that mergegate proposes after a
        refusal. None does not change the profile.
        """
        if choice is None or (choice == AUTO) == bool(self.max_proposed_remedies):
            return self
        written = tuple(remedy for remedy in self.remedies if remedy != AUTO)
        return self.model_copy(update={"remedies": (*written, AUTO) if choice == AUTO else written})

    def settings(self) -> dict[str, Any]:
        """Return the value of every key, without results that the profile caches."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def sweep_storage(self) -> str | None:
        """Return the file or URL where the sweep stores its study for Optuna's dashboard, or None."""
        storage = self.sweep.optuna_storage if self.sweep else None
        return storage if storage is None or "://" in storage else str(self.root / storage)

    def task_names(self) -> tuple[str, ...]:
        """Return each task of lm-eval in the gate and the sweep once, as written in the profile."""
        guarded = [guard.task for guard in self.evaluate.tasks if not guard.built_in] if self.evaluate else []
        return tuple(dict.fromkeys([*guarded, *(self.sweep.task_names if self.sweep else ())]))
