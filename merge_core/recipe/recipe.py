"""Read a recipe, YAML in mergekit's dialect, into a frozen, typed value.

mergegate accepts every recipe that mergekit accepts. Content that mergekit ignores (unknown keys, misspelled or
misplaced parameters) causes a warning in :attr:`Recipe.findings`. Invalid content is a fault. One error reports all
faults and warnings of a recipe together.
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
# mergegate looks up each model, possibly on the Hub.
_MAX_MODELS = 256
_FORMS = ("models", "slices", "modules")
_MODEL_KEYS = ("model", "parameters", "text")
_LAYERED_KEYS = ("model", "layer_range", "parameters", "text")
_SLICE_KEYS = ("sources", "base_model", "parameters", "residual_weight")
# Values that mergekit treats as absent, in addition to null.
_EMPTY: Mapping[str, object] = {
    "models": [],
    "slices": [],
    "modules": {},
    "dtype": "",
    "out_dtype": "",
    "chat_template": "",
}
# Keys of a client round. A profile expands such a round into a recipe.
CLIENT_KEYS = ("clients", "samples", "at_least", "momentum", "adam")


@dataclass(frozen=True)
class Source:
    """One input of a slice: a model, a range of its layers, its parameters and its text.

    The range does not include its end. If the range is None, the source has all layers of the model.
    """

    model: CheckpointRef
    layers: tuple[int, int] | None
    parameters: Parameters
    text: str | None = None


@dataclass(frozen=True)
class Slice:
    """Consecutive output layers that are merged from a layer range of the same length in each source."""

    sources: tuple[Source, ...]
    base: CheckpointRef | None
    parameters: Parameters
    location: str


@dataclass(frozen=True)
class Module:
    """A part of a network with its own layers. ``name`` is None if the module is the entire network."""

    name: str | None
    slices: tuple[Slice, ...]
    parameters: Parameters


@dataclass(frozen=True)
class ModelPlace:
    """Distance of one merged model from the base and from the other models.

    Args:
        length: Length of its task vector, divided by the median of all models. None if it contains NaN or infinity.
        apart: Median distance to the other models, divided by the same median. None if there are no other models.
        left_out: Reason for leaving the model out, or an empty string.
    """

    length: float | None
    apart: float | None
    left_out: str = ""


@dataclass(frozen=True)
class Recipe:
    """A parsed merge recipe: the models to merge and the way to merge them. Use :func:`load_recipe` to create one.

    Args:
        merge_method: Name of the method.
        modules: Parts of the network. A recipe without ``modules`` has one unnamed part.
        base: ``base_model``.
        parameters: Top-level parameters.
        dtype: Number format of the result unless ``out_dtype`` is set. Arithmetic is float32 in any case.
        out_dtype: Number format of the result. Takes precedence over ``dtype``.
        tokenizer: ``tokenizer_source`` or ``tokenizer``. None keeps the tokenizer of the donor.
        chat_template: Chat template, as written in the recipe.
        name: Name that other documents of a multi-document recipe use to refer to this one.
        steps: The other documents of a multi-document recipe, in an order in which they can be computed.
        directory: Directory in which relative paths are searched first. None for inline text.
        location: File or location for messages.
        align_experts: Whether to renumber the experts of mixtures so that they correspond to those of the donor.
        experts_in_order: Whether the experts have been matched, see
            :func:`merge_core.architecture.experts.match_experts`.
        mixture: Plan for building a mixture of experts from dense models. None if the recipe merges models. With a
            mixture, the sources are the base and all experts, and ``merge_method`` is the name of
            :data:`merge_core.methods.UPCYCLING`.
        output: Settings of the adapter that the recipe produces from adapters on one base. None for a model.
        reading: Settings for reading the calibration texts, for methods that read texts.
        measured: Measurements by model, after the models have read their texts.
        leave_out_beyond: Largest length of a task vector, in medians. Longer models, and models that contain NaN or
            infinity, are left out.
        places: Distances by model, after they have been measured. The sources and their weights are then final.
        findings: Warnings about this document. They are not part of cache keys, because two spellings of the same
            merge can cause different warnings.
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
    location: str
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
        """Warnings about all documents, those of the steps first."""
        return tuple(finding for document in (*self.steps, self) for finding in document.findings)

    @property
    def method(self) -> Method:
        """The merge method."""
        if self.mixture is not None:
            return UPCYCLING
        return find_method(self.merge_method, f"{self.location}: merge_method")

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources of this document, in order."""
        return tuple(source for module in self.modules for cut in module.slices for source in cut.sources)

    @property
    def needs_distances(self) -> bool:
        """Whether the distances between the models must be measured before the merge."""
        by_distance = self.mixture is None and self.method.traits.weights_by_distance
        return by_distance or self.leave_out_beyond is not None

    @property
    def all_places(self) -> dict[str, ModelPlace]:
        """Measured distances by model, from all documents."""
        return {model: place for document in (*self.steps, self) for model, place in (document.places or {}).items()}

    @property
    def left_out(self) -> dict[str, str]:
        """Reasons for leaving models out, by model. It is empty until the distances have been measured."""
        return {model: place.left_out for model, place in (self.places or {}).items() if place.left_out}

    def model_weight(self, model: str) -> float:
        """Return the weight that the recipe gives to an entire model, regardless of tensor and layer."""
        weight = self.method.parameter("weight")
        scopes = next(source.parameters for source in self.sources if str(source.model) == model), self.parameters
        return float(value_for(weight, scopes, "", 0.0)) if weight else 1.0

    @property
    def texts(self) -> dict[CheckpointRef, str]:
        """Calibration texts of this document, by model."""
        return {source.model: source.text for source in self.sources if source.text is not None}

    @property
    def calibration_requests(self) -> tuple[CalibrationRequest, ...]:
        """Measurements on calibration texts that this document needs, for all of its models."""
        statistic = str(self.method.traits.reads_text)
        return tuple(CalibrationRequest(str(ref), text, statistic, self.reading) for ref, text in self.texts.items())

    def calibration_results(self) -> dict[CalibrationRequest, InputMeasurements]:
        """Return the measurements that are available so far, from all documents."""
        results: dict[CalibrationRequest, InputMeasurements] = {}
        for document in (*self.steps, self):
            measured = document.measured or {}
            requests = [request for request in document.calibration_requests if request.model in measured]
            results |= {request: measured[request.model] for request in requests}
        return results

    @property
    def donor(self) -> CheckpointRef:
        """Model that provides config, tokenizer and layout: the base, or the first model if there is no base."""
        return self.base or self.sources[0].model

    def map_documents(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """Return the recipe with ``change`` applied to each document, or the recipe itself if nothing changes."""
        steps, own = tuple(change(step) for step in self.steps), change(self)
        return self if own is self and steps == self.steps else replace(own, steps=steps)

    def missing_preparation(self) -> str:
        """Return which measurement of the weights is still missing before the merge, or an empty string."""
        for document in (*self.steps, self):
            if document.align_experts and not document.experts_in_order:
                return "align_experts: the experts have not been matched"
            mixture = document.mixture
            if mixture is not None and mixture.needs_prompts and mixture.gates is None:
                return f"gate_mode {mixture.gate_mode}: the router rows have not been computed from the prompts"
            if document.needs_distances and document.places is None:
                return f"{document.merge_method}: the distances between the models have not been measured"
            if document.texts and document.measured is None:
                return f"{document.merge_method}: the models have not read their texts"
        return ""

    @property
    def states(self) -> tuple[str, ...]:
        """Sources of all documents that are optimizer states instead of models, from steps or from earlier merges."""
        states: dict[str, None] = {}
        for document in (*self.steps, self):
            first = None if document.mixture is not None else document.method.traits.first_state
            for cut in (cut for module in document.modules for cut in module.slices if first is not None):
                base = cut.base or document.base
                models = [str(source.model) for source in cut.sources if source.model != base]
                states |= dict.fromkeys(models[first:])
        return tuple(states)

    def ending_with(self, name: str) -> Recipe:
        """Return a recipe whose result is the step ``name``, with only the steps that it needs."""
        result = next(step for step in self.steps if step.name == name)
        needed, steps = {str(ref) for ref in result.own_references()}, list[Recipe]()
        for step in reversed(self.steps):
            if step.name in needed and step is not result:
                steps.insert(0, step)
                needed |= {str(ref) for ref in step.own_references()}
        return replace(result, steps=tuple(steps))

    def own_references(self) -> tuple[CheckpointRef, ...]:
        """Return all models that this document names: first the sources, then the base and the tokenizer's model."""
        references = [source.model for module in self.modules for cut in module.slices for source in cut.sources]
        references += [cut.base for module in self.modules for cut in module.slices if cut.base]
        if self.base:
            references.append(self.base)
        if self.tokenizer and isinstance(self.tokenizer.source, CheckpointRef):
            references.append(self.tokenizer.source)
        return tuple(dict.fromkeys(references))

    def references(self) -> tuple[CheckpointRef, ...]:
        """Return all checkpoints that must exist before the merge, in order. Results of ``steps`` are not included."""
        results = {step.name for step in self.steps}
        references = [ref for document in (*self.steps, self) for ref in document.own_references()]
        return tuple(dict.fromkeys(ref for ref in references if str(ref) not in results))

    def merged_references(self) -> tuple[CheckpointRef, ...]:
        """Return the checkpoints from ``references`` whose weights contribute to the result.

        The result does not include models that only provide the tokenizer or the configuration. It also does not
        include a base that only serves as the origin of task vectors, even if the recipe lists it among its models.
        Optimizer states are not included either.
        """
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
        """Return a short description, for example ``ties of 2 over llama-base``."""
        models = {source.model for module in self.modules for cut in module.slices for source in cut.sources}
        if self.mixture is not None:
            shared = f" and {len(self.mixture.shared)} shared" if self.mixture.shared else ""
            return f"mixture of {len(self.mixture.experts)} experts{shared} over {self.base.name if self.base else ''}"
        others = models - {self.base} if self.base else models
        base = f" over {self.base.name}" if self.base and self.method.base in ("required", "optional") else ""
        cuts = sum(len(module.slices) for module in self.modules)
        slices = f" in {cuts} slices" if cuts > len(self.modules) else ""
        steps = f" after {len(self.steps)} steps" if self.steps else ""
        inputs = " adapters" if self.output else ""
        return f"{self.merge_method} of {len(others) if base else len(models)}{inputs}{base}{slices}{steps}"

    def content_key(self) -> dict[str, Any]:
        """Return the part of the recipe that belongs in a cache key."""
        return self.canonical()

    def canonical(self) -> dict[str, Any]:
        """Return everything that determines the result, as JSON-compatible data. Equivalent recipes give equal data."""
        # Later additions to the format appear only if they are set, so that the keys of existing artifacts stay valid.
        later: dict[str, Any] = {"align_experts": True} if self.align_experts else {}
        if self.mixture is not None:
            later["mixture"] = self.mixture.canonical()
        if self.output is not None:
            later["output"] = self.output.canonical()
        if self.places is not None:
            later["chosen"] = {"left_out": sorted(self.left_out)}
        elif self.leave_out_beyond is not None:
            later["leave_out_beyond"] = self.leave_out_beyond
        if self.measured is not None:  # The measurements replace the names of the texts.
            later["measured"] = {model: measured.digest for model, measured in self.measured.items()}
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
            **(self.tokenizer.canonical_options() if self.tokenizer else {}),
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


