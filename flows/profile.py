"""The profile: what a person writes to say how a merge is released. Typed, strict, composed of each stage's settings.

A profile is a YAML file, or the same thing as the typed parameter of a Prefect deployment. Relative paths in it are
relative to the file (``root``), so a profile and what it names can be moved together. An unknown or misspelt key, a
value out of range, a guard that names no parent: all are reported at once, with the place and a suggestion.
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
    """A group of settings: frozen, and no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Checks(ProfileSection):
    """What is checked before any weight is read."""

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
        """``demo · ties of 2 over base``."""
        own, *remedies = self.candidates()
        more = f", {len(remedies)} {'remedy' if len(remedies) == 1 else 'remedies'}" if remedies else ""
        more += ", then its best scale" if TUNE in self.remedies else ""
        more += ", then what a refusal proposes" if self.proposed else ""
        otherwise = f" · {', '.join(self.overrides)}" if self.overrides else ""
        return f"{self.name} · {own.recipe.summary()}{more}{otherwise}"

    def asks(self, flow: str) -> ApprovalSettings | None:
        """How a person is asked before the last step of a flow; None: nobody is."""
        if flow != "shadow":
            return self.publish.asks if self.publish else None
        wanted = self.shadow.approval if self.shadow else False
        return (ApprovalSettings() if wanted else None) if isinstance(wanted, bool) else wanted

    @model_validator(mode="after")
    def _publishes_only_what_is_gated(self) -> Self:
        if self.publish and not (self.perplexity or self.evaluate):
            raise ValueError("publish needs evidence: add perplexity, evaluate, or both")
        return self

    @model_validator(mode="after")
    def _searches_in_memory(self) -> Self:
        if self.sweep and self.evaluate and self.evaluate.backend != "hf":
            raise ValueError("a sweep asks networks in memory: evaluate.backend must be hf")
        return self

    @model_validator(mode="after")
    def _shows_only_whom_the_licenses_were_asked_for(self) -> Self:
        public = self.publish is not None and self.publish.is_public
        if public and self.checks.license.visibility != "public":
            raise ValueError("publish is public, so checks.license.visibility must be public too")
        return self

    @model_validator(mode="after")
    def _proposes_last(self) -> Self:
        if AUTO in self.remedies[:-1]:
            raise ValueError("remedies: 'auto' stands last: what a refusal proposes is tried after what is written")
        return self

    @model_validator(mode="after")
    def _tunes_after_what_is_written(self) -> Self:
        tuning = [one for one in self.remedies if isinstance(one, dict) and "tune" in one]
        if wrong := next((one for one in tuning if one != TUNE), None):
            raise ValueError(f"remedies: {wrong!r:.60}: what can be searched for is the scale: 'tune: scale'")
        if tuning and (len(tuning) > 1 or next(one for one in reversed(self.remedies) if one != AUTO) != TUNE):
            raise ValueError("remedies: 'tune: scale' stands after all that is written, once")
        return self

    @property
    def tuning(self) -> Profile | None:
        """The profile of the search that the remedy ``tune: scale`` stands for; None where it is not among them.

        Raises:
            InvalidInput: for a profile without tasks, and a recipe without one scale.
        """
        return self._tuning

    @cached_property
    def _tuning(self) -> Profile | None:
        return self.tuned(TuningSize()) if TUNE in self.remedies else None

    def tuned(self, size: TuningSize) -> Profile:
        """The same profile with a search for the scale of its merge, over the documents of its tasks.

        Raises:
            InvalidInput: for a profile that searches already or has no task, and a recipe without one scale.
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
        """How many remedies that follow from refusals are tried at most, after those that are written."""
        return MOST_PROPOSED if AUTO in self.remedies else 0

    def remedied(self, choice: RemedyChoice | None) -> Profile:
        """The same profile, of which a run tries only the ``written`` remedies, or then also those that a refusal
        proposes (``auto``), whatever it says itself; None: what it says."""
        if choice is None or (choice == AUTO) == bool(self.proposed):
            return self
        written = tuple(one for one in self.remedies if one != AUTO)
        return self.model_copy(update={"remedies": (*written, AUTO) if choice == AUTO else written})

    def candidates(self) -> tuple[Candidate, ...]:
        """The recipe, then the remedies in their order. Read and parsed once.

        Raises:
            InvalidInput: for a recipe that cannot mean anything, or a change that does not fit the recipe.
        """
        return self._candidates

    @property
    def is_as_read(self) -> bool:
        """Whether the recipes that it names are what was read of them, if they were."""
        if self.__dict__.get("_client_round") is not None:  # Clients come and go.
            return False
        return "_recipes_read" not in self.__dict__ or self._recipes_read == self._recipe_files()

    @cached_property
    def _recipes_read(self) -> dict[Path, FileIdentity | None]:
        """The files of recipes as they were before they were read."""
        return self._recipe_files()

    def _recipe_files(self) -> dict[Path, FileIdentity | None]:
        files = [self.root / one for one in (self.recipe, *self.remedies) if isinstance(one, Path)]
        return {file: _identity_of(file) for file in files}

    @cached_property
    def _candidates(self) -> tuple[Candidate, ...]:
        _ = self._recipes_read
        own: Written | SearchedRecipe | Candidate = self.recipe
        if self.sweep:
            searched = self.searched_recipe()
            own = replace(searched, document=start_recipe(searched.document, self.sweep, searched.where))
        written = [one for one in self.remedies if one not in (AUTO, TUNE)]
        if (tonight := self._client_round) is not None:
            read = recipe_of_documents(tonight[0].documents, tonight[1], f"profile {self.name}: recipe")
            own = replace(read, text=tonight[0].text + read.text, remarks=tonight[0].remarks)
        return candidate_recipes(own, written, self.root, f"profile {self.name}")

    @cached_property
    def _client_round(self) -> tuple[ClientRound, Path] | None:
        """The round of clients that the recipe asks for, and what its paths are relative to; None for other recipes."""
        if (found := clients_document(self.recipe, self.root)) is None:
            return None
        document, directory = found
        released = self.publish.current(self.root) if self.publish else None
        made = client_round(
            document,
            directory,
            f"profile {self.name}: recipe",
            released=released.directory if released else None,
            digest_of=lambda place: client_digest(place, store().hashes),
            kept_place=find_optimizer_state,
        )
        return made, directory

    def searched_recipe(self) -> SearchedRecipe:
        """The recipe with its holes open. Read once.

        Raises:
            InvalidInput: for a recipe that cannot be read, or of several documents.
        """
        return self._searched_recipe

    @cached_property
    def _searched_recipe(self) -> SearchedRecipe:
        _ = self._recipes_read
        return searched_recipe(self.recipe, self.root, f"profile {self.name}")

    def check_references(self, parents: Sequence[ResolvedCheckpoint]) -> None:
        """See that every guard, and the judge, holds the merge against a model that there is.

        Raises:
            InvalidInput: naming the first that does not, with a suggestion.
        """
        check_references(self.evaluate, self.perplexity, self.judge, parents)

    def pin_evidence(
        self, parents: Sequence[ResolvedCheckpoint], hashes: HashMemo, made: Collection[str] | None = None
    ) -> Evidence:
        """Tasks and documents by content, after seeing that every guard names a parent; and in which format models are
        computed on this machine.

        Args:
            made: Formats of what is measured beside the parents; None: those that the recipes ask for.

        Raises:
            InvalidInput: for a guard, a task or a file that is not there.
        """
        self.check_references(parents)
        evidence = pin_evidence(self.evaluate, self.perplexity, self.judge, self.root, hashes)
        if without_units := formats_without_units(device_kind()):
            others = self._written_dtypes() if made is None else made
            evidence = with_supported_dtype(evidence, {*stored_dtypes(parents), *others}, without_units)
        searching = self if self.sweep else self.tuning
        if searching is None:
            return evidence
        swept = searching.pin_sweep(evidence, hashes)
        return evidence._replace(
            tasks=swept.left_for_the_gate(evidence.tasks), documents=swept.text_of("gate") or evidence.documents
        )

    def _written_dtypes(self) -> set[str]:
        """Formats that the recipes ask for."""
        written = (one.recipe.out_dtype or one.recipe.dtype for one in self.candidates())
        return {dtype.torch_name for dtype in written if dtype}

    def sweep_view(self) -> str | None:
        """Where the study of a sweep is written for others to look at: a file, or an address. None: nowhere."""
        said = self.sweep.view if self.sweep else None
        return said if said is None or "://" in said else str(self.root / said)

    def with_recipe(self, recipe: Mapping[str, Any]) -> Profile:
        """The same profile for another recipe, whose paths are relative to ``root``; without remedies."""
        return Profile.model_validate({**dict(self), "recipe": dict(recipe), "remedies": ()})

    def pin_sweep(self, evidence: Evidence, hashes: HashMemo) -> SweepEvidence:
        """What the sweep asks about, by content, and how the documents are divided.

        Raises:
            InvalidInput: for a task that is not there, or terms that contradict each other.
        """
        assert self.sweep is not None
        guarded = {guard.task: guard.cluster_by for guard in (self.evaluate.tasks if self.evaluate else ())}
        text = evidence.documents and evidence.documents.model_copy(update={"only": None})
        data = self.evaluate.data if self.evaluate else None
        return pin_sweep(self.sweep, text, guarded, self.root, hashes, data, evidence.scoring.num_fewshot)

    def asked_tasks(self) -> tuple[str, ...]:
        """Every task of the profile as it is written, each once: what the gate asks, and what a sweep searches."""
        guarded = [guard.task for guard in self.evaluate.tasks] if self.evaluate else []
        return tuple(dict.fromkeys([*guarded, *(self.sweep.asked_tasks if self.sweep else ())]))

    def dtypes_to_evaluate(self) -> tuple[str, ...]:
        """In which the models will be loaded on this machine to be measured, as it is written."""
        found = [str(self.perplexity.dtype)] if self.perplexity else []
        if self.evaluate and find_backend(self.evaluate.scoring.backend).loads_here:
            found.append(self.evaluate.scoring.dtype)
        return tuple(found)


def load_profile(source: Path | Profile, overrides: Sequence[str] = ()) -> Profile:
    """The typed profile.

    Args:
        overrides: Of a file: what this run is told otherwise, as ``KEY=VALUE``.

    Raises:
        InvalidInput: when the file cannot be read, is no YAML, or says something a profile cannot say.
    """
    if isinstance(source, Profile):
        said = with_overrides({**dict(source), "root": source.root.absolute()}, overrides)
        return parse_profile({**said, "overrides": (*source.overrides, *overrides)}, f"profile {source.name}")
    try:
        status = source.stat()
    except OSError:  # whoever reads it says what is wrong with it
        return _read_profile(source, tuple(overrides))
    identity = (status.st_ino, status.st_size, status.st_mtime_ns)
    profile = _profile_once(source.absolute(), source, tuple(overrides), identity)
    if profile.is_as_read:
        return profile
    _profile_once.cache_clear()
    return _profile_once(source.absolute(), source, tuple(overrides), identity)


@lru_cache(maxsize=8)
def _profile_once(file: Path, source: Path, overrides: tuple[str, ...], identity: tuple[int, ...]) -> Profile:
    """A profile is read once in a run: the command line wants its headline, the flow the rest."""
    return _read_profile(source, overrides)


def _read_profile(source: Path, overrides: tuple[str, ...]) -> Profile:
    data = _mapping_in(source)
    if _means_recipe(data):
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
    said = with_overrides({"root": source.absolute().parent, **data}, overrides)
    where = " ".join([str(source), *(f"--set {one}" for one in overrides)])
    return parse_profile({**said, "overrides": overrides}, where)


def _identity_of(file: Path) -> FileIdentity | None:
    """None where no file can be: whoever reads it says why."""
    try:
        return file_identity(file)
    except (OSError, ValueError):
        return None


def profile_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a profile as a person writes it, for editors."""
    schema = Profile.model_json_schema(mode="validation")
    del schema["properties"]["root"]  # follows from where the file lies
    schema["title"] = "mergegate: a profile"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def name_in(file: Path) -> str:
    """The name that a profile file gives itself, also one that is no valid profile otherwise; empty where it has none.

    Raises:
        InvalidInput: when the file cannot be read, or holds no mapping.
    """
    name = _mapping_in(file).get("name")
    return name if isinstance(name, str) and is_release_name(name) else ""


