"""Convert mergekit-evolve's YAML to a profile, and list every setting that cannot be carried over.

A mergekit-evolve file (here that of mergekit 0.1.5) declares models, a method and tasks. Its search ends with the
candidate that scores best on its documents. In the converted profile, the winner is also confirmed on other documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import Method, merge_methods

# fmt: off
_TOP_KEYS = (
    "genome", "tasks", "limit", "num_fewshot", "shuffle", "random_init", "apply_chat_template", "fewshot_as_multiturn",
)
_GENOME_KEYS = (
    "models", "merge_method", "base_model", "tokenizer_source", "layer_granularity", "normalize",
    "allow_negative_weights", "filters", "smooth",
)
# fmt: on
_TASK_KEYS = ("name", "weight", "metric")
# Method parameters that a genome can set: a weight per model, or the position between two models.
_WEIGHT, _POSITION = "weight", "t"
_MIN_SEARCH_DOCUMENTS = 10  # smallest number of documents of a search set
_CONFIRMATION_FACTOR = 2  # documents of the confirmation, as a multiple of those of the search
_DEFAULT_METRIC = "acc,none"  # mergekit-evolve's default for tasks without a metric


class UnsupportedSetting(NamedTuple):
    """Setting that cannot be converted, and the reason."""

    setting: str
    reason: str


class ConvertedProfile(NamedTuple):
    """Profile as parsed YAML, and the settings of the source file that it does not include."""

    profile: dict[str, Any]
    unsupported: tuple[UnsupportedSetting, ...]


def convert_evolve_file(
    content: Mapping[str, Any], name: str, file_name: str, layers: int | None = None
) -> ConvertedProfile:
    """Return the profile that corresponds to the ``content`` of a mergekit-evolve file.

    Args:
        content: Parsed YAML of the file.
        name: Name of the profile.
        file_name: Name of the file in error messages.
        layers: Number of layers of the models. If it is unknown, one value is searched for all layers.

    Raises:
        InvalidInput: A key is unknown, or a required setting is missing.
    """
    _check_keys(content, _TOP_KEYS, file_name)
    genome = _mapping(content.get("genome"), f"{file_name}: genome")
    _check_keys(genome, _GENOME_KEYS, f"{file_name}: genome")
    models = genome.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(model, str) and model for model in models):
        raise InvalidInput(f"{file_name}: genome.models", found=f"{models!r:.60}", expected="a list of model names")
    method = _method(genome, file_name)
    unsupported = [
        UnsupportedSetting(setting, reason)
        for setting, value, reason in (
            ("genome.smooth", genome.get("smooth"), "all layers of a group have the same value"),
            ("random_init", content.get("random_init"), "a search starts at the hand-written recipe"),
            (
                "shuffle",
                content.get("shuffle"),
                "a hash of their content selects the search documents (sweep.documents.seed)",
            ),
            ("fewshot_as_multiturn", content.get("fewshot_as_multiturn"), "all few-shot examples are in one turn"),
        )
        if value
    ]
    # Layers and filters, which are the same for all parameters.
    shape: dict[str, Any] = {"filters": list(genome["filters"])} if genome.get("filters") else {}
    if genome.get("layer_granularity") is not None and int(genome["layer_granularity"]) > 0:
        granularity = int(genome["layer_granularity"])
        setting = f"genome.layer_granularity: {genome['layer_granularity']}"
        if layers is None:
            reason = "the number of layers is unknown: add 'layers' (number of layer groups) to the parameters"
            unsupported.append(UnsupportedSetting(setting, reason))
        elif (groups := math.ceil(layers / granularity)) > 1:
            shape = {"layers": groups, **shape}
            if layers % granularity:
                reason = f"{layers} layers are not divisible by it: they become {groups} groups of nearly equal size"
                unsupported.append(UnsupportedSetting(setting, reason))
    recipe, parameters = _recipe(genome, list(dict.fromkeys(models)), method, shape)
    tasks = _tasks(content, file_name)
    weighted = [task for task in tasks if float(task.get("weight", 1.0)) > 0]
    for task in tasks:
        if task not in weighted:
            reason = "a weight must be above zero. Use sweep.constraints for a task whose score must not fall"
            unsupported.append(UnsupportedSetting(f"tasks: {task['name']}: weight {task['weight']}", reason))
    if not weighted:
        raise InvalidInput(f"{file_name}: tasks", found="no task with a weight above zero", expected="at least one")
    if recipe.get("base_model") is None and genome.get("base_model") is not None:
        reason = f"{method.name} has no base. The base can only be the reference of a guard"
        unsupported.append(UnsupportedSetting("genome.base_model", reason))
    return ConvertedProfile(_make_profile(content, name, recipe, parameters, weighted, file_name), tuple(unsupported))


def _make_profile(
    content: Mapping[str, Any],
    name: str,
    recipe: dict[str, Any],
    parameters: dict[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    location: str,
) -> dict[str, Any]:
    metrics = [str(task.get("metric") or _DEFAULT_METRIC) for task in tasks]
    sweep: dict[str, Any] = {
        "parameters": parameters,
        "objective": [
            {"task": task["name"], "measure": "metric", "metric": metric, "weight": float(task.get("weight", 1.0))}
            for task, metric in zip(tasks, metrics, strict=True)
        ],
    }
    if content.get("limit") is not None:
        documents = max(_MIN_SEARCH_DOCUMENTS, int(_number(content["limit"], f"{location}: limit")))
        sweep["documents"] = {"search": documents, "confirmation": max(20, _CONFIRMATION_FACTOR * documents)}
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

    The start value of each weight is one divided by the number of models, and that of each density is one.
    """
    base = genome.get("base_model")
    recipe: dict[str, Any] = {"merge_method": method.name, "dtype": "bfloat16"}
    parameters: dict[str, Any] = {}
    if method.parameter(_WEIGHT) is None:
        first = str(base) if base is not None else models[0]
        ordered = [first, *(model for model in models if model != first)]
        recipe |= {"base_model": first, "models": [{"model": model} for model in ordered]}
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