def load_recipe(source: Path | str | Mapping[str, Any], location: str = "recipe") -> Recipe:
    """Read a recipe from a file (Path), from YAML text (str) or from a mapping that is inline in a profile.

    Args:
        source: The recipe. If it is a Path, relative model paths are searched in its directory first.
        location: Name of the recipe for messages if ``source`` is not a file.

    Raises:
        InvalidInput: The recipe has faults. The error lists all faults and warnings, with a suggestion for each
            misspelled word.
    """
    directory = None
    if isinstance(source, Path):
        location, documents = str(source), read_yaml(source, _EXPECTED)
        directory = source.resolve().parent
    else:
        documents = parse_yaml(source, location, _EXPECTED) if isinstance(source, str) else [source]
    if not documents:
        raise InvalidInput(location, found="nothing", expected="a recipe with 'merge_method' and 'models'")
    recipes, findings = [], FindingLog()
    for number, document in enumerate(documents, 1):
        place = location if len(documents) == 1 else f"{location} (document {number})"
        log = FindingLog()
        with log.collect():
            recipes.append(_document(document, place, directory, log))
        if not log.blocks:
            recipes[-1] = replace(recipes[-1], findings=tuple(log.findings))
        findings.findings += log.findings
    findings.raise_faults(location)
    recipe = recipes[0]
    with findings.collect():
        recipe = recipes[0] if len(recipes) == 1 else _in_order(recipes, location)
        if (count := len(recipe.references())) > _MAX_MODELS:
            raise InvalidInput(location, found=f"{count} models", expected=f"at most {_MAX_MODELS}")
    for document in (*recipe.steps, recipe):
        with findings.collect():
            _check_steps(document, {str(step.name) for step in recipe.steps})
    findings.raise_faults(location)
    return recipe


