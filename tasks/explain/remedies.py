"""Remedies: which change of the recipe to try when the gate refuses, and why. Pure functions of what was measured.

A remedy is a change of a recipe, as a profile's ``remedies`` can hold it (see ``merge_core.recipe.overrides``)::

    {merge_method: ties, density: 0.3}
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from merge_core.analysis import Tally
from merge_core.methods import Method, merge_methods
from merge_core.recipe import apply_overrides
from tasks.gate import GateVerdict

# Task vectors that have nothing to do with each other oppose each other in half of the weights that both move.
CHANCE = 0.5
# From here on there is something to resolve: task vectors of one kind of training share most of their signs.
_HIGH_CONFLICT = 0.35
# A merge that moved farther than the parent that moved farthest is where no parent was.
_TOO_FAR = 1.05
# A cosine below this is opposition; around zero is indifference.
_OPPOSED = -0.02
# Shares of each task vector that are worth a try; 0.2 is what TIES was published with (arXiv 2306.01708, section 4).
_DENSITIES = (0.5, 0.3, 0.2, 0.1)
_MORE_WEIGHT = 1.5
# Distances that differ by less are equal: two parents of equal weight are equally far, but for rounding.
_NEARLY = 1.01


class Remedy(BaseModel):
    """A change of the recipe that may help, and the reason to think so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    change: dict[str, Any]  # plain data, as it would stand in a profile
    reason: str  # a sentence with numbers

    def text(self) -> str:
        """The change as one line of YAML, to be copied into a profile."""
        return _flow(self.change)


@dataclass(frozen=True)
class Diagnosis:
    """What remedies are derived from.

    Args:
        recipe: As plain data, one document.
        names: Of the models at the ends of the task vectors, in their order.
        refs: The same models as the recipe writes them.
        origin: Where task vectors begin: name, and the model as the recipe writes it.
        has_base: Whether that is the recipe's base; otherwise it is its first model, a parent like the others.
        whole: Tally of the whole network.
        verdict: Of the gate.
    """

    recipe: Mapping[str, Any]
    names: tuple[str, ...]
    refs: tuple[str, ...]
    origin: tuple[str, str]
    has_base: bool
    whole: Tally
    verdict: GateVerdict


def suggest_remedies(found: Diagnosis) -> tuple[Remedy, ...]:
    """Remedies for a merge that did not pass, the one with the strongest reason first; none where nothing is known."""
    if found.verdict.outcome == "pass" or found.recipe.get("merge_method") not in merge_methods():
        return ()
    return tuple(
        remedy
        for rule in (_move_less, _leave_one_out, _resolve_conflict, _keep_less, _weigh_more, _move_less_for_perplexity)
        for remedy in rule(found)
    )


def _move_less(found: Diagnosis) -> Iterator[Remedy]:
    ratio, strength = movement(found.whole), _strength(found)
    if ratio is None or strength is None or ratio <= _TOO_FAR:
        return
    yield Remedy(
        change={"lambda": _two_digits(strength / ratio)},
        reason=f"The merge moved {ratio:.1f} times as far as the parent that moved farthest; "
        "this takes it back to where they are.",
    )


def _leave_one_out(found: Diagnosis) -> Iterator[Remedy]:
    models = found.recipe.get("models")
    if found.whole.vectors < 3 or not isinstance(models, Sequence):
        return
    for at, (name, ref) in enumerate(zip(found.names, found.refs, strict=True)):
        others = [found.whole.cosine(at, other) for other in range(found.whole.vectors) if other != at]
        known = [cosine for cosine in others if cosine is not None]
        left = [entry for entry in models if isinstance(entry, Mapping) and entry.get("model") != ref]
        if known and max(known) < _OPPOSED and len(left) == len(models) - 1:
            yield Remedy(
                change={"models": left},
                reason=f"The task vector of {name} points against those of all others "
                f"(cosine {max(known):.2f} at best): without it they have less to fight.",
            )


