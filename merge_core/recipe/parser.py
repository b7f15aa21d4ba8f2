"""Read a recipe, YAML in mergekit's dialect, into a frozen, typed value.

mergegate accepts every recipe that mergekit accepts. Content that mergekit ignores (unknown keys, misspelled or
misplaced parameters) causes a warning in :attr:`Recipe.findings`. Invalid content is a fault. One error reports all
faults and warnings of a recipe together.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint import BY_TORCH_NAME, RECIPE_NAMES, DType
from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.methods import UPCYCLING, Method, Parameter, find_method, merge_methods
from mergegate.merge_core.parsing import parse_yaml, read_yaml
from mergegate.merge_core.recipe.blocks import (
    CalibrationReading,
    parse_output,
    parse_reading,
    parse_router_repair,
    parse_tokenizer_choice,
)
from mergegate.merge_core.recipe.keys import (
    CLIENT_KEYS,
    RECIPE_KEYS,
    RecipeBlock,
    is_number,
    is_text,
    known_mapping,
    plain_mapping,
    refuse,
    require_value,
    switch,
)
from mergegate.merge_core.recipe.mixture import MIXTURE_KEYS, parse_mixture
from mergegate.merge_core.recipe.parameters import Parameters, Setting, parse_parameters
from mergegate.merge_core.recipe.recipe import Module, Recipe, Slice, Source
from mergegate.merge_core.recipe.reference import CheckpointRef, parse_reference
from mergegate.merge_core.recipe.training_run import RUN_KEYS

_EXPECTED = "a recipe in YAML"
# Limited because mergegate looks up each model, possibly on the Hub.
_MAX_MODELS = 256
# Longer names leave too little room for suffixes: file systems limit the name of a directory to 255 bytes.
_MAX_NAME_BYTES = 200
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


def load_recipe(source: Path | str | Mapping[str, Any], location: str = "recipe") -> Recipe:
    """Read a recipe from a file (Path), from YAML text (str) or from a mapping in a profile.

    Args:
        source: The recipe. For a Path, relative model paths are searched in its directory first.
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
        raise InvalidInput(location, found="an empty file", expected="a recipe with 'merge_method' and 'models'")
    recipes, findings = list[Recipe](), FindingLog()
    for number, document in enumerate(documents, 1):
        name = location if len(documents) == 1 else f"{location} (document {number})"
        log = FindingLog()
        with log.collect():
            recipes.append(_document(document, name, directory, log))
        if not log.blocks:
            recipes[-1] = replace(recipes[-1], findings=tuple(log.findings))
        findings.findings += log.findings
    findings.raise_faults(location)
    recipe = recipes[0]
    with findings.collect():
        recipe = recipes[0] if len(recipes) == 1 else _in_order(recipes, location)
        if (count := len(recipe.references())) > _MAX_MODELS:
            raise InvalidInput(location, found=f"{count} models", expected=f"at most {_MAX_MODELS}")
    _check_steps(recipe, findings)
    findings.raise_faults(location)
    return recipe


def _check_steps(recipe: Recipe, log: FindingLog) -> None:
    """Add a fault for each measurement that needs weights of a step's result: they do not exist before the merge."""
    steps = {str(step.name) for step in recipe.steps}
    for step in recipe.steps:
        if step.router_repair is not None:
            log.fault(
                f"{step.location}: router_repair",
                found="a document that another one uses",
                expected="router_repair in the document of the result, because only a finished model can be run",
                remedy="move it there, or create this model first and use its directory",
            )
    for document in recipe.documents:
        base = document.base
        prompts_base = document.mixture is not None and document.mixture.needs_prompts
        if prompts_base and base is not None and (base.adapter or str(base) in steps):
            log.fault(
                f"{document.location}: base_model",
                found=f"{base} {'has an adapter' if base.adapter else 'is the result of a step'}",
                expected="a whole model that exists before the merge, because gate_mode computes router rows with it",
                remedy="set gate_mode: random, or first create the base and use its directory",
            )
            continue
        needed = [source.model for source in document.sources] if document.needs_distances else list(document.texts)
        if model := next((model for model in needed if str(model) in steps), None):
            log.fault(
                f"{document.location}: {model}",
                found="the result of a step",
                expected="a model that exists before the merge, because mergegate "
                + ("measures its distances" if document.needs_distances else "reads the text with it"),
                remedy="create this model first, and use its directory",
            )