def _check_steps(document: Recipe, steps: Collection[str]) -> None:
    """Raise InvalidInput if a document needs the weights of a step's result before the merge."""
    base = document.base
    prompts_base = document.mixture is not None and document.mixture.needs_prompts
    if prompts_base and base is not None and (base.adapter or str(base) in steps):
        raise InvalidInput(
            f"{document.location}: base_model",
            found=f"{base}, {'with an adapter' if base.adapter else 'the result of a step'}",
            expected="a whole model that can be asked before the merge: gate_mode makes router rows of prompts",
            remedy="set gate_mode: random, or make the base first and name its directory",
        )
    needed = [source.model for source in document.sources] if document.needs_distances else list(document.texts)
    if step := next((model for model in needed if str(model) in steps), None):
        raise InvalidInput(
            f"{document.location}: {step}",
            found="the result of a step",
            expected="a model that can be looked at before the merge"
            if document.needs_distances
            else "a model that can read its text before the merge",
            remedy="make it first and name its directory",
        )


@dataclass(frozen=True)
class _Context:
    """Values that all parts of a document need while they are read.

    Args:
        method: Merge method.
        base: Base model of the document, or of the slice if the slice has its own.
        log: Receives findings.
        base_is_faulty: Whether a ``base_model`` exists but could not be read.
    """

    method: Method
    base: CheckpointRef | None
    log: FindingLog
    base_is_faulty: bool = False

    def with_base(self, content: Mapping[str, Any], location: str) -> _Context:
        """Return the context for a mapping that may have its own ``base_model``."""
        if "base_model" not in content:
            return self
        with self.log.collect():
            return replace(self, base=parse_reference(content["base_model"], location, self.log), base_is_faulty=False)
        return replace(self, base=None, base_is_faulty=True)

    def is_base(self, model: CheckpointRef | None) -> bool:
        """Return whether task vectors are measured from this model."""
        return model is not None and model == self.base and self.method.base in ("required", "optional")

    def parameters(
        self, content: Mapping[str, Any], location: str, *, model: CheckpointRef | None = None
    ) -> Parameters:
        """Read ``parameters`` of a mapping that belongs to ``model``, or to all models if ``model`` is None."""
        value, place = content.get("parameters"), f"{location}parameters"
        with self.log.collect():
            return parse_parameters(
                value, self.method, place, self.log, per_model=model is not None, is_base=self.is_base(model)
            )
        # After a fault, treat every parameter as set, so that no missing parameter is reported in addition.
        return Parameters(tuple(Setting(parameter.name, ()) for parameter in self.method.parameters))


