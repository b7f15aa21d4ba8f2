"""mergekit-evolve's YAML as a profile, with all that is not carried over named.

That file says which models, method and tasks; a search there has one score, on the documents that choose it, and no
test afterwards. Here its documents are those of the search alone, and the winner is confirmed on others.

Its format, from mergekit 0.1.5: ``genome`` (models, merge_method, base_model, tokenizer_source, layer_granularity,
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
# Of a method: what its genome says of each model, or of the way between two.
_WEIGHT, _BETWEEN = "weight", "t"
_LEAST_SEARCH = 10  # documents that a search set has at least
_CONFIRMED_ON = 2  # times as many documents
_METRIC = "acc,none"  # theirs, where a task names none


class UnsupportedSetting(NamedTuple):
    """A setting that has no counterpart, and why."""

    setting: str
    why: str


class ConvertedProfile(NamedTuple):
    """A profile as YAML says it, and what of the other file is not in it."""

    profile: dict[str, Any]
    not_carried: tuple[UnsupportedSetting, ...]


def profile_of_evolve(content: Mapping[str, Any], name: str, where: str, layers: int | None = None) -> ConvertedProfile:
    """What mergekit-evolve's ``content`` is as a profile.

    Args:
        content: As its YAML says it.
        name: Of the profile.
        where: What messages call the file.
        layers: Of the models; None: not known, and one value is searched for all layers.

    Raises:
        InvalidInput: A key that neither knows, or something that is missing.
    """
    _known(content, _TOP, where)
    genome = _mapping(content.get("genome"), f"{where}: genome")
    _known(genome, _GENOME, f"{where}: genome")
    models, method = _models(genome, where), _method(genome, where)
    dropped = list(_without_counterpart(content, genome, where))
    shape, lost = _layers_and_filters(genome, layers)
    recipe, parameters = _recipe(genome, models, method, shape)
    tasks = _tasks(content, where)
    kept = [task for task in tasks if float(task.get("weight", 1.0)) > 0]
    dropped += lost
    for task in tasks:
        if task not in kept:
            why = "a weight is above zero: a task that must not fall is a constraint (sweep.constraints)"
            dropped.append(UnsupportedSetting(f"tasks: {task['name']}: weight {task['weight']}", why))
    if not kept:
        raise InvalidInput(f"{where}: tasks", found="no task with a weight above zero", expected="at least one")
    if recipe.get("base_model") is None and genome.get("base_model") is not None:
        dropped.append(
            UnsupportedSetting("genome.base_model", f"{method.name} has no base; it is a guard's reference only")
        )
    return ConvertedProfile(_profile(content, name, recipe, parameters, kept, where), tuple(dropped))


def _profile(
    content: Mapping[str, Any],
    name: str,
    recipe: dict[str, Any],
    parameters: dict[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    where: str,
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
        documents = max(_LEAST_SEARCH, int(_number(content["limit"], f"{where}: limit")))
        sweep["documents"] = {"search": documents, "confirmation": max(20, _CONFIRMED_ON * documents)}
    evaluate: dict[str, Any] = {
        "tasks": [
            {"task": task["name"], "guarded_by": "best parent", "metric": metric}
            for task, metric in zip(tasks, metrics, strict=True)
        ]
    }
    if content.get("num_fewshot") is not None:
        evaluate["num_fewshot"] = int(_number(content["num_fewshot"], f"{where}: num_fewshot"))
    if content.get("apply_chat_template"):
        evaluate["chat_template"] = True
    return {"name": name, "recipe": recipe, "evaluate": evaluate, "sweep": sweep}


def _recipe(
    genome: Mapping[str, Any], models: Sequence[str], method: Method, shape: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recipe with holes, and what they may be. Weights begin at one over their number, densities at one."""
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
        own = {"weight": f"$weight_{number}"}
        start = round(1 / len(merged), 4)
        parameters[f"weight_{number}"] = {"low": lowest, "high": highest, "start": start, **shape}
        if method.traits.sparse:
            own["density"] = f"$density_{number}"
            parameters[f"density_{number}"] = {"low": 0.05, "high": 1.0, "start": 1.0, **shape}
        entries.append({"model": model, "parameters": own})
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
    """What each parameter says of layers and filters, and what it cannot say."""
    shape: dict[str, Any] = {}
    lost = []
    each = genome.get("layer_granularity")
    if each is not None and int(each) > 0:
        if layers is None:
            why = "the number of layers is not known here: add 'layers' (groups of layers) to the parameters"
            lost.append(UnsupportedSetting(f"genome.layer_granularity: {each}", why))
        elif (groups := math.ceil(layers / int(each))) > 1:
            shape["layers"] = groups
            if layers % int(each):
                why = f"{layers} layers are not divisible by it: they become {groups} groups of nearly one size"
                lost.append(UnsupportedSetting(f"genome.layer_granularity: {each}", why))
    if genome.get("filters"):
        shape["filters"] = list(genome["filters"])
    return shape, lost


def _without_counterpart(content: Mapping[str, Any], genome: Mapping[str, Any], where: str) -> list[UnsupportedSetting]:
    found = []
    if genome.get("smooth"):
        found.append(
            UnsupportedSetting("genome.smooth", "layers of a group have one value; nothing runs between groups")
        )
    if content.get("random_init"):
        found.append(UnsupportedSetting("random_init", "a search starts at the hand-written recipe"))
    if content.get("shuffle"):
        why = "documents of the search are drawn by a hash of their content (sweep.documents.seed)"
        found.append(UnsupportedSetting("shuffle", why))
    if content.get("fewshot_as_multiturn"):
        found.append(UnsupportedSetting("fewshot_as_multiturn", "few-shot examples stand in one turn"))
    return found


def _models(genome: Mapping[str, Any], where: str) -> list[str]:
    models = genome.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(one, str) and one for one in models):
        raise InvalidInput(f"{where}: genome.models", found=f"{models!r:.60}", expected="names of models")
    return list(dict.fromkeys(models))


def _method(genome: Mapping[str, Any], where: str) -> Method:
    every = merge_methods()
    known = {name: one for name, one in every.items() if one.parameter(_WEIGHT) or one.parameter(_BETWEEN)}
    method = known.get(str(genome.get("merge_method")))
    if method is None:
        raise InvalidInput(
            f"{where}: genome.merge_method",
            found=f"{genome.get('merge_method')!r}",
            expected=f"one of {', '.join(known)}",
            remedy=suggest(str(genome.get("merge_method")), list(known)),
        )
    if _works_over_base(method) and genome.get("base_model") is None:
        raise InvalidInput(
            f"{where}: genome.base_model", found="nothing", expected=f"{method.name} works on differences to a base"
        )
    return method


def _works_over_base(method: Method) -> bool:
    weight = method.parameter(_WEIGHT)
    return weight is not None and weight.scope == "non_base"


def _tasks(content: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise InvalidInput(f"{where}: tasks", found=f"{tasks!r:.60}", expected="tasks with 'name', 'weight', 'metric'")
    for index, task in enumerate(tasks):
        place = f"{where}: tasks[{index}]"
        _known(_mapping(task, place), _TASK, place)
        if not isinstance(task.get("name"), str):
            raise InvalidInput(f"{place}.name", found=f"{task.get('name')!r}", expected="the name of a task")
        _number(task.get("weight", 1.0), f"{place}.weight")
    return tasks


def _known(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise InvalidInput(
                f"{where}: {key}", found="an unknown key", expected=", ".join(known), remedy=suggest(str(key), known)
            )


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(where, found=f"{value!r:.60}", expected="a mapping")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidInput(where, found=f"{value!r:.60}", expected="a number")
    return float(value)
