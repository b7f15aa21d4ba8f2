"""Convert mergekit-evolve's YAML to a profile, and list every setting that cannot be carried over.

A mergekit-evolve file declares models, a method and tasks. Its search has a single score, computed on the documents
that select the candidate, and no test afterwards. In the converted profile those documents are used for the search
alone, and the winner is confirmed on others.

The format is that of mergekit 0.1.5: ``genome`` (models, merge_method, base_model, tokenizer_source, layer_granularity,
normalize, allow_negative_weights, filters, smooth), ``tasks`` (name, weight, metric), ``limit``, ``num_fewshot``,
``shuffle``, ``random_init``, ``apply_chat_template``, ``fewshot_as_multiturn``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import Method, merge_methods

_TOP = (
    "genome",
    "tasks",
    "limit",
    "num_fewshot",
    "shuffle",
    "random_init",
    "apply_chat_template",
    "fewshot_as_multiturn",
)
_GENOME = (
    "models",
    "merge_method",
    "base_model",
    "tokenizer_source",
    "layer_granularity",
    "normalize",
    "allow_negative_weights",
    "filters",
    "smooth",
)
_TASK = ("name", "weight", "metric")
# Method parameters that a genome sets: one per model, or the position between two models.
_WEIGHT, _BETWEEN = "weight", "t"
_LEAST_SEARCH = 10  # smallest number of documents of a search set
_CONFIRMED_ON = 2  # documents of the confirmation, as a multiple of those of the search
_METRIC = "acc,none"  # mergekit-evolve's default for tasks without a metric


class UnsupportedSetting(NamedTuple):
    """A setting that has no counterpart, and the reason."""

    setting: str
    why: str


class ConvertedProfile(NamedTuple):
    """A profile in YAML form, and the settings of the source file that it does not include."""

    profile: dict[str, Any]
    not_carried: tuple[UnsupportedSetting, ...]


def profile_of_evolve(content: Mapping[str, Any], name: str, where: str, layers: int | None = None) -> ConvertedProfile:
    """Return the profile that corresponds to the ``content`` of a mergekit-evolve file.

    Args:
        content: Parsed YAML of the file.
        name: Name of the profile.
        where: Name of the file in error messages.
        layers: Number of layers of the models. None: unknown, so one value is searched for all layers.

    Raises:
        InvalidInput: A key is unknown to both programs, or a required setting is missing.
    """
    _check_keys(content, _TOP, where)
    genome = _mapping(content.get("genome"), f"{where}: genome")
    _check_keys(genome, _GENOME, f"{where}: genome")
    models, method = _models(genome, where), _method(genome, where)
    not_carried = list(_without_counterpart(content, genome, where))
    shape, unsupported = _layers_and_filters(genome, layers)
    recipe, parameters = _recipe(genome, models, method, shape)
    tasks = _tasks(content, where)
    weighted = [task for task in tasks if float(task.get("weight", 1.0)) > 0]
    not_carried += unsupported
    for task in tasks:
        if task not in weighted:
            why = "a weight is above zero: a task that must not fall is a constraint (sweep.constraints)"
            not_carried.append(UnsupportedSetting(f"tasks: {task['name']}: weight {task['weight']}", why))
    if not weighted:
        raise InvalidInput(f"{where}: tasks", found="no task with a weight above zero", expected="at least one")
    if recipe.get("base_model") is None and genome.get("base_model") is not None:
        not_carried.append(
            UnsupportedSetting("genome.base_model", f"{method.name} has no base; it is a guard's reference only")
        )
    return ConvertedProfile(_profile(content, name, recipe, parameters, weighted, where), tuple(not_carried))


def _profile(
    content: Mapping[str, Any],
    name: str,
    recipe: dict[str, Any],
    parameters: dict[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    location: str,
) -> dict[str, Any]:
    metrics = [str(task.get("metric") or _METRIC) for task in tasks]
    sweep: dict[str, Any] = {
        "parameters": parameters,
        "objective": [
            {"task": task["name"], "measure": "metric", "metric": metric, "weight": float(task.get("weight", 1.0))}
            for task, metric in zip(tasks, metrics, strict=True)
        ],
    }
    if content.get("limit") is not None:
        documents = max(_LEAST_SEARCH, int(_number(content["limit"], f"{location}: limit")))
        sweep["documents"] = {"search": documents, "confirmation": max(20, _CONFIRMED_ON * documents)}
    evaluate: dict[str, Any] = {
        "tasks": [
            {"task": task["name"], "guarded_by": "best parent", "metric": metric}
            for task, metric in zip(tasks, metrics, strict=True)
        ]
    }
    if content.get("num_fewshot") is not None:
        evaluate["num_fewshot"] = int(_number(content["num_fewshot"], f"{location}: num_fewshot"))
    if content.get("apply_chat_template"):
        evaluate["chat_template"] = True
    return {"name": name, "recipe": recipe, "evaluate": evaluate, "sweep": sweep}


def _recipe(
    genome: Mapping[str, Any], models: Sequence[str], method: Method, shape: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe with placeholders, and the parameters that fill them.

    Weights start at one divided by their number, densities at one.
    """
    base = genome.get("base_model")
    recipe: dict[str, Any] = {"merge_method": method.name, "dtype": "bfloat16"}
    parameters: dict[str, Any] = {}
    if method.parameter(_WEIGHT) is None:
        first = str(base) if base is not None else models[0]
        others = [model for model in models if model != first]
        recipe |= {"base_model": first, "models": [{"model": model} for model in (first, *others)]}
        recipe["parameters"] = {"t": "$t"}
        parameters["t"] = {"low": 0.0, "high": 1.0, "start": 0.5, **shape}
        return recipe, parameters
    over_base = _works_over_base(method)
    merged = [model for model in models if not over_base or model != base]
    lowest = -1.0 if genome.get("allow_negative_weights") else 0.0
    highest = 2.0 if over_base else 1.0
    entries = []
    for number, model in enumerate(merged, start=1):
        model_parameters = {"weight": f"$weight_{number}"}
        start = round(1 / len(merged), 4)
        parameters[f"weight_{number}"] = {"low": lowest, "high": highest, "start": start, **shape}
        if method.traits.sparse:
            model_parameters["density"] = f"$density_{number}"
            parameters[f"density_{number}"] = {"low": 0.05, "high": 1.0, "start": 1.0, **shape}
        entries.append({"model": model, "parameters": model_parameters})
    if over_base:
        recipe["base_model"] = base
    recipe["models"] = entries
    if genome.get("normalize") is not None:
        recipe["parameters"] = {"normalize": bool(genome["normalize"])}
    if genome.get("tokenizer_source") is not None:
        recipe["tokenizer_source"] = genome["tokenizer_source"]
    return recipe, parameters