def _document(value: object, location: str, directory: Path | None, log: FindingLog) -> Recipe:
    """Read one document. If ``log`` blocks afterwards, the returned recipe is incomplete."""
    written = {
        key: inner for key, inner in plain_mapping(value, location).items() if inner != _EMPTY.get(str(key), ...)
    }
    forms = [key for key in _FORMS if written.get(key) is not None]
    if written.get("experts") is not None and not forms:
        return _mixture_of(written, location, directory, log)
    if "clients" in written:
        raise InvalidInput(
            f"{location}: clients",
            found="a round of clients",
            expected="models: what a round begins with is the last release of a profile",
            remedy="name it as the recipe of a profile, and run that",
        )
    method = _method_of(written, location, log)
    content = known_mapping(written, location, RECIPE_KEYS, log, separator=": ", method=method)
    context = _Context(method, None, log).with_base(content, f"{location}: base_model")
    if len(forms) != 1:
        log.fault(
            location,
            found=" and ".join(forms) if forms else "no models",
            expected="exactly one of 'models', 'slices', 'modules'",
            remedy="remove the others" if forms else "list what is merged under 'models'",
        )
    modules = _modules(content, forms, context, location)
    bases = [cut.base for module in modules for cut in module.slices]
    if method.base == "required" and not context.base_is_faulty and (None in bases or (not bases and not context.base)):
        log.fault(
            location,
            found="no 'base_model'",
            expected=f"the model that {method.name} measures differences from",
            remedy="add 'base_model: MODEL', the model that the others were fine-tuned from",
        )
    recipe = Recipe(
        merge_method=method.name,
        modules=modules,
        base=context.base,
        parameters=context.parameters(content, f"{location}: "),
        dtype=_format(content, "dtype", location, log),
        out_dtype=_format(content, "out_dtype", location, log),
        tokenizer=None,
        chat_template=_text(content, "chat_template", location, log),
        name=_name(content, location, log),
        steps=(),
        directory=directory,
        location=location,
    )
    with log.collect():
        recipe = replace(recipe, tokenizer=parse_tokenizer_choice(content, location, log))
    with log.collect():
        recipe = replace(
            recipe, align_experts=_switch(content.get("align_experts", False), f"{location}: align_experts")
        )
    with log.collect():
        recipe = replace(recipe, reading=parse_reading(content.get("statistics"), method, f"{location}: statistics"))
    with log.collect():
        recipe = replace(
            recipe, leave_out_beyond=_times(content.get("leave_out_beyond"), f"{location}: leave_out_beyond")
        )
    if merge_methods().get(method.name) is not method:
        return recipe  # The method is a guess, so checks that depend on it would mislead.
    _check_required(recipe, method, log)
    with log.collect():
        _check_texts(recipe, method)
    with log.collect():
        _check_distances(recipe, method, sliced=forms != ["models"])
    with log.collect():
        output = parse_output(
            content, method, context.base, [source.model for source in recipe.sources], f"{location}: "
        )
        if output is not None and recipe.needs_distances:
            raise InvalidInput(
                f"{location}: leave_out_beyond",
                found="of a recipe whose result is an adapter",
                expected="whole models: distances are between those",
                remedy="leave one of the two out",
            )
        recipe = replace(recipe, output=output)
    return recipe


