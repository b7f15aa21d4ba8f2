"""Read a recipe, YAML in mergekit's dialect, into a frozen, typed value.

A recipe that mergekit accepts is accepted. What mergekit ignores (unknown keys, misspelled or misplaced parameters) is
a warning in :attr:`Recipe.findings`. What has no meaning is a fault. All faults and warnings of a recipe are reported
at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint import DType, recipe_dtype
from mergegate.merge_core.errors import Finding, FindingLog, InvalidInput
from mergegate.merge_core.methods import UPCYCLING, Method, find_method, merge_methods
from mergegate.merge_core.parsing import parse_yaml, read_yaml
from mergegate.merge_core.recipe.adapter_output import AdapterOutput, parse_output
from mergegate.merge_core.recipe.calibration_texts import (
    CalibrationReading,
    CalibrationRequest,
    InputMeasurements,
    parse_reading,
    parse_text,
    require_texts,
)
from mergegate.merge_core.recipe.keys import RECIPE_KEYS, known_mapping, plain_mapping
from mergegate.merge_core.recipe.mixture import MIXTURE_KEYS, Mixture, parse_mixture
from mergegate.merge_core.recipe.parameters import Parameters, Setting, parse_parameters, value_for
from mergegate.merge_core.recipe.reference import CheckpointRef, parse_reference
from mergegate.merge_core.recipe.tokenizer_choice import TokenizerChoice, parse_tokenizer_choice

_EXPECTED = "a recipe in YAML"
# Each is looked for, on the Hub too.
_MAX_MODELS = 256
_FORMS = ("models", "slices", "modules")
_MODEL_KEYS = ("model", "parameters", "text")
_LAYERED_KEYS = ("model", "layer_range", "parameters", "text")
_SLICE_KEYS = ("sources", "base_model", "parameters", "residual_weight")
# What mergekit reads as absent, beside null.
_EMPTY: Mapping[str, object] = {
    "models": [],
    "slices": [],
    "modules": {},
    "dtype": "",
    "out_dtype": "",
    "chat_template": "",
}
# Of a round of clients, from which a profile makes a recipe.
CLIENT_KEYS = ("clients", "samples", "at_least", "momentum", "adam")


@dataclass(frozen=True)
class Source:
    """One input of a slice: a model, which of its layers (half-open, None: all), its own parameters, its own text."""

    model: CheckpointRef
    layers: tuple[int, int] | None
    parameters: Parameters
    text: str | None = None


@dataclass(frozen=True)
class Slice:
    """A run of output layers made from the same run of layers of each source."""

    sources: tuple[Source, ...]
    base: CheckpointRef | None
    parameters: Parameters
    where: str


@dataclass(frozen=True)
class Module:
    """A part of a network with layers of its own; ``name`` is None for "the whole network"."""

    name: str | None
    slices: tuple[Slice, ...]
    parameters: Parameters


@dataclass(frozen=True)
class ModelPlace:
    """Where a model lies among the others that are merged.

    Args:
        length: Of its task vector, over the median of all; None where it holds what is no number.
        apart: Median distance to the other models, over that median; None where there are none.
        left_out: Why it does not take part; empty where it does.
    """

    length: float | None
    apart: float | None
    left_out: str = ""


@dataclass(frozen=True)
class Recipe:
    """What to merge and how. Made by :func:`load_recipe`.

    Args:
        merge_method: Name of the method.
        modules: The network's parts; one unnamed part unless the recipe says ``modules``.
        base: ``base_model``.
        parameters: Top-level parameters.
        dtype: Wanted format of the result; ``out_dtype`` wins over it (arithmetic is float32 whatever they say).
        out_dtype: See ``dtype``.
        tokenizer: ``tokenizer_source`` or ``tokenizer``, None to keep the donor's.
        chat_template: As written.
        name: Name under which other documents of a multi-document recipe refer to this one.
        steps: The other documents of a multi-document recipe, in the order in which they can be computed.
        directory: Where relative paths are sought first (None for inline text).
        where: File or place for messages.
        align_experts: Whether experts of mixtures are renumbered so that they correspond to those of the donor.
        experts_in_order: Whether that has been done, see :func:`merge_core.architecture.experts.match_experts`.
        mixture: How dense models become a mixture of experts; None where models are merged. Then the sources are the
            base and all experts, and ``merge_method`` is that of :data:`merge_core.methods.UPCYCLING`.
        output: What is made instead of a model: an adapter of adapters on one base.
        reading: How the texts of its models are read, where the method reads some.
        measured: What they showed, by model, once they have been read.
        leave_out_beyond: Models whose task vector is more than so many times as long as the median one are left out,
            and such that hold NaN or infinity.
        places: Where each model lies among the others, once distances are known; sources and their weights are then
            those that count.
        findings: Warnings about this document. They do not count in keys: the same merge can have other warnings.
    """

    merge_method: str
    modules: tuple[Module, ...]
    base: CheckpointRef | None
    parameters: Parameters
    dtype: DType | None
    out_dtype: DType | None
    tokenizer: TokenizerChoice | None
    chat_template: str | None
    name: str | None
    steps: tuple[Recipe, ...]
    directory: Path | None
    where: str
    align_experts: bool = False
    experts_in_order: bool = False
    mixture: Mixture | None = None
    output: AdapterOutput | None = None
    reading: CalibrationReading = field(default_factory=CalibrationReading)
    measured: Mapping[str, InputMeasurements] | None = None
    leave_out_beyond: float | None = None
    places: Mapping[str, ModelPlace] | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Warnings about all documents, in the order of the file as far as documents need each other."""
        return tuple(finding for document in (*self.steps, self) for finding in document.findings)

    @property
    def method(self) -> Method:
        """The method itself."""
        if self.mixture is not None:
            return UPCYCLING
        return find_method(self.merge_method, f"{self.where}: merge_method")

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources of this document, in order."""
        return tuple(source for module in self.modules for cut in module.slices for source in cut.sources)

    @property
    def asks_distances(self) -> bool:
        """Whether it must be known how far its models are from each other."""
        by_distance = self.mixture is None and self.method.traits.by_distance
        return by_distance or self.leave_out_beyond is not None

    @property
    def every_place(self) -> dict[str, ModelPlace]:
        """Where models stood that were chosen by their distances, of all documents."""
        return {model: place for one in (*self.steps, self) for model, place in (one.places or {}).items()}

    @property
    def left_out(self) -> dict[str, str]:
        """Why models do not take part, as far as distances are known."""
        return {model: place.left_out for model, place in (self.places or {}).items() if place.left_out}

    def voice(self, model: str) -> float:
        """The weight that the recipe gives to a model as a whole."""
        weight = self.method.parameter("weight")
        scopes = next(one.parameters for one in self.sources if str(one.model) == model), self.parameters
        return float(value_for(weight, scopes, "", 0.0)) if weight else 1.0

    @property
    def texts(self) -> dict[CheckpointRef, str]:
        """The text of each model of this document that has one."""
        return {source.model: source.text for source in self.sources if source.text is not None}

    @property
    def asked_texts(self) -> tuple[CalibrationRequest, ...]:
        """What this document wants of its models' texts."""
        what = str(self.method.traits.reads_text)
        return tuple(CalibrationRequest(str(ref), text, what, self.reading) for ref, text in self.texts.items())

    def what_was_read(self) -> dict[CalibrationRequest, InputMeasurements]:
        """What models showed on their texts, as far as they have read them."""
        found: dict[CalibrationRequest, InputMeasurements] = {}
        for document in (*self.steps, self):
            known = document.measured or {}
            found |= {asked: known[asked.model] for asked in document.asked_texts if asked.model in known}
        return found

    @property
    def donor(self) -> CheckpointRef:
        """Who gives config, tokenizer and layout: the base, else the first model."""
        return self.base or self.sources[0].model

    def in_every_document(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """The recipe with ``change`` made in each of its documents; itself where that changes nothing."""
        steps, own = tuple(change(step) for step in self.steps), change(self)
        return self if own is self and steps == self.steps else replace(own, steps=steps)

    def unprepared(self) -> str:
        """What must be found out from weights before the merge, and has not been; empty when nothing is missing."""
        for document in (*self.steps, self):
            if document.align_experts and not document.experts_in_order:
                return "align_experts: the experts have not been matched"
            mixture = document.mixture
            if mixture is not None and mixture.asks_prompts and mixture.gates is None:
                return f"gate_mode {mixture.gate_mode}: the router rows have not been computed from the prompts"
            if document.asks_distances and document.places is None:
                return f"{document.merge_method}: the distances between the models have not been measured"
            if document.texts and document.measured is None:
                return f"{document.merge_method}: the models have not read their texts"
        return ""

    @property
    def states(self) -> tuple[str, ...]:
        """What stands in the place of models in any document and is none: what an optimizer keeps, its results or those
        of earlier merges."""
        found: dict[str, None] = {}
        for document in (*self.steps, self):
            first = None if document.mixture is not None else document.method.traits.states_from
            for cut in (cut for module in document.modules for cut in module.slices if first is not None):
                base = cut.base or document.base
                found |= dict.fromkeys([str(one.model) for one in cut.sources if one.model != base][first:])
        return tuple(found)

    def ending_with(self, name: str) -> Recipe:
        """The step called ``name`` as the result, after the steps that it needs."""
        result = next(step for step in self.steps if step.name == name)
        needed, kept = {str(ref) for ref in result.own_references()}, list[Recipe]()
        for step in reversed(self.steps):
            if step.name in needed and step is not result:
                kept.insert(0, step)
                needed |= {str(ref) for ref in step.own_references()}
        return replace(result, steps=tuple(kept))

    def own_references(self) -> tuple[CheckpointRef, ...]:
        """Every model this document names, in order; base and tokenizer last when they are not among the sources."""
        found = [source.model for module in self.modules for cut in module.slices for source in cut.sources]
        found += [cut.base for module in self.modules for cut in module.slices if cut.base]
        if self.base:
            found.append(self.base)
        if self.tokenizer and isinstance(self.tokenizer.source, CheckpointRef):
            found.append(self.tokenizer.source)
        return tuple(dict.fromkeys(found))

    def references(self) -> tuple[CheckpointRef, ...]:
        """Every checkpoint that must exist before the merge, in order; results of ``steps`` are not among them."""
        made = {step.name for step in self.steps}
        everything = [ref for document in (*self.steps, self) for ref in document.own_references()]
        return tuple(dict.fromkeys(ref for ref in everything if str(ref) not in made))

    def merged_references(self) -> tuple[CheckpointRef, ...]:
        """Those of ``references`` whose weights are merged: not what only gives tokenizer or configuration, and not a
        base that task vectors are only measured from, even where a recipe lists it among its models."""
        merged: dict[CheckpointRef, None] = {}
        for document in (*self.steps, self):
            method = document.method
            only_origin = method.base in ("required", "optional") and not method.traits.merges_base
            for cut in (cut for module in document.modules for cut in module.slices):
                base = cut.base or document.base
                merged |= {source.model: None for source in cut.sources if not (only_origin and source.model == base)}
                if base is not None and method.traits.merges_base:
                    merged[base] = None
        return tuple(ref for ref in self.references() if ref in merged and str(ref) not in self.states)

    def summary(self) -> str:
        """``ties of 2 over llama-base``."""
        models = {source.model for module in self.modules for cut in module.slices for source in cut.sources}
        if self.mixture is not None:
            shared = f" and {len(self.mixture.shared)} shared" if self.mixture.shared else ""
            return f"mixture of {len(self.mixture.experts)} experts{shared} over {self.base.name if self.base else ''}"
        others = models - {self.base} if self.base else models
        base = f" over {self.base.name}" if self.base and self.method.base in ("required", "optional") else ""
        cuts = sum(len(module.slices) for module in self.modules)
        slices = f" in {cuts} slices" if cuts > len(self.modules) else ""
        steps = f" after {len(self.steps)} steps" if self.steps else ""
        made = " adapters" if self.output else ""
        return f"{self.merge_method} of {len(others) if base else len(models)}{made}{base}{slices}{steps}"

    def content_key(self) -> dict[str, Any]:
        """What counts of a recipe in a key."""
        return self.canonical()

    def canonical(self) -> dict[str, Any]:
        """JSON-able form of everything that decides the result; equal for recipes that mean the same text."""
        # Keys that came later are there where they say something: what was made before keeps its name.
        later: dict[str, Any] = {"align_experts": True} if self.align_experts else {}
        if self.mixture is not None:
            later["mixture"] = self.mixture.canonical()
        if self.output is not None:
            later["output"] = self.output.canonical()
        if self.places is not None:
            later["chosen"] = {"left_out": sorted(self.left_out)}
        elif self.leave_out_beyond is not None:
            later["leave_out_beyond"] = self.leave_out_beyond
        if self.measured is not None:  # Then it does not matter what the texts are called.
            later["measured"] = {model: found.digest for model, found in self.measured.items()}
        elif texts := self.texts:
            later["texts"] = {str(model): text for model, text in texts.items()}
            later["statistics"] = self.reading.canonical()
        return {
            **later,
            "merge_method": self.merge_method,
            "base_model": str(self.base) if self.base else None,
            "parameters": self.parameters.canonical(),
            "dtype": self.dtype.torch_name if self.dtype else None,
            "out_dtype": self.out_dtype.torch_name if self.out_dtype else None,
            "tokenizer_source": str(self.tokenizer.source) if self.tokenizer else None,
            **(self.tokenizer.further() if self.tokenizer else {}),
            "chat_template": self.chat_template,
            "modules": [
                {
                    "name": module.name,
                    "parameters": module.parameters.canonical(),
                    "slices": [
                        {
                            "base_model": str(cut.base) if cut.base else None,
                            "parameters": cut.parameters.canonical(),
                            "sources": [
                                {
                                    "model": str(source.model),
                                    "layer_range": list(source.layers) if source.layers else None,
                                    "parameters": source.parameters.canonical(),
                                }
                                for source in cut.sources
                            ],
                        }
                        for cut in module.slices
                    ],
                }
                for module in self.modules
            ],
            "name": self.name,
            "steps": [step.canonical() for step in self.steps],
        }


def load_recipe(source: Path | str | Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Read a recipe from a file (Path), from YAML text (str) or from a mapping that is inline in a profile.

    Args:
        source: The recipe. A Path also makes its directory the first one in which relative model paths are searched.
        where: Name of the recipe for messages if ``source`` is not a file.

    Raises:
        InvalidInput: The recipe has faults: all of them, and the warnings, with a suggestion for a misspelled word.
    """
    directory = None
    if isinstance(source, Path):
        where, documents = str(source), read_yaml(source, _EXPECTED)
        directory = source.resolve().parent
    else:
        documents = parse_yaml(source, where, _EXPECTED) if isinstance(source, str) else [source]
    if not documents:
        raise InvalidInput(where, found="nothing", expected="a recipe with 'merge_method' and 'models'")
    recipes, findings = [], FindingLog()
    for number, document in enumerate(documents, 1):
        place = where if len(documents) == 1 else f"{where} (document {number})"
        log = FindingLog()
        with log.collect():
            recipes.append(_document(document, place, directory, log))
        if not log.blocks:
            recipes[-1] = replace(recipes[-1], findings=tuple(log.findings))
        findings.findings += log.findings
    findings.raise_faults(where)
    recipe = recipes[0]
    with findings.collect():
        recipe = recipes[0] if len(recipes) == 1 else _in_order(recipes, where)
        if (count := len(recipe.references())) > _MAX_MODELS:
            raise InvalidInput(where, found=f"{count} models", expected=f"at most {_MAX_MODELS}")
    for document in (*recipe.steps, recipe):
        with findings.collect():
            _check_steps(document, {str(step.name) for step in recipe.steps})
    findings.raise_faults(where)
    return recipe


def _check_steps(document: Recipe, steps: Collection[str]) -> None:
    """Raise InvalidInput if a document needs more of a step's result than its name before the merge."""
    base = document.base
    asks_base = document.mixture is not None and document.mixture.asks_prompts
    if asks_base and base is not None and (base.adapter or str(base) in steps):
        raise InvalidInput(
            f"{document.where}: base_model",
            found=f"{base}, {'with an adapter' if base.adapter else 'the result of a step'}",
            expected="a whole model that can be asked before the merge: gate_mode makes router rows of prompts",
            remedy="set gate_mode: random, or make the base first and name its directory",
        )
    needed = [source.model for source in document.sources] if document.asks_distances else list(document.texts)
    if step := next((model for model in needed if str(model) in steps), None):
        raise InvalidInput(
            f"{document.where}: {step}",
            found="the result of a step",
            expected="a model that can be looked at before the merge"
            if document.asks_distances
            else "a model that can read its text before the merge",
            remedy="make it first and name its directory",
        )


@dataclass(frozen=True)
class _Context:
    """What the parts of a document are read with.

    Args:
        method: Merge method.
        base: Base model of the document or, inside a slice that has its own, of the slice.
        log: Receives findings.
        base_is_faulty: Whether there is a ``base_model`` that could not be read.
    """

    method: Method
    base: CheckpointRef | None
    log: FindingLog
    base_is_faulty: bool = False

    def with_base(self, content: Mapping[str, Any], where: str) -> _Context:
        """Return the context inside a mapping that may have a ``base_model``."""
        if "base_model" not in content:
            return self
        with self.log.collect():
            return replace(self, base=parse_reference(content["base_model"], where, self.log), base_is_faulty=False)
        return replace(self, base=None, base_is_faulty=True)

    def is_base(self, model: CheckpointRef | None) -> bool:
        """Whether a model is the one that task vectors are measured from."""
        return model is not None and model == self.base and self.method.base in ("required", "optional")

    def parameters(self, content: Mapping[str, Any], where: str, *, model: CheckpointRef | None = None) -> Parameters:
        """Read the ``parameters`` of a mapping, which is at ``model`` or, without one, speaks of all models."""
        value, place = content.get("parameters"), f"{where}parameters"
        with self.log.collect():
            return parse_parameters(
                value, self.method, place, self.log, per_model=model is not None, is_base=self.is_base(model)
            )
        # After a fault nothing more is reported as missing.
        return Parameters(tuple(Setting(parameter.name, ()) for parameter in self.method.parameters))


def _document(value: object, where: str, directory: Path | None, log: FindingLog) -> Recipe:
    """Read one document. If ``log`` blocks afterwards, what is returned is incomplete."""
    written = {key: inner for key, inner in plain_mapping(value, where).items() if inner != _EMPTY.get(str(key), ...)}
    forms = [key for key in _FORMS if written.get(key) is not None]
    if written.get("experts") is not None and not forms:
        return _mixture_of(written, where, directory, log)
    if "clients" in written:
        raise InvalidInput(
            f"{where}: clients",
            found="a round of clients",
            expected="models: what a round begins with is the last release of a profile",
            remedy="name it as the recipe of a profile, and run that",
        )
    method = _method_of(written, where, log)
    content = known_mapping(written, where, RECIPE_KEYS, log, separator=": ", method=method)
    context = _Context(method, None, log).with_base(content, f"{where}: base_model")
    if len(forms) != 1:
        log.fault(
            where,
            found=" and ".join(forms) if forms else "no models",
            expected="exactly one of 'models', 'slices', 'modules'",
            remedy="remove the others" if forms else "list what is merged under 'models'",
        )
    modules = _modules(content, forms, context, where)
    bases = [cut.base for module in modules for cut in module.slices]
    if method.base == "required" and not context.base_is_faulty and (None in bases or (not bases and not context.base)):
        log.fault(
            where,
            found="no 'base_model'",
            expected=f"the model that {method.name} measures differences from",
            remedy="add 'base_model: MODEL', the model that the others were fine-tuned from",
        )
    recipe = Recipe(
        merge_method=method.name,
        modules=modules,
        base=context.base,
        parameters=context.parameters(content, f"{where}: "),
        dtype=_format(content, "dtype", where, log),
        out_dtype=_format(content, "out_dtype", where, log),
        tokenizer=None,
        chat_template=_text(content, "chat_template", where, log),
        name=_name(content, where, log),
        steps=(),
        directory=directory,
        where=where,
    )
    with log.collect():
        recipe = replace(recipe, tokenizer=parse_tokenizer_choice(content, where, log))
    with log.collect():
        recipe = replace(recipe, align_experts=_switch(content.get("align_experts", False), f"{where}: align_experts"))
    with log.collect():
        recipe = replace(recipe, reading=parse_reading(content.get("statistics"), method, f"{where}: statistics"))
    with log.collect():
        recipe = replace(recipe, leave_out_beyond=_times(content.get("leave_out_beyond"), f"{where}: leave_out_beyond"))
    if merge_methods().get(method.name) is not method:
        return recipe  # What depends on the method cannot be checked.
    _check_required(recipe, method, log)
    with log.collect():
        _check_texts(recipe, method)
    with log.collect():
        _check_distances(recipe, method, sliced=forms != ["models"])
    with log.collect():
        output = parse_output(content, method, context.base, [source.model for source in recipe.sources], f"{where}: ")
        if output is not None and recipe.asks_distances:
            raise InvalidInput(
                f"{where}: leave_out_beyond",
                found="of a recipe whose result is an adapter",
                expected="whole models: distances are between those",
                remedy="leave one of the two out",
            )
        recipe = replace(recipe, output=output)
    return recipe


def _method_of(content: Mapping[str, Any], where: str, log: FindingLog) -> Method:
    """Return the method of a document; if it is unknown, the likeliest one, so that the rest can be checked."""
    name = content.get("merge_method")
    if name is None:
        log.fault(
            where,
            found="no 'merge_method'",
            expected="the name of a merge method",
            remedy="add it; 'mergegate methods' lists them",
        )
    with log.collect():
        if name is not None:
            return find_method(name, f"{where}: merge_method")
    methods = merge_methods()
    if near := get_close_matches(str(name), methods, n=1, cutoff=0.6):
        return methods[near[0]]
    every = {parameter.name: parameter for method in methods.values() for parameter in method.parameters}
    lenient = (replace(one, scope="input", default=None, minimum=None, maximum=None) for one in every.values())
    some = next(iter(methods.values()))
    return replace(some, name="any method", base="optional", models=(1, None), parameters=tuple(lenient))


def _mixture_of(written: Mapping[str, Any], where: str, directory: Path | None, log: FindingLog) -> Recipe:
    """Read a document that makes a mixture of experts: its sources are the base and all experts, each once."""
    if written.get("merge_method") is not None:
        log.warn(
            f"{where}: merge_method",
            found=f"{written['merge_method']!r:.60}, which mergegate ignores in a mixture of experts, as mergekit does",
            expected="no merge method",
            remedy="remove it",
        )
    content = known_mapping(
        {key: value for key, value in written.items() if key not in ("merge_method", *_FORMS)},
        where,
        MIXTURE_KEYS,
        log,
        separator=": ",
        required=("gate_mode", "experts_per_token"),
    )
    mixture = parse_mixture(content, where, log)
    dtype, out_dtype = _format(content, "dtype", where, log), _format(content, "out_dtype", where, log)
    template, name = _text(content, "chat_template", where, log), _name(content, where, log)
    if content.get("base_model") is None:
        raise InvalidInput(
            where,
            found="no 'base_model'",
            expected="the dense model that gives attention, norms, embeddings and tokenizer",
            remedy="add 'base_model: MODEL'",
        )
    base = parse_reference(content["base_model"], f"{where}: base_model", log)
    models = dict.fromkeys([base, *(expert.model for expert in mixture.everybody)])
    sources = tuple(Source(model, None, Parameters()) for model in models)
    return Recipe(
        merge_method=UPCYCLING.name,
        modules=(Module(None, (Slice(sources, base, Parameters(), f"{where}: experts"),), Parameters()),),
        base=base,
        parameters=Parameters(),
        dtype=dtype,
        out_dtype=out_dtype,
        tokenizer=None,
        chat_template=template,
        name=name,
        steps=(),
        directory=directory,
        where=where,
        mixture=mixture,
    )


def _format(content: Mapping[str, Any], key: str, where: str, log: FindingLog) -> DType | None:
    with log.collect():
        return recipe_dtype(content[key], f"{where}: {key}") if key in content else None
    return None


def _switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(where, found=f"{value!r:.60}", expected="true or false")
    return value


def _modules(content: Mapping[str, Any], forms: Sequence[str], context: _Context, where: str) -> tuple[Module, ...]:
    modules = []
    if "modules" in forms:
        entries: Mapping[str, Any] = {}
        with context.log.collect():
            entries = plain_mapping(content["modules"], f"{where}: modules")
        for name, item in entries.items():
            with context.log.collect():
                modules.append(_module(str(name), item, context, f"{where}: modules.{name}"))
    elif forms:
        modules.append(Module(None, _slices(content, context, f"{where}: "), Parameters()))
    return tuple(modules)


def _module(name: str, value: object, context: _Context, where: str) -> Module:
    written = {key: inner for key, inner in plain_mapping(value, where).items() if inner != _EMPTY.get(str(key), ...)}
    keys = ("models", "slices", "parameters")
    content = known_mapping(written, where, keys, context.log, method=context.method)
    if ("models" in content) == ("slices" in content):
        found = "models and slices" if "models" in content else "no models"
        raise InvalidInput(where, found=found, expected="either 'models' or 'slices'")
    return Module(name, _slices(content, context, f"{where}."), context.parameters(content, f"{where}."))


def _slices(content: Mapping[str, Any], context: _Context, prefix: str) -> tuple[Slice, ...]:
    """Read the slices of a document or module; one whose sources cannot be read is left out after the fault."""
    log = context.log
    if "models" in content:
        place = f"{prefix}models"
        sources = _sources(content["models"], context, place, layered=False)
        return (_slice(sources, context, Parameters(), place, append_base=True),)
    place, slices = f"{prefix}slices", []
    for index, item in enumerate(_list(content["slices"], place, log)):
        where = f"{place}[{index}]"
        with log.collect():
            entry = known_mapping(item, where, _SLICE_KEYS, log, method=context.method)
            if "residual_weight" in entry:
                log.warn(
                    f"{where}.residual_weight",
                    found="a key without effect",
                    expected="nothing: mergekit never used it, and mergegate does not either",
                    remedy="remove it",
                )
            inner = context.with_base(entry, f"{where}.base_model")
            sources = _sources(entry.get("sources"), inner, f"{where}.sources", layered=True)
            parameters = inner.parameters(entry, f"{where}.")
            append_base = context.method.base in ("required", "optional")
            slices.append(_slice(sources, inner, parameters, where, append_base=append_base))
    # An empty first or last slice names the model whose embeddings, or whose norm and head, the result gets.
    if slices and all(
        first == end for cut in slices for source in cut.sources for first, end in [source.layers or (0, 1)]
    ):
        log.fault(
            place,
            found="every layer_range is empty",
            expected="at least one layer in the result",
            remedy="write layer_range: [first, end] with first < end in at least one slice",
        )
    return tuple(slices)


def _slice(
    readable: Sequence[Source | None], context: _Context, parameters: Parameters, where: str, *, append_base: bool
) -> Slice:
    """Put the sources of a slice together, with the base where the method needs it; None is one with a fault."""
    method, base, log = context.method, context.base, context.log
    sources = [source for source in readable if source is not None]
    models = [source.model for source in sources]
    is_sound = len(sources) == len(readable) > 0 and not context.base_is_faulty
    for model, times in Counter(models).items():
        if times > 1:
            is_sound = False
            log.fault(where, found=f"{model} twice", expected="each model once", remedy="add up its weights")
    ranges = {(source.layers[1] - source.layers[0]) for source in sources if source.layers}
    if len(ranges) > 1:
        log.fault(
            where,
            found=f"layer ranges of {', '.join(str(length) for length in sorted(ranges))} layers",
            expected="as many layers from every source",
        )
    # Next to several models, a donor only gives config and tokenizer; next to a single one it is the other end.
    if base is not None and base not in models and append_base and (method.base != "donor" or len(models) == 1):
        layers = {source.layers for source in sources}
        if len(layers) > 1:
            is_sound = False
            log.fault(
                where,
                found=f"the base {base} is not among the sources, and they use different layers",
                expected="the base as a source, with its layer_range",
                remedy=f"add '- {{model: {base}, layer_range: [FIRST, END]}}' to the sources",
            )
        elif layers:
            sources = [*sources, Source(base, layers.pop(), Parameters())]
            models.append(base)
    has_base = base is not None and base in models and method.base in ("required", "optional")
    others = len(models) - has_base
    low, high = method.models
    if is_sound and (others < low or (high is not None and others > high)):
        limit = f"at least {low}" if high is None else f"{low}" if low == high else f"{low} to {high}"
        beside = " beside the base" if has_base else ""
        log.fault(
            where,
            found=f"{others} model{'s' if others != 1 else ''}{beside}: {', '.join(map(str, models))}",
            expected=f"{method.name} takes {limit}{beside}",
        )
    return Slice(tuple(sources), base, parameters, where)


def _sources(value: object, context: _Context, where: str, *, layered: bool) -> list[Source | None]:
    """Read the models of a slice; None is one with a fault."""
    sources: list[Source | None] = []
    for index, item in enumerate(_list(value, where, context.log)):
        sources.append(None)
        with context.log.collect():
            sources[-1] = _source(item, context, f"{where}[{index}]", layered=layered)
    return sources


def _source(item: object, context: _Context, where: str, *, layered: bool) -> Source | None:
    log, keys = context.log, _LAYERED_KEYS if layered else _MODEL_KEYS
    if isinstance(item, str):
        raise InvalidInput(where, found=f"{item!r:.60}", expected="a mapping", remedy=f"write '- model: {item}'")
    content = known_mapping(item, where, keys, log, method=context.method)
    model, layers, text = None, None, None
    if "model" not in content:
        log.fault(where, found="no 'model'", expected="{model: path or org/name}", remedy="add it")
    with log.collect():
        model = parse_reference(content["model"], f"{where}.model", log) if "model" in content else None
    with log.collect():
        layers = _layer_range(content.get("layer_range"), f"{where}.layer_range") if layered else None
    is_base = context.is_base(model)
    with log.collect():
        text = parse_text(content.get("text"), context.method, f"{where}.text", is_base=is_base)
    parameters = context.parameters(content, f"{where}.", model=model or CheckpointRef(""))
    return Source(model, layers, parameters, text) if model and (layers or not layered) else None


def _layer_range(value: object, where: str) -> tuple[int, int]:
    """Read ``[first, end]``; like mergekit, also with whole numbers that are written as text or with a point."""
    if isinstance(value, list) and len(value) == 2:
        ends = [int(item) if _is_whole(item) else -1 for item in value]
        if 0 <= ends[0] <= ends[1]:
            return ends[0], ends[1]
    raise InvalidInput(
        where, found=f"{value!r:.60}", expected="[first, end]: whole numbers, 0 <= first <= end, the end not included"
    )


def _is_whole(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdigit()
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _check_required(recipe: Recipe, method: Method, log: FindingLog) -> None:
    """Record each required parameter that is in no scope, before any checkpoint is opened."""
    required = [parameter for parameter in method.parameters if repr(parameter.default) == "required"]
    for module in recipe.modules:
        for cut in module.slices:
            wider = (cut.parameters, module.parameters, recipe.parameters)
            for parameter in required:
                if any(scope.get(parameter.name) for scope in wider):
                    continue
                lacking = [
                    f"not set for {source.model}"
                    for source in cut.sources
                    if not source.parameters.get(parameter.name)
                    and not (source.model == cut.base and parameter.scope == "non_base")
                ]
                for found in ["not set"] if parameter.scope == "shared" else lacking:
                    log.fault(
                        f"{cut.where}: {parameter.name}",
                        found=found,
                        expected=f"{method.name} needs it: {parameter.summary}",
                        remedy=f"add it under 'parameters' (check the indentation); e.g. {parameter.name}: 0.5",
                    )


def _check_texts(recipe: Recipe, method: Method) -> None:
    """Each model has one text, in every slice where it stands the same."""
    for cut in (cut for module in recipe.modules for cut in module.slices):
        base = cut.base if method.base in ("required", "optional") else None
        own = [source for source in cut.sources if source.model != base]
        require_texts([(str(source.model), source.text) for source in own], method, cut.where)
        for source in own:
            if source.text != recipe.texts.get(source.model):
                raise InvalidInput(
                    f"{cut.where}: {source.model}",
                    found=f"the text {source.text}, and elsewhere {recipe.texts.get(source.model)}",
                    expected="one text for each model",
                )


def _check_distances(recipe: Recipe, method: Method, *, sliced: bool) -> None:
    """Distances between whole models mean something, where the recipe asks for them."""
    if not recipe.asks_distances:
        return
    what = method.name if method.traits.by_distance else "leave_out_beyond"
    if recipe.base is None or method.base not in ("required", "optional"):
        raise InvalidInput(
            f"{recipe.where}: {what}",
            found="no base that task vectors are measured from",
            expected="a method on task vectors, with its base_model",
            remedy="name the base_model; in place of linear take task_arithmetic",
        )
    if sliced:
        raise InvalidInput(
            f"{recipe.where}: {what}", found="slices or modules", expected="whole models: 'models', not parts of them"
        )


def _times(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf:
        raise InvalidInput(where, found=f"{value!r:.60}", expected="a number from 1: times the median length")
    return float(value)


def _in_order(recipes: list[Recipe], where: str) -> Recipe:
    """Documents that name each other, sorted so that each comes after those it needs.

    The result is the one without a name; where all have names, the one that no other needs.
    """
    names = [recipe.name for recipe in recipes if recipe.name is not None]
    needed = {str(ref) for recipe in recipes for ref in recipe.own_references()}
    results = [recipe for recipe in recipes if recipe.name is None] or [
        recipe for recipe in recipes if recipe.name not in needed
    ]
    if len(results) != 1:
        raise InvalidInput(
            where,
            found=f"{len(results)} documents that no other needs",
            expected="exactly one: it is the result, the others are steps towards it",
        )
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise InvalidInput(where, found=f"the name {twice[0]!r} twice", expected="a name for each document")
    by_name = {recipe.name: recipe for recipe in recipes if recipe.name is not None}
    ordered: dict[str, Recipe] = {}
    open_names: list[str] = []

    def visit(recipe: Recipe) -> None:
        for ref in recipe.own_references():
            step = by_name.get(str(ref))
            if step is None or str(ref) in ordered:
                continue
            if str(ref) in open_names:
                raise InvalidInput(step.where, found=f"needs itself: {' -> '.join([*open_names, str(ref)])}")
            open_names.append(str(ref))
            visit(step)
            open_names.pop()
            ordered[str(ref)] = step

    visit(results[0])
    unused = [name for name in names if name not in ordered and name != results[0].name]
    if unused:
        raise InvalidInput(by_name[unused[0]].where, found=f"{unused[0]!r} is used by no other document")
    return replace(results[0], steps=tuple(ordered.values()))


def _list(value: object, where: str, log: FindingLog) -> list[Any]:
    if isinstance(value, (list, tuple)) and value:
        return list(value)
    log.fault(where, found=f"{value!r:.60}", expected="a list with at least one entry")
    return []


def _text(content: Mapping[str, Any], key: str, where: str, log: FindingLog) -> str | None:
    value = content.get(key)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    log.fault(f"{where}: {key}", found=f"{value!r:.60}", expected="text", remedy="write text, or remove the key")
    return None


def _name(content: Mapping[str, Any], where: str, log: FindingLog) -> str | None:
    """Return the name of a document; anything but text is ignored, as by mergekit, because nothing can refer to it."""
    value = content.get("name")
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    log.warn(f"{where}: name", found=f"{value!r:.60}, to which nothing can refer", expected="text", remedy="remove it")
    return None