def _method(genome: Mapping[str, Any], location: str) -> Method:
    all_methods = merge_methods()
    supported = {
        name: item for name, item in all_methods.items() if item.parameter(_WEIGHT) or item.parameter(_POSITION)
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
            f"{location}: genome.base_model", found="nothing", expected=f"a base model, which {method.name} requires"
        )
    return method


def _works_over_base(method: Method) -> bool:
    weight = method.parameter(_WEIGHT)
    return weight is not None and weight.scope == "non_base"


def _tasks(content: Mapping[str, Any], location: str) -> list[Mapping[str, Any]]:
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise InvalidInput(
            f"{location}: tasks", found=f"{tasks!r:.60}", expected="a list of tasks with 'name', 'weight', 'metric'"
        )
    for index, task in enumerate(tasks):
        task_location = f"{location}: tasks[{index}]"
        _check_keys(_mapping(task, task_location), _TASK_KEYS, task_location)
        if not isinstance(task.get("name"), str):
            raise InvalidInput(f"{task_location}.name", found=f"{task.get('name')!r}", expected="the name of a task")
        _number(task.get("weight", 1.0), f"{task_location}.weight")
    return tasks


def _check_keys(content: Mapping[str, Any], allowed_keys: Sequence[str], location: str) -> None:
    for key in content:
        if key not in allowed_keys:
            raise InvalidInput(
                f"{location}: {key}",
                found="an unknown key",
                expected=", ".join(allowed_keys),
                remedy=suggest(str(key), allowed_keys),
            )


def _mapping(value: object, location: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(location, found=f"{value!r:.60}", expected="a mapping")
    return value


def _number(value: object, location: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidInput(location, found=f"{value!r:.60}", expected="a number")
    return float(value)
