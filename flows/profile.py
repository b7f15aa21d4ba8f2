"""Define the profile, the file in which a user describes how a merge is released.

A profile is a YAML file or the typed parameter of a Prefect deployment. It is typed, strict and composed of the
settings of each stage. Relative paths are relative to the file (``root``), so a profile and its files can be moved
together. An unknown or misspelled key, a value out of range, a guard without a parent: mergegate reports all errors
together, each with its location and a suggestion.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mergegate.flows.candidates import (
    AUTO,
    MOST_PROPOSED,
    TUNE,
    Candidate,
    ClientRound,
    SearchedRecipe,
    TuningSize,
    Written,
    candidate_recipes,
    client_digest,
    client_round,
    clients_document,
    recipe_of_documents,
    scale_search,
    searched_recipe,
)
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import FileIdentity, HashMemo, file_identity
from mergegate.merge_core.parsing import (
    LocalPath,
    describe_kind,
    expectation,
    format_value,
    join_expectations,
    read_yaml,
    with_overrides,
)
from mergegate.tasks.checkpoints import ResolvedCheckpoint
from mergegate.tasks.evaluation import find_backend
from mergegate.tasks.gate import EvaluateSettings
from mergegate.tasks.judge import JudgeSettings
from mergegate.tasks.merge import MergeSettings, find_optimizer_state
from mergegate.tasks.perplexity import PerplexitySettings
from mergegate.tasks.preflight import (
    CodeSettings,
    Evidence,
    TokenizerSettings,
    check_references,
    pin_evidence,
    stored_dtypes,
    with_supported_dtype,
)
from mergegate.tasks.preflight.licenses import LicenseSettings
from mergegate.tasks.publish import ApprovalSettings
from mergegate.tasks.publish.targets import Target, publish_targets
from mergegate.tasks.runners import RunnerSettings
from mergegate.tasks.serve import ServeSettings
from mergegate.tasks.shadow import ShadowSettings
from mergegate.tasks.stage import Limits, device_kind, formats_without_units, store
from mergegate.tasks.sweep import SweepEvidence, SweepSettings, pin_sweep, relocate_recipe, start_recipe

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class ProfileSection(BaseModel):
    """A group of settings. It is frozen and rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Checks(ProfileSection):
    """Checks that run before any weight is read."""

    license: LicenseSettings = LicenseSettings()
    code: CodeSettings = CodeSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()


def _listed(remedies: object) -> object:
    return (remedies,) if remedies == AUTO else remedies


Remedies = Annotated[
    tuple[Literal["auto"] | Written, ...],
    BeforeValidator(_listed, json_schema_input_type=Literal["auto"] | tuple[Literal["auto"] | Written, ...]),
]
RemedyChoice = Literal["written", "auto"]