def _resolve_conflict(found: Diagnosis) -> Iterator[Remedy]:
    """Change from a method in which opposed task vectors cancel to those that offer themselves for it."""
    method, conflict = _method(found), found.whole.conflict
    if not method.traits.adds_up or not found.has_base or "models" not in found.recipe:
        return
    if conflict is None or conflict < _HIGH_CONFLICT:
        return
    for other in merge_methods().values():
        offer = other.traits.conflict_remedy
        if offer is None or other is method:
            continue
        added = {name: value for name, value in offer.additions.items() if method.parameter(name) is None}
        yield Remedy(
            change={"merge_method": other.name, **offer.settings, **added},
            reason=f"{_conflict_words(found.whole)}; {method.name} adds them up and they cancel, "
            f"while {other.name} {offer.because}.",
        )


def _keep_less(found: Diagnosis) -> Iterator[Remedy]:
    conflict = found.whole.conflict
    if not _method(found).traits.sparse or conflict is None or conflict < _HIGH_CONFLICT:
        return
    now = max(_numbers(found.recipe, "density"), default=1.0)
    lower = next((density for density in _DENSITIES if density < now - 0.05), None)
    if lower is not None:
        yield Remedy(
            change={"density": lower},
            reason=f"{_conflict_words(found.whole)}; with density {lower:g} instead of {now:g} fewer of them meet.",
        )


def _weigh_more(found: Diagnosis) -> Iterator[Remedy]:
    """More weight for the parent whose skill was lost, where the merge went farther from it than from the others."""
    models, whole = found.recipe.get("models"), found.whole
    distances = {name: whole.merge_distance(at) for at, name in enumerate(found.names)}
    refs = dict(zip(found.names, found.refs, strict=True))
    if not found.has_base:
        name, refs[name] = found.origin
        distances[name] = whole.merge_length
    lost = [guard for guard in found.verdict.guards if guard.outcome == "fail" and guard.reference in distances]
    if not lost or not isinstance(models, Sequence) or len(distances) < 2:
        return
    worst = max(lost, key=lambda guard: guard.drop - guard.max_drop)
    own = distances[worst.reference]
    if own is None or any(distance is None or distance > _NEARLY * own for distance in distances.values()):
        return
    entries = [dict(entry) if isinstance(entry, Mapping) else {} for entry in models]
    weights = [_weight(entry) for entry in entries]
    for entry, weight in zip(entries, weights, strict=True):
        if entry.get("model") == refs[worst.reference] and weight is not None:
            # At least as much as any other has.
            more = max(_MORE_WEIGHT * weight, *(other for other in weights if other is not None))
            entry["parameters"] = {**entry["parameters"], "weight": round(more, 3)}
            yield Remedy(
                change={"models": entries},
                reason=f"{worst.task} lost {worst.drop:.1f} points against {worst.reference}, and no parent is farther "
                "from the merge; more weight brings it nearer.",
            )


def _move_less_for_perplexity(found: Diagnosis) -> Iterator[Remedy]:
    drift, strength, ratio = found.verdict.drift, _strength(found), movement(found.whole)
    if drift is None or drift.outcome != "fail" or strength is None or (ratio is not None and ratio > _TOO_FAR):
        return
    yield Remedy(
        change={"lambda": _two_digits(0.7 * strength)},
        reason="Perplexity rose over the limit although the merge moved no farther than its parents; "
        "a shorter way keeps more of what they share.",
    )


def instead_of_tried(
    remedies: Iterable[Remedy],
    recipe: Mapping[str, Any],
    tried: Sequence[Mapping[str, Any]],
    called: Mapping[str, str],
) -> tuple[Remedy, ...]:
    """Those remedies that make another merge of ``recipe`` than any that was tried; in place of new weights that were
    refused before, half the step to them, where that is new.

    Weights that a method normalises are the same merge whatever their sum: .9 and .9 are .5 and .5.

    Args:
        tried: Recipes that were refused, with models by digest.
        called: Digests of the models of ``recipe``, as it writes them.
    """
    refused = [_meaning(one) for one in tried]

    def is_new(remedy: Remedy) -> bool:
        changed = apply_overrides(recipe, remedy.change, "the proposed remedy")
        return _meaning(by_digest(changed, called)) not in refused

    found: list[Remedy] = []
    for remedy in remedies:
        offered = remedy if is_new(remedy) else _halfway(remedy, recipe)
        if offered is not None and is_new(offered) and offered not in found:
            found.append(offered)
    return tuple(found)


