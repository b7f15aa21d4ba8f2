"""Remedies: which change of the recipe to try when the gate refuses, and why. Pure functions of what was measured.

A remedy is a change of a recipe, as a profile's ``remedies`` can hold it (see ``merge_core.recipe.overrides``)::

    {merge_method: ties, density: 0.3}
"""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.analysis import Tally
from mergegate.merge_core.methods import Method, merge_methods
from mergegate.merge_core.parsing import flow_yaml
from mergegate.merge_core.recipe import apply_overrides
from mergegate.tasks.gate import GateVerdict

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
# Keys of a recipe under which a model stands.
_NAMES_A_MODEL = frozenset({"model", "base_model"})
# Distances that differ by less are equal: two parents of equal weight are equally far, but for rounding.
_NEARLY = 1.01


class Remedy(BaseModel):
    """A change of the recipe that may help, and the reason to think so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    change: dict[str, Any]  # plain data, as it would stand in a profile
    reason: str  # a sentence with numbers

    def text(self) -> str:
        """The change as one line of YAML."""
        return flow_yaml(self.change)

    def block(self) -> str:
        """The change as a profile has it: its key ``remedies`` with this as the only item, in YAML."""
        item = yaml.safe_dump([self.change], sort_keys=False, default_flow_style=None, allow_unicode=True, width=1000)
        return f"remedies:\n{textwrap.indent(item, '  ')}".rstrip()


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
        named_base: Of a recipe without base: the one that the cards of all its models name, as the recipe would write
            it; None where they name none, or several.
    """

    recipe: Mapping[str, Any]
    names: tuple[str, ...]
    refs: tuple[str, ...]
    origin: tuple[str, str]
    has_base: bool
    whole: Tally
    verdict: GateVerdict
    named_base: str | None = None


def suggest_remedies(found: Diagnosis) -> tuple[Remedy, ...]:
    """Remedies for a merge that did not pass, the one with the strongest reason first; none where nothing is known."""
    if found.verdict.outcome == "pass" or found.recipe.get("merge_method") not in merge_methods():
        return ()
    return tuple(
        remedy
        for rule in (
            _move_less,
            _leave_one_out,
            _resolve_conflict,
            _keep_less,
            _weigh_more,
            _take_the_base,
            _move_less_for_perplexity,
        )
        for remedy in rule(found)
    )


def _move_less(found: Diagnosis) -> Iterator[Remedy]:
    ratio, strength = relative_movement(found.whole), _strength(found)
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


def _take_the_base(found: Diagnosis) -> Iterator[Remedy]:
    """From an average to changes of the base that all models were made from, which need not be shared out."""
    lost = [guard for guard in found.verdict.guards if guard.outcome == "fail"]
    if not lost or found.has_base or found.named_base is None or not _method(found).traits.adds_up:
        return
    if "models" not in found.recipe:
        return
    worst = max(lost, key=lambda guard: guard.drop - guard.max_drop)
    for other in merge_methods().values():
        offer = other.traits.conflict_remedy
        if offer is None or other.parameter("weight") is None:
            continue
        # The shares of an average are no strengths of changes: each is taken whole, and the method sorts them out.
        change = {"merge_method": other.name, "base_model": found.named_base, **offer.settings, **offer.additions}
        yield Remedy(
            change={**change, "weight": 1.0},
            reason=f"{worst.task} lost {worst.drop:.1f} points where the models share one average; their cards name "
            f"{found.named_base} as what they were made from, and {other.name} over it {offer.because}.",
        )


def _move_less_for_perplexity(found: Diagnosis) -> Iterator[Remedy]:
    drift, strength, ratio = found.verdict.drift, _strength(found), relative_movement(found.whole)
    if drift is None or drift.outcome != "fail" or strength is None or (ratio is not None and ratio > _TOO_FAR):
        return
    yield Remedy(
        change={"lambda": _two_digits(0.7 * strength)},
        reason="Perplexity rose over the limit although the merge moved no farther than its parents; "
        "a shorter way keeps more of what they share.",
    )


def drop_tried_remedies(
    remedies: Iterable[Remedy],
    recipe: Mapping[str, Any],
    tried: Iterable[Mapping[str, Any]],
    contents: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Remedy, ...]:
    """Those remedies that make another merge of ``recipe`` than any that was tried.

    Weights that a method normalises are the same merge whatever their sum: .9 and .9 are .5 and .5.

    Args:
        tried: Recipes as plain data, the failed one among them; with ``contents`` as ``normalize_recipe`` says them.
        contents: What the models of ``recipe`` hold, by how it writes them.
    """
    failed = [_meaning(one) for one in tried]
    return tuple(
        remedy
        for remedy in remedies
        if _meaning(normalize_recipe(apply_overrides(recipe, remedy.change, "the proposed remedy"), contents))
        not in failed
    )


def normalize_recipe(recipe: Mapping[str, Any], contents: Mapping[str, str]) -> dict[str, Any]:
    """A recipe as plain data whose models are called by what they hold, so that recipes of two directories compare."""

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: contents.get(inner, inner) if key in _NAMES_A_MODEL and isinstance(inner, str) else renamed(inner)
                for key, inner in value.items()
            }
        return [renamed(inner) for inner in value] if isinstance(value, list) else value

    named: dict[str, Any] = renamed(recipe)
    return named


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


def relative_movement(whole: Tally) -> float | None:
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