@dataclass(frozen=True)
class _Context:
    """Values that all parts of a document need while they are read.

    ``base`` is that of the document, or of the slice if the slice has its own. ``base_is_faulty`` states whether a
    ``base_model`` is present but invalid, and ``reads_texts`` whether each model has a calibration text.
    """

    method: Method
    base: CheckpointRef | None
    log: FindingLog
    base_is_faulty: bool = False
    reads_texts: bool = False

    def with_base(self, block: RecipeBlock) -> _Context:
        """Return the context for a mapping that may have its own ``base_model``."""
        if "base_model" not in block:
            return self
        base = block.read("base_model", parse_reference, None, self.log)
        return replace(self, base=base, base_is_faulty=base is None)

    def is_base(self, model: CheckpointRef | None) -> bool:
        """Return whether task vectors are differences from ``model``."""
        return model is not None and model == self.base and self.method.has_task_vectors

    def parameters(self, block: RecipeBlock, *, model: CheckpointRef | None = None) -> Parameters:
        """Read ``parameters`` of a mapping. Without ``model``, they apply to all models."""
        # After a fault, treat every parameter as set, so that no missing parameter is reported in addition.
        faulty = Parameters(tuple(Setting(parameter.name, ()) for parameter in self.method.parameters))
        if "parameters" not in block:
            return Parameters()
        scope = {"per_model": model is not None, "is_base": self.is_base(model)}
        return block.read(
            "parameters", lambda value, at: parse_parameters(value, self.method, at, self.log, **scope), faulty
        )


def _document(value: object, location: str, directory: Path | None, log: FindingLog) -> Recipe:
    """Read one document. If ``log`` contains a fault afterward, the returned recipe is incomplete."""
    written = _non_empty(value, location)
    forms = [key for key in _FORMS if written.get(key) is not None]
    if written.get("experts") is not None and not forms:
        return _mixture_of(written, location, directory, log)
    if "clients" in written:
        raise InvalidInput(
            f"{location}: clients",
            found="a client round",
            expected="'models': a client round starts from the last release of a profile",
            remedy="set it as the recipe of a profile, and run that profile",
        )
    if "run" in written:
        raise InvalidInput(
            f"{location}: run",
            found="a training run, whose checkpoints have not been listed yet",
            expected="'models'",
            remedy="use mergegate merge, check, plan or run, which find the checkpoints",
        )
    method = _method_of(written, location, log)
    document = known_mapping(written, location, RECIPE_KEYS, log, separator=": ", method=method)
    repair = document.read("router_repair", parse_router_repair, None)
    reads_texts = method.traits.reads_text is not None or bool(document.get("router_repair"))
    context = _Context(method, None, log, reads_texts=reads_texts).with_base(document)
    if len(forms) != 1:
        log.fault(
            location,
            found=" and ".join(forms) if forms else "no models",
            expected="exactly one of 'models', 'slices', 'modules'",
            remedy="remove the others" if forms else "list the models to merge under 'models'",
        )
    modules: tuple[Module, ...] = ()
    if "modules" in forms:
        modules = document.read("modules", _modules, (), context)
    elif forms:
        modules = (Module(None, _slices(document, context), Parameters()),)
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
        parameters=context.parameters(document),
        **_common_fields(document, directory, log),
        tokenizer=parse_tokenizer_choice(document, log),
        align_experts=document.read("align_experts", switch, False),
        drop_prediction_layers=document.read("drop_prediction_layers", switch, False),
        reading=document.read("statistics", parse_reading, CalibrationReading(), method, reads_texts),
        router_repair=repair,
        leave_out_beyond=document.read("leave_out_beyond", _factor, None),
    )
    if merge_methods().get(method.name) is not method:
        return recipe  # The method is a guess, so checks that depend on it would mislead.
    _check_needs(recipe, method, log, sliced=forms != ["models"])
    with log.collect():
        output = parse_output(document, method, context.base, [source.model for source in recipe.sources])
        for key, is_set, reason in (
            ("leave_out_beyond", recipe.needs_distances, "mergegate measures distances between models"),
            ("router_repair", recipe.router_repair is not None, "the merge itself reads the texts"),
        ):
            if output is not None and is_set:
                raise InvalidInput(
                    document.location_of(key),
                    found=f"{key} together with output: adapter",
                    expected=f"a recipe that produces a model, because {reason}",
                    remedy=f"remove {key} or output",
                )
        recipe = replace(recipe, output=output)
    return recipe