def by_digest(recipe: Mapping[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    """``recipe`` with digests in place of the names of its models: the same merge whatever the models are called."""

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: renamed(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [renamed(inner) for inner in value]
        return called.get(value, value) if isinstance(value, str) else value

    return {name: renamed(value) for name, value in recipe.items()}


def _halfway(remedy: Remedy, recipe: Mapping[str, Any]) -> Remedy | None:
    """Half the step from the weights of ``recipe`` to those of the remedy, as shares; None where it is no such step."""
    before, after = recipe.get("models"), remedy.change.get("models")
    if not isinstance(before, Sequence) or not isinstance(after, Sequence) or len(before) != len(after):
        return None
    pairs = [
        tuple(_weight(entry) if isinstance(entry, Mapping) else None for entry in both)
        for both in zip(before, after, strict=True)
    ]
    old = [first for first, _ in pairs if first is not None]
    new = [second for _, second in pairs if second is not None]
    if len(old) < len(pairs) or len(new) < len(pairs) or not math.fsum(old) or not math.fsum(new):
        return None
    entries = [
        {
            **entry,
            "parameters": {
                **entry["parameters"],
                "weight": round((mine / math.fsum(old) + theirs / math.fsum(new)) / 2 * math.fsum(old), 3),
            },
        }
        for entry, mine, theirs in zip(after, old, new, strict=True)
    ]
    reason = f"{remedy.reason} The whole of that step was refused before; this is half of it."
    return Remedy(change={"models": entries}, reason=reason)


def _meaning(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as plain data, with the weights of its models as shares where its method makes them that."""
    meant = {name: copy.deepcopy(value) for name, value in recipe.items() if value not in ({}, None)}
    method = merge_methods().get(str(meant.get("merge_method")))
    switch = (method.parameter("normalize") or method.parameter("normalize_weights")) if method else None
    models = meant.get("models")
    if switch is None or not isinstance(models, list):
        return meant
    weights = [_weight(entry) if isinstance(entry, Mapping) else None for entry in models]
    known = [weight for weight in weights if weight is not None]
    normalises = (meant.get("parameters") or {}).get(switch.name, switch.default)
    total = math.fsum(known)
    if normalises is True and len(known) == len(models) and total:
        for entry, weight in zip(models, known, strict=True):
            entry["parameters"] = {**entry["parameters"], "weight": round(weight / total, 6)}
    return meant


def movement(whole: Tally) -> float | None:
    """How far the merge moved from the origin, over how far the parent moved that moved farthest."""
    farthest = max(whole.norm(vector) for vector in range(whole.vectors))
    return whole.gram[-1][-1] ** 0.5 / farthest if whole.has_merge and farthest else None


def _method(found: Diagnosis) -> Method:
    return merge_methods()[found.recipe["merge_method"]]


def _strength(found: Diagnosis) -> float | None:
    """The factor of the merged task vector; None where the method has none, or it is not one number."""
    if _method(found).parameter("lambda") is None:
        return None
    value = (found.recipe.get("parameters") or {}).get("lambda", 1.0)
    return float(value) if isinstance(value, (int, float)) else None


def _weight(entry: Mapping[str, Any]) -> float | None:
    """The weight of one model of a recipe; None where it is not one number of its own."""
    parameters = entry.get("parameters")
    weight = parameters.get("weight") if isinstance(parameters, Mapping) else None
    return float(weight) if isinstance(weight, (int, float)) else None


def _two_digits(value: float) -> float:
    """``value`` as a person would write it, however small."""
    return float(f"{value:.2g}")


def _conflict_words(whole: Tally) -> str:
    share = f"{100 * (whole.conflict or 0):.0f} % of the weights that several parents move are pulled both ways"
    return share if whole.vectors > 2 else f"{share} ({100 * CHANCE:.0f} % would be chance)"


def _numbers(value: object, key: str, inside: bool = False) -> Iterator[float]:
    """Every number that a recipe gives to parameter ``key``, in whatever form: scalars, gradients, filters."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, key, inside or name == key)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _numbers(inner, key, inside)
    elif inside and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def _flow(value: object) -> str:
    """``value`` in YAML's flow style, in one line and unquoted where that is safe."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if (
        isinstance(value, str)
        and value.replace("_", "a").replace("-", "a").replace("/", "a").replace(".", "a").isalnum()
    ):
        return value if not value.replace(".", "").isdigit() and value.lower() not in _YAML_WORDS else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


_YAML_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off"})