def _method_of(content: Mapping[str, Any], location: str, log: FindingLog) -> Method:
    """Return the method of a document. If it is unknown, return the most likely one so that the rest can be checked."""
    name = content.get("merge_method")
    if name is None:
        log.fault(
            location,
            found="no 'merge_method'",
            expected="the name of a merge method",
            remedy="add it; 'mergegate methods' lists them",
        )
    with log.collect():
        if name is not None:
            return find_method(name, f"{location}: merge_method")
    methods = merge_methods()
    if near := get_close_matches(str(name), methods, n=1, cutoff=0.6):
        return methods[near[0]]
    parameters = {parameter.name: parameter for method in methods.values() for parameter in method.parameters}
    lenient = (
        replace(parameter, scope="input", default=None, minimum=None, maximum=None) for parameter in parameters.values()
    )
    template = next(iter(methods.values()))
    return replace(template, name="any method", base="optional", models=(1, None), parameters=tuple(lenient))


def _mixture_of(written: Mapping[str, Any], location: str, directory: Path | None, log: FindingLog) -> Recipe:
    """Read a document that builds a mixture of experts. Its sources are the base and all experts, each once."""
    if written.get("merge_method") is not None:
        log.warn(
            f"{location}: merge_method",
            found=f"{written['merge_method']!r:.60}, which mergegate ignores in a mixture of experts, as mergekit does",
            expected="no merge method",
            remedy="remove it",
        )
    content = known_mapping(
        {key: value for key, value in written.items() if key not in ("merge_method", *_FORMS)},
        location,
        MIXTURE_KEYS,
        log,
        separator=": ",
        required=("gate_mode", "experts_per_token"),
    )
    mixture = parse_mixture(content, location, log)
    dtype, out_dtype = _format(content, "dtype", location, log), _format(content, "out_dtype", location, log)
    template, name = _text(content, "chat_template", location, log), _name(content, location, log)
    if content.get("base_model") is None:
        raise InvalidInput(
            location,
            found="no 'base_model'",
            expected="the dense model that gives attention, norms, embeddings and tokenizer",
            remedy="add 'base_model: MODEL'",
        )
    base = parse_reference(content["base_model"], f"{location}: base_model", log)
    models = dict.fromkeys([base, *(expert.model for expert in mixture.all_experts)])
    sources = tuple(Source(model, None, Parameters()) for model in models)
    return Recipe(
        merge_method=UPCYCLING.name,
        modules=(Module(None, (Slice(sources, base, Parameters(), f"{location}: experts"),), Parameters()),),
        base=base,
        parameters=Parameters(),
        dtype=dtype,
        out_dtype=out_dtype,
        tokenizer=None,
        chat_template=template,
        name=name,
        steps=(),
        directory=directory,
        location=location,
        mixture=mixture,
    )


