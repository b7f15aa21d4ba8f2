"""Propose remedies: changes of the recipe to try after a refusal, each with a reason. All functions are pure.

A remedy is a recipe change in the form of an entry of ``remedies`` in a profile (see
``merge_core.recipe.parameters``)::

    {merge_method: ties, density: 0.3}
"""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.analysis import Tally
from mergegate.merge_core.methods import Method, merge_methods
from mergegate.merge_core.parsing import flow_yaml
from mergegate.merge_core.recipe import apply_overrides
from mergegate.tasks.quality.gate import GateVerdict

# Unrelated task vectors oppose each other in half of the weights that both change.
CHANCE = 0.5
# Sign conflict above which a remedy makes sense. Task vectors from one kind of training share most of their signs.
_HIGH_CONFLICT = 0.35
# Ratio of the distances of the merge and of the farthest parent from the origin, above which the merge moved too far.
_TOO_FAR = 1.05
# Cosine below which task vectors oppose each other. Values around zero mean that they are unrelated.
_OPPOSED = -0.02
# Densities to try. The TIES paper uses 0.2 (arXiv 2306.01708, section 4).
_DENSITIES = (0.5, 0.3, 0.2, 0.1)
_MORE_WEIGHT = 1.5
# Recipe keys whose value is a model.
_MODEL_KEYS = frozenset({"model", "base_model"})
# Ratio up to which distances count as equal; two parents of equal weight are equally far except for rounding.
_EQUAL_DISTANCE = 1.01