class Profile(ProfileSection):
    """How a merge is released: recipe, checks, evidence, target."""

    name: str = Field(pattern=_NAME, description="Name of the release.")
    recipe: Written = Field(description="mergekit's dialect: a file, or the same inline.")
    merge: MergeSettings = MergeSettings()
    checks: Checks = Checks()
    perplexity: PerplexitySettings | None = None
    evaluate: EvaluateSettings | None = None
    judge: JudgeSettings | None = Field(default=None, description="A model that compares answers; absent: none is.")
    serve: ServeSettings | None = Field(default=None, description="How it is served first; absent: it is not.")
    remedies: Remedies = Field(
        default=(),
        description="Tried in order when the gate refuses: changes ('density: 0.3'), or another recipe. After them "
        "'tune: scale': the scale that a search finds, on documents that the gate then never sees. 'auto', alone or as "
        "the last of them: then what the refusal itself proposes, three times at most.",
    )
    runner: RunnerSettings = Field(
        default=RunnerSettings(), description="Where models are measured side by side; absent: here, one after another."
    )
    publish: Target | None = Field(default=None, description="Where to; absent: gate only, publish nothing.")
    limits: Limits = Field(default=Limits(), description="How long it may take.")
    sweep: SweepSettings | None = Field(
        default=None,
        description="What is free in the recipe, and what it is searched for ('mergegate sweep'). A release takes the "
        "hand-written values, and is measured on documents that no search looks at.",
    )
    shadow: ShadowSettings | None = Field(
        default=None, description="How a release is watched on users' traffic before it is promoted; absent: it is not."
    )
    root: LocalPath = Field(default=Path(), description="Directory that relative paths are relative to.")
    overrides: tuple[str, ...] = Field(default=(), description="What was said otherwise for this run, as KEY=VALUE.")

    def headline(self) -> str:
        """Summarize the profile in one line: ``demo · ties of 2 over base``."""
        candidate, *remedies = self.candidates()
        more = f", {len(remedies)} {'remedy' if len(remedies) == 1 else 'remedies'}" if remedies else ""
        more += ", then its best scale" if TUNE in self.remedies else ""
        more += ", then what a refusal proposes" if self.proposed else ""
        overrides = f" · {', '.join(self.overrides)}" if self.overrides else ""
        return f"{self.name} · {candidate.recipe.summary()}{more}{overrides}"

    def asks(self, flow: str) -> ApprovalSettings | None:
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

    @model_validator(mode="after")
    def _require_in_memory_backend(self) -> Self:
        if self.sweep and self.evaluate and self.evaluate.backend != "hf":
            raise ValueError("a sweep asks networks in memory: evaluate.backend must be hf")
        return self

    @model_validator(mode="after")
    def _require_matching_visibility(self) -> Self:
        public = self.publish is not None and self.publish.is_public
        if public and self.checks.license.visibility != "public":
            raise ValueError("publish is public, so checks.license.visibility must be public too")
        return self

    @model_validator(mode="after")
    def _require_auto_last(self) -> Self:
        if AUTO in self.remedies[:-1]:
            raise ValueError("remedies: 'auto' stands last: what a refusal proposes is tried after what is written")
        return self

    @model_validator(mode="after")
    def _require_tune_after_written(self) -> Self:
        tune_remedies = [remedy for remedy in self.remedies if isinstance(remedy, dict) and "tune" in remedy]
        if unsupported := next((remedy for remedy in tune_remedies if remedy != TUNE), None):
            raise ValueError(f"remedies: {unsupported!r:.60}: what can be searched for is the scale: 'tune: scale'")
        if tune_remedies and (
            len(tune_remedies) > 1 or next(remedy for remedy in reversed(self.remedies) if remedy != AUTO) != TUNE
        ):
            raise ValueError("remedies: 'tune: scale' stands after all that is written, once")
        return self

    @property
    def tuning(self) -> Profile | None:
        """The profile of the search behind the remedy ``tune: scale``. None if it is not among the remedies.

        Raises:
            InvalidInput: The profile has no tasks, or the recipe does not have exactly one scale.
        """
        return self._tuning

    @cached_property
    def _tuning(self) -> Profile | None:
        return self.tuned(TuningSize()) if TUNE in self.remedies else None

    def tuned(self, size: TuningSize) -> Profile:
        """Return this profile with a search for the scale of its merge over the documents of its tasks.

        Raises:
            InvalidInput: The profile already has a search or has no task, or the recipe does not have exactly one
                scale.
        """
        where = f"profile {self.name}"
        if self.sweep:
            raise InvalidInput(
                where, found="a section 'sweep'", expected="a recipe without holes", remedy="mergegate sweep does it"
            )
        if not self.evaluate:
            raise InvalidInput(
                where, found="no tasks", expected="evaluate.tasks: what the merge is asked to be sure of"
            )
        recipe = self.searched_recipe()
        content, settings = scale_search(recipe, [guard.task for guard in self.evaluate.tasks], size)
        searching = self.with_recipe(relocate_recipe(content, recipe.directory, self.root))
        return Profile.model_validate({**dict(searching), "sweep": settings})

    @property
    def proposed(self) -> int:
        """Maximum number of remedies that follow from refusals, after the written ones."""
        return MOST_PROPOSED if AUTO in self.remedies else 0

    def remedied(self, choice: RemedyChoice | None) -> Profile:
        """Return this profile with another choice of remedies.

        Args:
            choice: ``written`` for the written remedies only, ``auto`` to also try the proposals of a refusal, None
                for the setting of the profile.
        """
        if choice is None or (choice == AUTO) == bool(self.proposed):
            return self
        written = tuple(remedy for remedy in self.remedies if remedy != AUTO)
        return self.model_copy(update={"remedies": (*written, AUTO) if choice == AUTO else written})

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the recipe, then the remedies in order. They are read and parsed once.

        Raises:
            InvalidInput: A recipe is invalid, or a change does not fit the recipe.
        """
        return self._candidates

    @property
    def is_as_read(self) -> bool:
        """Whether the recipe files, if already read, are unchanged since."""
        if self.__dict__.get("_client_round") is not None:  # Clients may come and go at any time.
            return False
        return "_recipes_read" not in self.__dict__ or self._recipes_read == self._recipe_files()

    @cached_property
    def _recipes_read(self) -> dict[Path, FileIdentity | None]:
        """Identities of the recipe files before they were read."""
        return self._recipe_files()

    def _recipe_files(self) -> dict[Path, FileIdentity | None]:
        files = [self.root / path for path in (self.recipe, *self.remedies) if isinstance(path, Path)]
        return {file: _identity_of(file) for file in files}

    @cached_property
    def _candidates(self) -> tuple[Candidate, ...]:
        _ = self._recipes_read
        recipe: Written | SearchedRecipe | Candidate = self.recipe
        if self.sweep:
            searched = self.searched_recipe()
            recipe = replace(searched, document=start_recipe(searched.document, self.sweep, searched.location))
        written = [remedy for remedy in self.remedies if remedy not in (AUTO, TUNE)]
        if (round_and_directory := self._client_round) is not None:
            candidate = recipe_of_documents(
                round_and_directory[0].documents, round_and_directory[1], f"profile {self.name}: recipe"
            )
            recipe = replace(
                candidate, text=round_and_directory[0].text + candidate.text, remarks=round_and_directory[0].remarks
            )
        return candidate_recipes(recipe, written, self.root, f"profile {self.name}")

    @cached_property
    def _client_round(self) -> tuple[ClientRound, Path] | None:
        """The round of clients that the recipe requests, with the directory of its paths. None for other recipes."""
        if (document_and_directory := clients_document(self.recipe, self.root)) is None:
            return None
        document, directory = document_and_directory
        released = self.publish.current_release(self.root) if self.publish else None
        new_round = client_round(
            document,
            directory,
            f"profile {self.name}: recipe",
            released=released.directory if released else None,
            digest_of=lambda path: client_digest(path, store().hashes),
            find_state=find_optimizer_state,
        )
        return new_round, directory

    def searched_recipe(self) -> SearchedRecipe:
        """Return the recipe with its placeholders unfilled. It is read once.

        Raises:
            InvalidInput: The recipe cannot be read or has several documents.
        """
        return self._searched_recipe

    @cached_property
    def _searched_recipe(self) -> SearchedRecipe:
        _ = self._recipes_read
        return searched_recipe(self.recipe, self.root, f"profile {self.name}")

    def check_references(self, parents: Sequence[ResolvedCheckpoint]) -> None:
        """Check that every guard and the judge compare the merge with an existing model.

        Raises:
            InvalidInput: A reference does not exist. The error names the first one and a suggestion.
        """
        check_references(self.evaluate, self.perplexity, self.judge, parents)

    def pin_evidence(
        self, parents: Sequence[ResolvedCheckpoint], hashes: HashMemo, dtypes: Collection[str] | None = None
    ) -> Evidence:
        """Pin tasks and documents by content, and choose the format in which this machine computes the models.

        Args:
            made: Formats of the models measured in addition to the parents. Default: the formats that the recipes
                declare.

        Raises:
            InvalidInput: A guard, a task or a file does not exist.
        """
        self.check_references(parents)
        evidence = pin_evidence(self.evaluate, self.perplexity, self.judge, self.root, hashes)
        if without_units := formats_without_units(device_kind()):
            others = self._written_dtypes() if dtypes is None else dtypes
            evidence = with_supported_dtype(evidence, {*stored_dtypes(parents), *others}, without_units)
        searching = self if self.sweep else self.tuning
        if searching is None:
            return evidence
        swept = searching.pin_sweep(evidence, hashes)
        return evidence._replace(
            tasks=swept.left_for_the_gate(evidence.tasks), documents=swept.text_of("gate") or evidence.documents
        )

    def _written_dtypes(self) -> set[str]:
        """Return the formats that the recipes declare."""
        written = (candidate.recipe.out_dtype or candidate.recipe.dtype for candidate in self.candidates())
        return {dtype.torch_name for dtype in written if dtype}

    def sweep_view(self) -> str | None:
        """Return the file or URL where the sweep's study is written for dashboards, or None."""
        view = self.sweep.optuna_storage if self.sweep else None
        return view if view is None or "://" in view else str(self.root / view)

    def with_recipe(self, recipe: Mapping[str, Any]) -> Profile:
        """Return this profile for another recipe, with paths relative to ``root`` and without remedies."""
        return Profile.model_validate({**dict(self), "recipe": dict(recipe), "remedies": ()})

    def pin_sweep(self, evidence: Evidence, hashes: HashMemo) -> SweepEvidence:
        """Pin the tasks of the sweep by content and split their documents.

        Raises:
            InvalidInput: A task does not exist, or settings contradict each other.
        """
        assert self.sweep is not None
        guarded = {guard.task: guard.cluster_by for guard in (self.evaluate.tasks if self.evaluate else ())}
        text = evidence.documents and evidence.documents.model_copy(update={"only": None})
        data = self.evaluate.data if self.evaluate else None
        return pin_sweep(self.sweep, text, guarded, self.root, hashes, data, evidence.scoring.num_fewshot)

    def asked_tasks(self) -> tuple[str, ...]:
        """Return every task as written in the profile, once each: those of the gate and those of the sweep."""
        guarded = [guard.task for guard in self.evaluate.tasks] if self.evaluate else []
        return tuple(dict.fromkeys([*guarded, *(self.sweep.asked_tasks if self.sweep else ())]))

    def dtypes_to_evaluate(self) -> tuple[str, ...]:
        """Return the formats, as written, in which models are loaded for evaluation on this machine."""
        dtypes = [str(self.perplexity.dtype)] if self.perplexity else []
        if self.evaluate and find_backend(self.evaluate.scoring.backend).loads_here:
            dtypes.append(self.evaluate.scoring.dtype)
        return tuple(dtypes)