def _format(content: Mapping[str, Any], key: str, location: str, log: FindingLog) -> DType | None:
    with log.collect():
        return recipe_dtype(content[key], f"{location}: {key}") if key in content else None
    return None


def _switch(value: object, location: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(location, found=f"{value!r:.60}", expected="true or false")
    return value


def _modules(content: Mapping[str, Any], forms: Sequence[str], context: _Context, location: str) -> tuple[Module, ...]:
    modules = []
    if "modules" in forms:
        entries: Mapping[str, Any] = {}
        with context.log.collect():
            entries = plain_mapping(content["modules"], f"{location}: modules")
        for name, item in entries.items():
            with context.log.collect():
                modules.append(_module(str(name), item, context, f"{location}: modules.{name}"))
    elif forms:
        modules.append(Module(None, _slices(content, context, f"{location}: "), Parameters()))
    return tuple(modules)


def _module(name: str, value: object, context: _Context, location: str) -> Module:
    written = {
        key: inner for key, inner in plain_mapping(value, location).items() if inner != _EMPTY.get(str(key), ...)
    }
    keys = ("models", "slices", "parameters")
    content = known_mapping(written, location, keys, context.log, method=context.method)
    if ("models" in content) == ("slices" in content):
        found = "models and slices" if "models" in content else "no models"
        raise InvalidInput(location, found=found, expected="either 'models' or 'slices'")
    return Module(name, _slices(content, context, f"{location}."), context.parameters(content, f"{location}."))


def _slices(content: Mapping[str, Any], context: _Context, prefix: str) -> tuple[Slice, ...]:
    """Read the slices of a document or module. A slice that cannot be read is recorded as a fault and skipped."""
    log = context.log
    if "models" in content:
        place = f"{prefix}models"
        sources = _sources(content["models"], context, place, layered=False)
        return (_slice(sources, context, Parameters(), place, append_base=True),)
    place, slices = f"{prefix}slices", []
    for index, item in enumerate(_list(content["slices"], place, log)):
        location = f"{place}[{index}]"
        with log.collect():
            entry = known_mapping(item, location, _SLICE_KEYS, log, method=context.method)
            if "residual_weight" in entry:
                log.warn(
                    f"{location}.residual_weight",
                    found="a key without effect",
                    expected="nothing: mergekit never used it, and mergegate does not either",
                    remedy="remove it",
                )
            inner = context.with_base(entry, f"{location}.base_model")
            sources = _sources(entry.get("sources"), inner, f"{location}.sources", layered=True)
            parameters = inner.parameters(entry, f"{location}.")
            append_base = context.method.base in ("required", "optional")
            slices.append(_slice(sources, inner, parameters, location, append_base=append_base))
    # Empty slices are allowed at the ends: an empty first slice selects the model that provides the embeddings, an
    # empty last slice the model that provides the final norm and the head.
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
    readable: Sequence[Source | None], context: _Context, parameters: Parameters, location: str, *, append_base: bool
) -> Slice:
    """Combine the sources of a slice, and add the base if the method needs it. None stands for a faulty source."""
    method, base, log = context.method, context.base, context.log
    sources = [source for source in readable if source is not None]
    models = [source.model for source in sources]
    is_sound = len(sources) == len(readable) > 0 and not context.base_is_faulty
    for model, times in Counter(models).items():
        if times > 1:
            is_sound = False
            log.fault(location, found=f"{model} twice", expected="each model once", remedy="add up its weights")
    ranges = {(source.layers[1] - source.layers[0]) for source in sources if source.layers}
    if len(ranges) > 1:
        log.fault(
            location,
            found=f"layer ranges of {', '.join(str(length) for length in sorted(ranges))} layers",
            expected="as many layers from every source",
        )
    # With several models, a donor only provides config and tokenizer. With a single model, it is the second endpoint of
    # the interpolation.
    if base is not None and base not in models and append_base and (method.base != "donor" or len(models) == 1):
        layers = {source.layers for source in sources}
        if len(layers) > 1:
            is_sound = False
            log.fault(
                location,
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
            location,
            found=f"{others} model{'s' if others != 1 else ''}{beside}: {', '.join(map(str, models))}",
            expected=f"{method.name} takes {limit}{beside}",
        )
    return Slice(tuple(sources), base, parameters, location)