class Remedy(BaseModel):
    """Change of the recipe or of other settings of the profile that may help, and the reason why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    change: dict[str, Any]  # Plain data, in the form of a profile.
    reason: str  # Sentence with numbers.
    # ``recipe``: an item of ``remedies``, which a run can try. ``profile``: settings of the profile itself.
    kind: Annotated[Literal["recipe", "profile"], Field(exclude_if=lambda kind: kind == "recipe")] = "recipe"

    def text(self) -> str:
        """Return the change as one line of YAML."""
        return flow_yaml(self.change)

    def instruction(self) -> str:
        """Return what to do with :meth:`block`, without a colon at the end."""
        if self.kind == "profile":
            return "Set this in the profile, then run again"
        return "Paste this into the profile (append the item if it has 'remedies'), or run with --remedy auto"

    def block(self) -> str:
        """Return the change as YAML for a profile: its settings, or the only item of the key ``remedies``."""
        if self.kind == "profile":
            return yaml.safe_dump(self.change, sort_keys=False, allow_unicode=True).rstrip()
        item = yaml.safe_dump([self.change], sort_keys=False, default_flow_style=None, allow_unicode=True, width=1000)
        return f"remedies:\n{textwrap.indent(item, '  ')}".rstrip()


@dataclass(frozen=True)
class Diagnosis:
    """Measurements from which remedies are derived."""

    recipe: Mapping[str, Any]  # recipe as plain data, a single document
    names: tuple[str, ...]  # names of the models at the ends of the task vectors, in order
    refs: tuple[str, ...]  # the same models in the recipe's notation
    origin: tuple[str, str]  # model at the start of the task vectors: its name, and its notation in the recipe
    has_base: bool  # whether the origin is the recipe's base; if not, it is the first model, a parent like the others
    tally: Tally  # interference statistics of the whole network
    verdict: GateVerdict
    named_base: str | None = None  # if the recipe has no base: see ``explain.stage.named_base``


def suggest_remedies(diagnosis: Diagnosis) -> tuple[Remedy, ...]:
    """Return remedies for a merge that did not pass, the one with the strongest reason first; possibly none."""
    if diagnosis.verdict.outcome == "pass" or diagnosis.recipe.get("merge_method") not in merge_methods():
        return ()
    method, verdict, ratio = _method(diagnosis), diagnosis.verdict, relative_movement(diagnosis.tally)
    remedies: list[Remedy] = []
    # Factor of the merged task vector; None if the method has none, or it is not a single number.
    factor = (diagnosis.recipe.get("parameters") or {}).get("lambda", 1.0) if method.parameter("lambda") else None
    strength = float(factor) if isinstance(factor, (int, float)) else None
    moved_too_far = ratio is not None and ratio > _TOO_FAR
    if strength is not None and ratio is not None and moved_too_far:
        remedies.append(
            Remedy(
                change={"lambda": float(f"{strength / ratio:.2g}")},
                reason=f"The merge moved {ratio:.1f} times as far as the parent that moved farthest; "
                "a smaller lambda moves it back to the distance of its parents.",
            )
        )
    models, count = diagnosis.recipe.get("models"), diagnosis.tally.vectors
    for index, name in enumerate(diagnosis.names if count >= 3 and isinstance(models, Sequence) else ()):
        neighbors = (diagnosis.tally.cosine(index, neighbor) for neighbor in range(count) if neighbor != index)
        cosines = [cosine for cosine in neighbors if cosine is not None]
        ref = diagnosis.refs[index]
        remaining = [entry for entry in models or () if isinstance(entry, Mapping) and entry.get("model") != ref]
        if cosines and max(cosines) < _OPPOSED and len(remaining) == len(models or ()) - 1:
            remedies.append(
                Remedy(
                    change={"models": remaining},
                    reason=f"The task vector of {name} opposes all others (largest cosine {max(cosines):.2f}); "
                    "without it, fewer changes cancel.",
                )
            )
    for rule in (_resolve_conflict, _raise_weight, _use_named_base):
        remedies += rule(diagnosis)
    if verdict.drift is not None and verdict.drift.outcome == "fail" and strength is not None and not moved_too_far:
        remedies.append(
            Remedy(
                change={"lambda": float(f"{0.7 * strength:.2g}")},
                reason="Perplexity rose above the limit although the merge moved no farther than its parents; "
                "a smaller movement preserves more of their common knowledge.",
            )
        )
    return tuple(remedies)


def suggest_documents(verdict: GateVerdict, available: Mapping[str, int]) -> Remedy | None:
    """Return the advice to evaluate more documents, if the verdict is inconclusive and more of them would decide it.

    Args:
        verdict: Verdict of the gate.
        available: Number of documents of each task, evaluated or not.
    """
    if verdict.outcome != "inconclusive":
        return None
    evaluated = {guard.task: guard.documents_asked or guard.n for guard in verdict.guards}
    totals = {task: max(count, available.get(task, 0)) for task, count in evaluated.items()}
    needs = [
        (guard.documents_needed, totals[guard.task]) for guard in verdict.guards if guard.outcome == "inconclusive"
    ]
    needs += [
        (suite.documents_needed, sum(totals.values())) for suite in verdict.suites if suite.outcome == "inconclusive"
    ]
    # A run that may extend its looks has documents left. It ended because they are unlikely to decide.
    is_limited = evaluated != totals and not any(guard.documents_left for guard in verdict.guards)
    if not needs or not is_limited or any(needed is None or needed > total for needed, total in needs):
        return None
    largest = max(needed for needed, _ in needs if needed is not None)
    return Remedy(
        change={"evaluate": {"extend": True}},
        reason=f"The gate is inconclusive after {sum(evaluated.values()):,} of {sum(totals.values()):,} available "
        f"documents, and about {largest:,} would decide. With extend, the run evaluates more until the gate decides.",
        kind="profile",
    )


def _resolve_conflict(diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose methods that resolve conflicts where ``diagnosis`` shows opposed changes, or a lower density."""
    method, conflict = _method(diagnosis), diagnosis.tally.conflict
    if conflict is None or conflict < _HIGH_CONFLICT:
        return
    share = f"{100 * conflict:.0f} % of the weights that several parents change have opposite signs"
    words = share if diagnosis.tally.vectors > 2 else f"{share} ({100 * CHANCE:.0f} % by chance)"
    if method.traits.adds_up and diagnosis.has_base and "models" in diagnosis.recipe:
        for alternative in merge_methods().values():
            traits = alternative.traits.conflict_remedy
            if traits is None or alternative is method:
                continue
            additions = {name: value for name, value in traits.additions.items() if method.parameter(name) is None}
            yield Remedy(
                change={"merge_method": alternative.name, **traits.settings, **additions},
                reason=f"{words}; {method.name} adds opposed changes, which cancel, "
                f"while {alternative.name} {traits.reason}.",
            )
    current = max(_numbers(diagnosis.recipe, "density"), default=1.0)
    lower = next((density for density in _DENSITIES if density < current - 0.05), None)
    if method.traits.sparse and lower is not None:
        yield Remedy(
            change={"density": lower},
            reason=f"{words}; with density {lower:g} instead of {current:g}, fewer changes overlap.",
        )