def _layers_and_filters(
    genome: Mapping[str, Any], layers: int | None
) -> tuple[dict[str, Any], list[UnsupportedSetting]]:
    """Return the ``layers`` and ``filters`` of every parameter, and the settings that they cannot express."""
    shape: dict[str, Any] = {}
    unsupported = []
    granularity = genome.get("layer_granularity")
    if granularity is not None and int(granularity) > 0:
        if layers is None:
            why = "the number of layers is not known here: add 'layers' (groups of layers) to the parameters"
            unsupported.append(UnsupportedSetting(f"genome.layer_granularity: {granularity}", why))
        elif (groups := math.ceil(layers / int(granularity))) > 1:
            shape["layers"] = groups
            if layers % int(granularity):
                why = f"{layers} layers are not divisible by it: they become {groups} groups of nearly one size"
                unsupported.append(UnsupportedSetting(f"genome.layer_granularity: {granularity}", why))
    if genome.get("filters"):
        shape["filters"] = list(genome["filters"])
    return shape, unsupported


def _without_counterpart(
    content: Mapping[str, Any], genome: Mapping[str, Any], location: str
) -> list[UnsupportedSetting]:
    unsupported = []
    if genome.get("smooth"):
        unsupported.append(
            UnsupportedSetting("genome.smooth", "layers of a group have one value; nothing runs between groups")
        )
    if content.get("random_init"):
        unsupported.append(UnsupportedSetting("random_init", "a search starts at the hand-written recipe"))
    if content.get("shuffle"):
        why = "documents of the search are drawn by a hash of their content (sweep.documents.seed)"
        unsupported.append(UnsupportedSetting("shuffle", why))
    if content.get("fewshot_as_multiturn"):
        unsupported.append(UnsupportedSetting("fewshot_as_multiturn", "few-shot examples stand in one turn"))
    return unsupported


def _models(genome: Mapping[str, Any], location: str) -> list[str]:
    models = genome.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(name, str) and name for name in models):
        raise InvalidInput(f"{location}: genome.models", found=f"{models!r:.60}", expected="names of models")
    return list(dict.fromkeys(models))


def _method(genome: Mapping[str, Any], location: str) -> Method:
    all_methods = merge_methods()
    supported = {
        name: item for name, item in all_methods.items() if item.parameter(_WEIGHT) or item.parameter(_BETWEEN)
    }
    method = supported.get(str(genome.get("merge_method")))
    if method is None:
        raise InvalidInput(
            f"{location}: genome.merge_method",
            found=f"{genome.get('merge_method')!r}",
            expected=f"one of {', '.join(supported)}",
            remedy=suggest(str(genome.get("merge_method")), list(supported)),
        )
    if _works_over_base(method) and genome.get("base_model") is None:
        raise InvalidInput(
            f"{location}: genome.base_model", found="nothing", expected=f"{method.name} works on differences to a base"
        )
    return method


def _works_over_base(method: Method) -> bool:
    weight = method.parameter(_WEIGHT)
    return weight is not None and weight.scope == "non_base"


def _tasks(content: Mapping[str, Any], location: str) -> list[Mapping[str, Any]]:
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise InvalidInput(
            f"{location}: tasks", found=f"{tasks!r:.60}", expected="tasks with 'name', 'weight', 'metric'"
        )
    for index, task in enumerate(tasks):
        task_location = f"{location}: tasks[{index}]"
        _check_keys(_mapping(task, task_location), _TASK, task_location)
        if not isinstance(task.get("name"), str):
            raise InvalidInput(f"{task_location}.name", found=f"{task.get('name')!r}", expected="the name of a task")
        _number(task.get("weight", 1.0), f"{task_location}.weight")
    return tasks


def _check_keys(content: Mapping[str, Any], allowed: Sequence[str], location: str) -> None:
    for key in content:
        if key not in allowed:
            raise InvalidInput(
                f"{location}: {key}",
                found="an unknown key",
                expected=", ".join(allowed),
                remedy=suggest(str(key), allowed),
            )


def _mapping(value: object, location: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(location, found=f"{value!r:.60}", expected="a mapping")
    return value


def _number(value: object, location: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidInput(location, found=f"{value!r:.60}", expected="a number")
    return float(value)