def _sources(value: object, context: _Context, location: str, *, layered: bool) -> list[Source | None]:
    """Read the models of a slice. None stands for a faulty entry."""
    sources: list[Source | None] = []
    for index, item in enumerate(_list(value, location, context.log)):
        sources.append(None)
        with context.log.collect():
            sources[-1] = _source(item, context, f"{location}[{index}]", layered=layered)
    return sources


def _source(item: object, context: _Context, location: str, *, layered: bool) -> Source | None:
    log, keys = context.log, _LAYERED_KEYS if layered else _MODEL_KEYS
    if isinstance(item, str):
        raise InvalidInput(location, found=f"{item!r:.60}", expected="a mapping", remedy=f"write '- model: {item}'")
    content = known_mapping(item, location, keys, log, method=context.method)
    model, layers, text = None, None, None
    if "model" not in content:
        log.fault(location, found="no 'model'", expected="{model: path or org/name}", remedy="add it")
    with log.collect():
        model = parse_reference(content["model"], f"{location}.model", log) if "model" in content else None
    with log.collect():
        layers = _layer_range(content.get("layer_range"), f"{location}.layer_range") if layered else None
    is_base = context.is_base(model)
    with log.collect():
        text = parse_text(content.get("text"), context.method, f"{location}.text", is_base=is_base)
    parameters = context.parameters(content, f"{location}.", model=model or CheckpointRef(""))
    return Source(model, layers, parameters, text) if model and (layers or not layered) else None


def _layer_range(value: object, location: str) -> tuple[int, int]:
    """Read ``[first, end]``. Like mergekit, accept whole numbers written as text or with a decimal point."""
    if isinstance(value, list) and len(value) == 2:
        ends = [int(item) if _is_whole(item) else -1 for item in value]
        if 0 <= ends[0] <= ends[1]:
            return ends[0], ends[1]
    raise InvalidInput(
        location,
        found=f"{value!r:.60}",
        expected="[first, end]: whole numbers, 0 <= first <= end, the end not included",
    )