def is_release_name(name: str) -> bool:
    """Whether a profile may be called so."""
    return re.fullmatch(_NAME, name) is not None


def is_recipe(file: Path) -> bool:
    """Whether the file holds a recipe rather than a profile, which says one thing, and not ``merge_method``.

    Raises:
        InvalidInput: as ``load_profile``.
    """
    return any(isinstance(one, Mapping) and _means_recipe(one) for one in _documents_in(file))


def _means_recipe(document: Mapping[str, object]) -> bool:
    """Whether a document has keys that only recipes have, so that a recipe with a misspelled method is read as one."""
    if "merge_method" in document or "experts" in document:
        return True
    return "recipe" not in document and not document.keys().isdisjoint(("models", "slices", "modules"))


def parse_profile(data: Mapping[str, object], where: str) -> Profile:
    """A profile from plain data; ``where`` is what messages call it.

    Raises:
        InvalidInput: with every fault of it at once.
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
    """What pydantic found wrong with a file of settings, all of it at once, in words for people.

    Args:
        where: What messages call the file.
        model: The settings; what they know is suggested for what they do not.
    """
    places = [fault["loc"] for fault in error.errors()]
    # A list with one bad item is also "too short"; of a place and what lies inside it, only the inside is news.
    inside = {place[:depth] for place in places for depth in range(len(place))}
    each = [(_place(fault["loc"]), *_fault(fault, model)) for fault in error.errors() if fault["loc"] not in inside]
    # What may be a file or a mapping is wrong in two ways at one place.
    ways: dict[str, list[tuple[str, str]]] = {}
    for place, said, remedy in each:
        ways.setdefault(place, []).append((said, remedy))
    faults = [(place, join_expectations([said for said, _ in both]), both[0][1]) for place, both in ways.items()]
    if len(faults) == 1:
        (place, found, remedy) = faults[0]
        return InvalidInput(f"{where}: {place}" if place else where, found=found, remedy=remedy)
    lines = "".join(f"\n  {place}: {found}" + (f"; {remedy}" if remedy else "") for place, found, remedy in faults)
    return InvalidInput(where, found=f"{len(faults)} faults{lines}")


def _fault(fault: Any, model: type[BaseModel]) -> tuple[str, str]:
    """What is wrong and what to do, in our words where pydantic's are for programmers."""
    *parents, last = fault["loc"] or ("",)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {last!r}", suggest(str(last), _keys_at(model, parents))
    if fault["type"] == "missing":
        return "is missing", "add it"
    message = expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
    # Of a whole section the place says enough; some messages say themselves what was found.
    is_said = isinstance(fault["input"], Mapping | BaseModel) or repr(fault["input"]) in message
    return message if is_said else f"{format_value(fault['input'])}: {message}", ""


def _place(location: tuple[int | str, ...]) -> str:
    """``('evaluate', 'tasks', 0, 'max_drop')`` as ``evaluate.tasks[0].max_drop``."""
    text = ""
    for before, part in zip((None, *location), location, strict=False):
        if before == "publish" and part in publish_targets():  # pydantic's word for which of the targets it is
            continue
        if isinstance(part, str) and ("[" in part or part.startswith("function-")):  # for which type of a union
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _keys_at(model: type[BaseModel], location: list[int | str]) -> list[str]:
    """Keys that the settings at ``location`` know, found by walking the types."""
    for before, part in zip((None, *location), location, strict=False):
        if isinstance(part, int):
            continue
        if before == "publish" and part in publish_targets():
            model = publish_targets()[part]
            continue
        field = model.model_fields.get(part)
        inner = _settings_in(field.annotation) if field else None
        if inner is None:
            break
        model = inner
    return [name for name in model.model_fields if name not in ("root", "overrides")]


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for part in typing.get_args(annotation) if (inner := _settings_in(part))), None)