def load_profile(source: Path | Profile, overrides: Sequence[str] = ()) -> Profile:
    """Load a profile.

    Args:
        source: Profile file, or an already parsed profile.
        overrides: Settings to override for this run, as ``KEY=VALUE``.

    Raises:
        InvalidInput: The file cannot be read, is not YAML, or is not a valid profile.
    """
    if isinstance(source, Profile):
        data = with_overrides({**dict(source), "root": source.root.absolute()}, overrides)
        return parse_profile({**data, "overrides": (*source.overrides, *overrides)}, f"profile {source.name}")
    try:
        status = source.stat()
    except OSError:  # _read_profile reports the error
        return _read_profile(source, tuple(overrides))
    identity = (status.st_ino, status.st_size, status.st_mtime_ns)
    profile = _profile_once(source.absolute(), source, tuple(overrides), identity)
    if profile.is_as_read:
        return profile
    _profile_once.cache_clear()
    return _profile_once(source.absolute(), source, tuple(overrides), identity)


@lru_cache(maxsize=8)
def _profile_once(file: Path, source: Path, overrides: tuple[str, ...], identity: tuple[int, ...]) -> Profile:
    """Read a profile only once per run, because the command line needs its headline and the flow needs the rest."""
    return _read_profile(source, overrides)


def _read_profile(source: Path, overrides: tuple[str, ...]) -> Profile:
    data = _mapping_in(source)
    if _is_recipe_document(data):
        raise InvalidInput(
            str(source),
            found="a recipe",
            expected="a profile, which names a recipe and says how to release it",
            remedy=f"write a profile with 'recipe: {source.name}', or only merge: mergegate merge {source} OUT",
        )
    if "overrides" in data:
        raise InvalidInput(
            f"{source}: overrides",
            found="a key of what one run is told otherwise",
            expected="the values themselves, where they belong",
            remedy="remove it; of one run: mergegate run PROFILE --set KEY=VALUE",
        )
    values = with_overrides({"root": source.absolute().parent, **data}, overrides)
    location = " ".join([str(source), *(f"--set {override}" for override in overrides)])
    return parse_profile({**values, "overrides": overrides}, location)