def _is_whole(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdigit()
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _check_required(recipe: Recipe, method: Method, log: FindingLog) -> None:
    """Record each required parameter that no scope sets, before any checkpoint is opened."""
    required = [parameter for parameter in method.parameters if repr(parameter.default) == "required"]
    for module in recipe.modules:
        for cut in module.slices:
            wider = (cut.parameters, module.parameters, recipe.parameters)
            for parameter in required:
                if any(scope.get(parameter.name) for scope in wider):
                    continue
                missing = [
                    f"not set for {source.model}"
                    for source in cut.sources
                    if not source.parameters.get(parameter.name)
                    and not (source.model == cut.base and parameter.scope == "non_base")
                ]
                for found in ["not set"] if parameter.scope == "shared" else missing:
                    log.fault(
                        f"{cut.location}: {parameter.name}",
                        found=found,
                        expected=f"{method.name} needs it: {parameter.summary}",
                        remedy=f"add it under 'parameters' (check the indentation); e.g. {parameter.name}: 0.5",
                    )


def _check_texts(recipe: Recipe, method: Method) -> None:
    """Check that each model has a text, and the same text in every slice."""
    for cut in (cut for module in recipe.modules for cut in module.slices):
        base = cut.base if method.base in ("required", "optional") else None
        sources = [source for source in cut.sources if source.model != base]
        require_texts([(str(source.model), source.text) for source in sources], method, cut.location)
        for source in sources:
            if source.text != recipe.texts.get(source.model):
                raise InvalidInput(
                    f"{cut.location}: {source.model}",
                    found=f"the text {source.text}, and elsewhere {recipe.texts.get(source.model)}",
                    expected="one text for each model",
                )


def _check_distances(recipe: Recipe, method: Method, *, sliced: bool) -> None:
    """Check that distances can be measured, if the recipe needs them: entire models and a base."""
    if not recipe.needs_distances:
        return
    setting = method.name if method.traits.weights_by_distance else "leave_out_beyond"
    if recipe.base is None or method.base not in ("required", "optional"):
        raise InvalidInput(
            f"{recipe.location}: {setting}",
            found="no base that task vectors are measured from",
            expected="a method on task vectors, with its base_model",
            remedy="name the base_model; in place of linear take task_arithmetic",
        )
    if sliced:
        raise InvalidInput(
            f"{recipe.location}: {setting}",
            found="slices or modules",
            expected="whole models: 'models', not parts of them",
        )


def _times(value: object, location: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf:
        raise InvalidInput(location, found=f"{value!r:.60}", expected="a number from 1: times the median length")
    return float(value)


def _in_order(recipes: list[Recipe], location: str) -> Recipe:
    """Sort documents that refer to each other so that each comes after the documents it needs.

    The result is the document without a name. If all documents have names, it is the one that no other document needs.
    """
    names = [recipe.name for recipe in recipes if recipe.name is not None]
    needed = {str(ref) for recipe in recipes for ref in recipe.own_references()}
    results = [recipe for recipe in recipes if recipe.name is None] or [
        recipe for recipe in recipes if recipe.name not in needed
    ]
    if len(results) != 1:
        raise InvalidInput(
            location,
            found=f"{len(results)} documents that no other needs",
            expected="exactly one: it is the result, the others are steps towards it",
        )
    duplicates = [name for index, name in enumerate(names) if name in names[:index]]
    if duplicates:
        raise InvalidInput(location, found=f"the name {duplicates[0]!r} twice", expected="a name for each document")
    by_name = {recipe.name: recipe for recipe in recipes if recipe.name is not None}
    ordered: dict[str, Recipe] = {}
    open_names: list[str] = []

    def visit(recipe: Recipe) -> None:
        for ref in recipe.own_references():
            step = by_name.get(str(ref))
            if step is None or str(ref) in ordered:
                continue
            if str(ref) in open_names:
                raise InvalidInput(step.location, found=f"needs itself: {' -> '.join([*open_names, str(ref)])}")
            open_names.append(str(ref))
            visit(step)
            open_names.pop()
            ordered[str(ref)] = step

    visit(results[0])
    unused = [name for name in names if name not in ordered and name != results[0].name]
    if unused:
        raise InvalidInput(by_name[unused[0]].location, found=f"{unused[0]!r} is used by no other document")
    return replace(results[0], steps=tuple(ordered.values()))


def _list(value: object, location: str, log: FindingLog) -> list[Any]:
    if isinstance(value, (list, tuple)) and value:
        return list(value)
    log.fault(location, found=f"{value!r:.60}", expected="a list with at least one entry")
    return []


def _text(content: Mapping[str, Any], key: str, location: str, log: FindingLog) -> str | None:
    value = content.get(key)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    log.fault(f"{location}: {key}", found=f"{value!r:.60}", expected="text", remedy="write text, or remove the key")
    return None


def _name(content: Mapping[str, Any], location: str, log: FindingLog) -> str | None:
    """Return the name of a document. Like mergekit, ignore a value that is not text: nothing can refer to it."""
    value = content.get("name")
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    log.warn(
        f"{location}: name", found=f"{value!r:.60}, to which nothing can refer", expected="text", remedy="remove it"
    )
    return None