def _method_of(content: Mapping[str, Any], location: str, log: FindingLog) -> Method:
    """Return the method of a document, or for an unknown name the most likely one so that the rest can be checked."""
    name = content.get("merge_method")
    if name is None:
        log.fault(
            location,
            found="no 'merge_method'",
            expected="the name of a merge method",
            remedy="add it; 'mergegate methods' lists all methods",
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


def _mixture_of(settings: Mapping[str, Any], location: str, directory: Path | None, log: FindingLog) -> Recipe:
    """Read a document that builds a mixture of experts. Its sources are the base and all experts, each once."""
    if settings.get("merge_method") is not None:
        log.warn(
            f"{location}: merge_method",
            found=f"{settings['merge_method']!r:.60}, which mergegate ignores for a mixture, as mergekit does",
            expected="no merge method",
            remedy="remove it",
        )
    written = {key: value for key, value in settings.items() if key not in ("merge_method", *_FORMS)}
    document = known_mapping(written, location, MIXTURE_KEYS, log, separator=": ")
    for key in ("gate_mode", "experts_per_token"):
        require_value(document, settings, key)
    mixture = parse_mixture(document, log)
    fields = _common_fields(document, directory, log)
    if "base_model" not in document:
        raise InvalidInput(
            location,
            found="no 'base_model'",
            expected="the dense model that provides attention, norms, embeddings and tokenizer",
            remedy="add 'base_model: MODEL'",
        )
    base = parse_reference(document.get("base_model"), document.location_of("base_model"), log)
    models = dict.fromkeys([base, *(expert.model for expert in mixture.all_experts)])
    sources = tuple(Source(model, None, Parameters()) for model in models)
    modules = (Module(None, (Slice(sources, base, Parameters(), document.location_of("experts")),), Parameters()),)
    return Recipe(merge_method=UPCYCLING.name, modules=modules, base=base, mixture=mixture, **fields)


def _common_fields(document: RecipeBlock, directory: Path | None, log: FindingLog) -> dict[str, Any]:
    """Read the keys that all documents have, and return them as fields of :class:`Recipe`."""
    return {
        "dtype": document.read("dtype", _format, None),
        "out_dtype": document.read("out_dtype", _format, None),
        "chat_template": document.read("chat_template", _text, None),
        "name": document.read("name", _name, None, log),
        "directory": directory,
        "location": document.location,
    }


def _format(value: object, location: str) -> DType:
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    if name not in RECIPE_NAMES:
        expected, remedy = f"one of {', '.join(RECIPE_NAMES)}", suggest(str(value), RECIPE_NAMES)
        raise InvalidInput(location, found=f"{value!r}", expected=expected, remedy=remedy)
    return BY_TORCH_NAME[name]


def _factor(value: Any, location: str) -> float:
    if not is_number(value, 1, sys.float_info.max):
        raise refuse(value, location, "a factor of the median length, at least 1")
    return float(value)


def _non_empty(value: object, location: str) -> dict[str, Any]:
    """Return the entries of a mapping whose values mergekit does not treat as absent."""
    return {key: inner for key, inner in plain_mapping(value, location).items() if inner != _EMPTY.get(str(key), ...)}


def _modules(value: object, location: str, context: _Context) -> tuple[Module, ...]:
    modules = []
    for name, item in plain_mapping(value, location).items():
        module_location = f"{location}.{name}"
        with context.log.collect():
            written, keys = _non_empty(item, module_location), ("models", "slices", "parameters")
            block = known_mapping(written, module_location, keys, context.log, method=context.method)
            if ("models" in block) == ("slices" in block):
                found = "models and slices" if "models" in block else "no models"
                raise InvalidInput(module_location, found=found, expected="either 'models' or 'slices'")
            modules.append(Module(str(name), _slices(block, context), context.parameters(block)))
    return tuple(modules)


def _slices(block: RecipeBlock, context: _Context) -> tuple[Slice, ...]:
    """Read the slices of a document or module. A slice that cannot be read is recorded as a fault and skipped."""
    log = context.log
    if "models" in block:
        sources = _sources(block, "models", context)
        return (_slice(sources, context, Parameters(), block.location_of("models"), append_base=True),)
    slices = []
    for location, item in _entries(block, "slices"):
        with log.collect():
            entry = known_mapping(item, location, _SLICE_KEYS, log, method=context.method)
            if "residual_weight" in entry:
                log.warn(
                    entry.location_of("residual_weight"),
                    found="the key has no effect",
                    expected="no such key: neither mergekit nor mergegate uses it",
                    remedy="remove it",
                )
            inner = context.with_base(entry)
            sources, parameters = _sources(entry, "sources", inner), inner.parameters(entry)
            slices.append(_slice(sources, inner, parameters, location, append_base=context.method.has_task_vectors))
    # Empty slices are allowed at the ends: an empty first slice selects the model that provides the embeddings, an
    # empty last slice the model that provides the final norm and the head.
    ranges = [source.layers or (0, 1) for cut in slices for source in cut.sources]
    if slices and all(first == end for first, end in ranges):
        block.fault(
            "slices",
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
            log.fault(location, found=f"{model} appears twice", expected="each model once", remedy="add up its weights")
    ranges = {(source.layers[1] - source.layers[0]) for source in sources if source.layers}
    if len(ranges) > 1:
        log.fault(
            location,
            found=f"layer ranges of {', '.join(str(length) for length in sorted(ranges))} layers",
            expected="the same number of layers from every source",
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
    has_base = base in models and method.has_task_vectors
    others = len(models) - has_base
    low, high = method.models
    if is_sound and (others < low or (high is not None and others > high)):
        limit = f"at least {low}" if high is None else f"{low}" if low == high else f"{low} to {high}"
        besides = " in addition to the base" if has_base else ""
        log.fault(
            location,
            found=f"{others} model{'s' if others != 1 else ''}{besides}: {', '.join(map(str, models))}",
            expected=f"{limit}{besides} for {method.name}",
        )
    return Slice(tuple(sources), base, parameters, location)


def _sources(block: RecipeBlock, key: str, context: _Context) -> list[Source | None]:
    """Read the models of a slice. None stands for a faulty entry."""
    sources: list[Source | None] = []
    for location, item in _entries(block, key):
        sources.append(None)
        with context.log.collect():
            sources[-1] = _source(item, location, context, layered=key == "sources")
    return sources


def _source(item: object, location: str, context: _Context, *, layered: bool) -> Source | None:
    log, keys = context.log, _LAYERED_KEYS if layered else _MODEL_KEYS
    if isinstance(item, str):
        raise refuse(item, location, "a mapping", f"write '- model: {item}'")
    block = known_mapping(item, location, keys, log, method=context.method)
    if "model" not in block:
        log.fault(location, found="no 'model'", expected="{model: path or org/name}", remedy="add it")
    model, layers = block.read("model", parse_reference, None, log), None
    if layered:
        # Like mergekit, accept whole numbers that are written as text or with a decimal point.
        written, ends = block.get("layer_range"), list[int]()
        for end in written if isinstance(written, list) else ():
            is_digits = isinstance(end, str) and end.isascii() and end.isdigit() and len(end) < 10
            if is_digits or type(end) is int or (isinstance(end, float) and end.is_integer()):
                ends.append(int(end))
        if isinstance(written, list) and len(written) == len(ends) == 2 and 0 <= ends[0] <= ends[1]:
            layers = ends[0], ends[1]
        else:
            expected = "[first, end]: whole numbers, 0 <= first <= end, the end not included"
            block.fault("layer_range", expected=expected)
    text = block.read("text", _text_path, None, context, context.is_base(model))
    parameters = context.parameters(block, model=model or CheckpointRef(""))
    return Source(model, layers, parameters, text) if model and (layers or not layered) else None


def _text_path(value: Any, location: str, context: _Context, is_base: bool) -> str:
    if not context.reads_texts or is_base:
        found = "the base is not merged" if is_base else f"{context.method.name} does not read texts"
        raise InvalidInput(location, found=found, expected="no such key", remedy="remove it")
    if not is_text(value) or "\0" in value:
        raise refuse(value, location, "the path of a text file (JSON Lines or plain text)")
    return str(value)


def _check_needs(recipe: Recipe, method: Method, log: FindingLog, *, sliced: bool) -> None:
    """Add a fault for everything that the method needs but the recipe lacks, before any checkpoint is opened.

    These are required parameters that no scope sets, a text for each model (the same in every slice), and whole models
    with a base if the recipe needs distances.
    """
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
                for problem in ["not set"] if parameter.scope == "shared" else missing:
                    log.fault(
                        f"{cut.location}: {parameter.name}",
                        found=problem,
                        expected=f"a value, because {method.name} needs it: {parameter.summary}",
                        remedy=f"add it under 'parameters' (check the indentation), for example {parameter.name}: 0.5",
                    )
    with log.collect():
        for cut in recipe.slices:
            sources = [source for source in cut.sources if not method.has_task_vectors or source.model != cut.base]
            for source in sources:
                if recipe.reads_texts and source.text is None:
                    reader = "router_repair reads it with the merge"
                    if method.traits.reads_text is not None:
                        reader = f"{method.name} reads it with the model before the merge"
                    raise InvalidInput(
                        f"{cut.location}: {source.model}",
                        found="no 'text'",
                        expected=f"a text for each model, because {reader}",
                        remedy="add 'text: FILE' next to 'model', with examples of what the model must be able to do",
                    )
            for source in sources:
                if source.text != recipe.texts.get(source.model):
                    raise InvalidInput(
                        f"{cut.location}: {source.model}",
                        found=f"the text {source.text}, but {recipe.texts.get(source.model)} in another slice",
                        expected="one text for each model",
                    )
    setting = f"{recipe.location}: {method.name if method.traits.weights_by_distance else 'leave_out_beyond'}"
    if recipe.needs_distances and (recipe.base is None or not method.has_task_vectors):
        log.fault(
            setting,
            found="no base to measure task vectors from",
            expected="a method that uses task vectors, and its base_model",
            remedy="set base_model; instead of linear, use task_arithmetic",
        )
    elif recipe.needs_distances and sliced:
        log.fault(setting, found="slices or modules", expected="whole models, listed under 'models'")
    if recipe.router_repair is not None and sliced:
        log.fault(
            f"{recipe.location}: router_repair",
            found="slices or modules",
            expected="whole models, listed under 'models', whose routers the merge can follow",
            remedy="remove router_repair",
        )


def _in_order(recipes: list[Recipe], location: str) -> Recipe:
    """Sort the documents so that each comes after those it needs, and return the result with the others as its steps.

    The result is the document without a name, or else the only document that no other document needs.
    """
    names = [recipe.name for recipe in recipes if recipe.name is not None]
    needed = {str(ref) for recipe in recipes for ref in recipe.own_references()}
    results = [recipe for recipe in recipes if recipe.name is None] or [
        recipe for recipe in recipes if recipe.name not in needed
    ]
    if len(results) != 1:
        raise InvalidInput(
            location,
            found=f"{len(results)} documents that no other document uses",
            expected="exactly one such document, which is the result; the others are its steps",
        )
    duplicates = [name for index, name in enumerate(names) if name in names[:index]]
    if duplicates:
        raise InvalidInput(location, found=f"two documents have the name {duplicates[0]!r}", expected="unique names")
    by_name = {recipe.name: recipe for recipe in recipes if recipe.name is not None}
    ordered: dict[str, Recipe] = {}
    open_names: list[str] = []

    def visit(recipe: Recipe) -> None:
        for ref in recipe.own_references():
            step = by_name.get(str(ref))
            if step is None or str(ref) in ordered:
                continue
            if str(ref) in open_names:
                raise InvalidInput(
                    step.location, found=f"the document needs its own result: {' -> '.join([*open_names, str(ref)])}"
                )
            open_names.append(str(ref))
            visit(step)
            open_names.pop()
            ordered[str(ref)] = step

    visit(results[0])
    unused = [name for name in names if name not in ordered and name != results[0].name]
    if unused:
        raise InvalidInput(by_name[unused[0]].location, found=f"no other document uses {unused[0]!r}")
    return replace(results[0], steps=tuple(ordered.values()))


def _entries(block: RecipeBlock, key: str) -> list[tuple[str, Any]]:
    """Return the location and value of each entry of a list. Any other value is recorded as a fault."""
    value = block.get(key)
    if isinstance(value, (list, tuple)) and value:
        return [(f"{block.location_of(key)}[{index}]", item) for index, item in enumerate(value)]
    block.fault(key, expected="a list with at least one entry")
    return []


def _text(value: object, location: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise refuse(value, location, "text", "write text, or remove the key")
    return value


def _name(value: object, location: str, log: FindingLog) -> str | None:
    """Return the name of a document. The merge writes the result of a step to a directory with this name.

    Like mergekit, ignore a value that is not text: nothing can refer to it.
    """
    if not isinstance(value, str) or not value.strip():
        log.warn(location, found=f"{value!r:.60}, to which nothing can refer", expected="text", remedy="remove it")
        return None
    size = len(value.encode(errors="surrogatepass"))
    if "/" in value or "\0" in value:
        problem = "contains a slash or a null character"
    elif value in (".", ".."):
        problem = "refers to an existing directory"
    elif size > _MAX_NAME_BYTES:
        problem = f"has {size} bytes"
    elif any("\ud800" <= character <= "\udfff" for character in value):
        problem = "contains an incomplete character"
    else:
        return value
    raise InvalidInput(
        location,
        found=f"{value!r:.60} {problem}",
        expected=f"a valid directory name of at most {_MAX_NAME_BYTES} bytes",
        remedy="choose another name, and use it in the documents that refer to this one",
    )


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one recipe document, as plain data.

    Editors use it to complete keys and mark errors. :func:`load_recipe` also checks rules that span several keys.
    """
    properties = {**RECIPE_KEYS, **MIXTURE_KEYS, **CLIENT_KEYS, **RUN_KEYS}
    properties["merge_method"] = {**properties["merge_method"], "enum": sorted(merge_methods())}
    parameters = {"$ref": "#/$defs/parameters"}
    model = {"$ref": "#/$defs/model"}
    read_by = "for methods and repairs that use one"
    text = {"type": "string", "description": f"Calibration text of the model (JSON Lines or plain text), {read_by}."}
    layers = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mergegate: a recipe (mergekit's dialect)",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "anyOf": [{"required": ["merge_method"]}, {"required": ["experts"]}, {"required": ["run"]}],
        "$defs": {
            "model": {
                "description": "Directory or org/name@revision. Append +adapter to apply a LoRA adapter.",
                "type": ["string", "object"],
            },
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": _parameter_schemas(
                    parameter for method in merge_methods().values() for parameter in method.parameters
                ),
            },
            "source": _closed(["model"], model=model, parameters=parameters, text=text),
            "layers": _closed(["model"], model=model, layer_range=layers, parameters=parameters, text=text),
            "slice": _closed(
                ["sources"],
                sources={"type": "array", "items": {"$ref": "#/$defs/layers"}},
                base_model=model,
                parameters=parameters,
            ),
        },
    }


def _closed(required_keys: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required_keys, "properties": properties}


def _parameter_schemas(parameters: Iterable[Parameter]) -> dict[str, Any]:
    """Return one schema per parameter name. A value may be a scalar, a gradient, or depend on the tensor's name."""
    descriptions: dict[str, list[str]] = {}
    for parameter in parameters:
        description = f"{parameter.summary} ({parameter.range})" if parameter.range else parameter.summary
        descriptions.setdefault(parameter.name, []).append(description)
    return {
        name: {
            "description": " / ".join(dict.fromkeys(variants)),
            "type": ["number", "boolean", "string", "array", "object"],
        }
        for name, variants in sorted(descriptions.items())
    }