def _identity_of(file: Path) -> FileIdentity | None:
    """Return the identity of a file, or None if it cannot exist. Reading it later reports the reason."""
    try:
        return file_identity(file)
    except (OSError, ValueError):
        return None


def profile_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a profile file, for editors."""
    schema = Profile.model_json_schema(mode="validation")
    del schema["properties"]["root"]  # follows from the location of the file
    schema["title"] = "mergegate: a profile"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def name_in(file: Path) -> str:
    """Return the name that a profile file declares, even if the profile is invalid. Empty if there is none.

    Raises:
        InvalidInput: The file cannot be read or does not contain a mapping.
    """
    name = _mapping_in(file).get("name")
    return name if isinstance(name, str) and is_release_name(name) else ""


def is_release_name(name: str) -> bool:
    """Return whether a profile may have this name."""
    return re.fullmatch(_NAME, name) is not None


def is_recipe(file: Path) -> bool:
    """Return whether the file contains a recipe, not a profile.

    Raises:
        InvalidInput: The file cannot be read, as in ``load_profile``.
    """
    return any(isinstance(document, Mapping) and _is_recipe_document(document) for document in _documents_in(file))


def _is_recipe_document(document: Mapping[str, object]) -> bool:
    """Return whether a document has keys that only recipes have. A recipe with a misspelled method still counts."""
    if "merge_method" in document or "experts" in document:
        return True
    return "recipe" not in document and not document.keys().isdisjoint(("models", "slices", "modules"))


def parse_profile(data: Mapping[str, object], where: str) -> Profile:
    """Parse a profile from plain data.

    Args:
        data: Content of a profile.
        where: Location for error messages.

    Raises:
        InvalidInput: The data is invalid. The error lists all faults.
    """
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise settings_faults(error, where) from None


def _mapping_in(file: Path) -> Mapping[str, object]:
    documents = _documents_in(file)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        found = f"{len(documents)} documents" if len(documents) > 1 else describe_kind(documents[0])
        raise InvalidInput(str(file), found=found, expected="one mapping with name, recipe, publish, …")
    return documents[0]


def _documents_in(file: Path) -> list[object]:
    return read_yaml(file, "a profile (YAML)") or [None]


def settings_faults(error: ValidationError, where: str, model: type[BaseModel] = Profile) -> InvalidInput:
    """Convert a pydantic error about a settings file into one readable error with all faults.

    Args:
        error: Error that pydantic raised.
        where: Name of the file in messages.
        model: Settings model. Its keys are suggested for unknown ones.
    """
    locations = [fault["loc"] for fault in error.errors()]
    # pydantic also reports a list with one invalid item as "too short". If a location and one inside it both have
    # faults, only the inner one is informative.
    inside = {location[:depth] for location in locations for depth in range(len(location))}
    messages = [
        (_format_location(fault["loc"]), *_fault(fault, model))
        for fault in error.errors()
        if fault["loc"] not in inside
    ]
    # A value that may be a file or a mapping produces two faults at one location.
    alternatives: dict[str, list[tuple[str, str]]] = {}
    for location, message, remedy in messages:
        alternatives.setdefault(location, []).append((message, remedy))
    faults = [
        (location, join_expectations([message for message, _ in choices]), choices[0][1])
        for location, choices in alternatives.items()
    ]
    if len(faults) == 1:
        (location, found, remedy) = faults[0]
        return InvalidInput(f"{where}: {location}" if location else where, found=found, remedy=remedy)
    lines = "".join(
        f"\n  {location}: {found}" + (f"; {remedy}" if remedy else "") for location, found, remedy in faults
    )
    return InvalidInput(where, found=f"{len(faults)} faults{lines}")


def _fault(fault: Any, model: type[BaseModel]) -> tuple[str, str]:
    """Return the problem and its fix. Replace pydantic's wording where it addresses programmers."""
    *parents, last = fault["loc"] or ("",)
    if fault["type"] == "extra_forbidden":
        section = _section_at(model, parents)
        if new_name := getattr(section, "renamed_keys", {}).get(last):
            return f"the key {last!r} was renamed", f"write {new_name!r}"
        keys = [name for name in section.model_fields if name not in ("root", "overrides")]
        return f"unknown key {last!r}", suggest(str(last), keys)
    if fault["type"] == "missing":
        return "is missing", "add it"
    message = expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
    # The location is enough for a whole section, and some messages already show the input.
    shows_input = isinstance(fault["input"], Mapping | BaseModel) or repr(fault["input"]) in message
    return message if shows_input else f"{format_value(fault['input'])}: {message}", ""


def _format_location(location: tuple[int | str, ...]) -> str:
    """Format ``('evaluate', 'tasks', 0, 'max_drop')`` as ``evaluate.tasks[0].max_drop``."""
    text = ""
    for previous, part in zip((None, *location), location, strict=False):
        if previous == "publish" and part in publish_targets():  # pydantic's tag for the kind of target
            continue
        # pydantic's tag for a member of a union
        if isinstance(part, str) and ("[" in part or part.startswith("function-")):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _section_at(model: type[BaseModel], location: list[int | str]) -> type[BaseModel]:
    """Return the settings class at ``location``, by walking the types."""
    for previous, part in zip((None, *location), location, strict=False):
        if isinstance(part, int):
            continue
        if previous == "publish" and part in publish_targets():
            model = publish_targets()[part]
            continue
        field = model.model_fields.get(part)
        inner = _settings_in(field.annotation) if field else None
        if inner is None:
            break
        model = inner
    return model


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class inside ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for part in typing.get_args(annotation) if (inner := _settings_in(part))), None)