def _raise_weight(diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose more weight for the parent whose skill was lost, if no other parent is farther from the merge."""
    models, tally = diagnosis.recipe.get("models"), diagnosis.tally
    distances = {name: tally.merge_distance(index) for index, name in enumerate(diagnosis.names)}
    refs = dict(zip(diagnosis.names, diagnosis.refs, strict=True))
    if not diagnosis.has_base:
        name, refs[name] = diagnosis.origin
        distances[name] = tally.merge_length
    lost = [guard for guard in diagnosis.verdict.guards if guard.outcome == "fail" and guard.reference in distances]
    if not lost or not isinstance(models, Sequence) or len(distances) < 2:
        return
    worst = max(lost, key=lambda guard: guard.drop - guard.max_drop)
    own_distance = distances[worst.reference]
    if own_distance is None or any(
        distance is None or distance > _EQUAL_DISTANCE * own_distance for distance in distances.values()
    ):
        return
    entries = [dict(entry) if isinstance(entry, Mapping) else {} for entry in models]
    weights = [_weight(entry) for entry in entries]
    for entry, weight in zip(entries, weights, strict=True):
        if entry.get("model") == refs[worst.reference] and weight is not None:
            # At least the largest weight of any other model.
            increased = max(_MORE_WEIGHT * weight, *(value for value in weights if value is not None))
            entry["parameters"] = {**entry["parameters"], "weight": round(increased, 3)}
            yield Remedy(
                change={"models": entries},
                reason=f"{worst.task} lost {worst.drop:.1f} points against {worst.reference}, "
                "which is the parent farthest from the merge; raise its weight.",
            )


def _use_named_base(diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose a method that combines changes from the common base, to replace an average of the models."""
    lost = [guard for guard in diagnosis.verdict.guards if guard.outcome == "fail"]
    if not lost or diagnosis.has_base or diagnosis.named_base is None or not _method(diagnosis).traits.adds_up:
        return
    if "models" not in diagnosis.recipe:
        return
    worst = max(lost, key=lambda guard: guard.drop - guard.max_drop)
    for alternative in merge_methods().values():
        remedy_traits = alternative.traits.conflict_remedy
        if remedy_traits is None or alternative.parameter("weight") is None:
            continue
        # Shares of an average are not strengths of changes, so take each change fully and let the method resolve them.
        change = {
            "merge_method": alternative.name,
            "base_model": diagnosis.named_base,
            **remedy_traits.settings,
            **remedy_traits.additions,
        }
        yield Remedy(
            change={**change, "weight": 1.0},
            reason=f"{worst.task} lost {worst.drop:.1f} points in an average of the models; their cards name "
            f"{diagnosis.named_base} as their base, and {alternative.name} with this base {remedy_traits.reason}.",
        )


def drop_tried_remedies(
    remedies: Iterable[Remedy],
    recipe: Mapping[str, Any],
    earlier_recipes: Iterable[Mapping[str, Any]],
    contents: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Remedy, ...]:
    """Return the remedies that change ``recipe`` to a recipe that was not tried yet.

    ``earlier_recipes`` are the recipes that were tried, including the failed one. ``contents`` are the content digests
    of the models in ``recipe``, by name; with them, ``earlier_recipes`` must be the results of ``normalize_recipe``. If
    a method normalizes weights, recipes with proportional weights are equal: .9 and .9 are the same as .5 and .5.
    """
    tried_recipes = [_canonical_recipe(earlier) for earlier in earlier_recipes]
    return tuple(
        remedy
        for remedy in remedies
        if _canonical_recipe(normalize_recipe(apply_overrides(recipe, remedy.change, "the proposed remedy"), contents))
        not in tried_recipes
    )


def normalize_recipe(recipe: Mapping[str, Any], contents: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe that names models by content digest, so that recipes in different directories are comparable."""

    def rename(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: contents.get(inner, inner) if key in _MODEL_KEYS and isinstance(inner, str) else rename(inner)
                for key, inner in value.items()
            }
        return [rename(inner) for inner in value] if isinstance(value, list) else value

    normalized: dict[str, Any] = rename(recipe)
    return normalized


def _canonical_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as plain data, with model weights as shares if its method normalizes them."""
    canonical = {name: copy.deepcopy(value) for name, value in recipe.items() if value not in ({}, None)}
    method = merge_methods().get(str(canonical.get("merge_method")))
    switch = (method.parameter("normalize") or method.parameter("normalize_weights")) if method else None
    models = canonical.get("models")
    if switch is None or not isinstance(models, list):
        return canonical
    weights = [_weight(entry) if isinstance(entry, Mapping) else None for entry in models]
    numbers = [weight for weight in weights if weight is not None]
    is_normalized = (canonical.get("parameters") or {}).get(switch.name, switch.default)
    total = math.fsum(numbers)
    if is_normalized is True and len(numbers) == len(models) and total:
        for entry, weight in zip(models, numbers, strict=True):
            entry["parameters"] = {**entry["parameters"], "weight": round(weight / total, 6)}
    return canonical


def relative_movement(tally: Tally) -> float | None:
    """Return the distance of the merge from the origin, divided by that of the parent that moved farthest."""
    farthest = max(tally.norm(vector) for vector in range(tally.vectors))
    return tally.gram[-1][-1] ** 0.5 / farthest if tally.has_merge and farthest else None


def _method(diagnosis: Diagnosis) -> Method:
    return merge_methods()[diagnosis.recipe["merge_method"]]


def _weight(entry: Mapping[str, Any]) -> float | None:
    """Return the weight of one model in a recipe; None unless it is a single number."""
    parameters = entry.get("parameters")
    weight = parameters.get("weight") if isinstance(parameters, Mapping) else None
    return float(weight) if isinstance(weight, (int, float)) else None


def _numbers(value: object, key: str, inside: bool = False) -> Iterator[float]:
    """Yield every number that a recipe assigns to parameter ``key`` in scalars, gradients and filters."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, key, inside or name == key)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _numbers(inner, key, inside)
    elif inside and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
