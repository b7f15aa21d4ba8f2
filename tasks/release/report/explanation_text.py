"""Explain in sentences and table rows why a merge did not pass, based on its weights. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.parsing import flow_yaml
from mergegate.merge_core.recipe import apply_overrides
from mergegate.tasks.quality.judge import JudgeVerdict
from mergegate.tasks.quality.perplexity import ensemble_gain_share
from mergegate.tasks.release.explain import CHANCE, Explanation, Remedy, relative_movement
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.wording import NONE, interval, number, plain

# Layers whose sign conflicts differ by less count as equal.
_EQUAL_CONFLICT = 0.03
# A movement that would be displayed as 0.00 counts as none.
_UNMOVED = 0.005


def why(explanation: Explanation) -> tuple[str, ...]:
    """Return sentences that explain the outcome from the weights, the most important first."""
    interference = explanation.interference
    if interference is None:
        return ("The weights of these models could not be compared.",)
    total, names, sentences = interference.network_tally, explanation.vectors, []

    ratio = relative_movement(total)
    if ratio is not None and ratio < _UNMOVED:
        sentences.append(f"The compared weights of the merge are those of {explanation.origin}: it did not move.")
    elif ratio is not None:
        farthest = names[max(range(total.vectors), key=total.norm)]
        far = f"The merge moved {number(ratio, 2)} times as far from {explanation.origin} as {farthest}"
        sentences.append(f"{far}, the parent that moved farthest." if len(names) > 1 else f"{far}.")
        distances = [total.merge_distance(index) or 0.0 for index in range(total.vectors)]
        nearest = min(range(len(names)), key=distances.__getitem__)
        remotest = max(range(len(names)), key=distances.__getitem__)
        if distances[remotest] > 1.05 * distances[nearest]:
            sentences.append(f"It is closest to {names[nearest]} and farthest from {names[remotest]}.")

    if total.conflict is not None and total.vectors >= 2:
        sentences.append(
            f"The sign conflict is {100 * total.conflict:.0f} %, the share of common changes that have opposite "
            f"directions. Unrelated parents would have {100 * CHANCE:.0f} %."
        )
        if total.vectors > 2:
            pairs = {pair: total.pair_conflict(*pair) or 0.0 for pair in total.pairs}
            first, second = max(pairs, key=lambda pair: pairs[pair])
            share = f"{100 * pairs[first, second]:.0f} %"
            sentences.append(f"{names[first]} and {names[second]} conflict most ({share}).")

    by_layer = {layer: tally.conflict for (_, layer), tally in interference.layers().items()}
    measured = {layer: conflict for layer, conflict in by_layer.items() if conflict is not None}
    ranked = sorted(measured, key=lambda layer: (-measured[layer], layer))
    if len(ranked) >= 2 and measured[ranked[0]] - measured[ranked[-1]] < _EQUAL_CONFLICT:
        sentences.append(f"All {len(measured)} layers have about the same sign conflict.")
    elif len(ranked) >= 2:
        *others, last = [f"{layer} ({100 * measured[layer]:.0f} %)" for layer in ranked[: min(3, len(ranked) - 1)]]
        strongest = f"layers {', '.join(others)} and {last}" if others else f"layer {last}"
        weakest = f"layer {ranked[-1]} ({100 * measured[ranked[-1]]:.0f} %)"
        sentences.append(f"It is highest in {strongest} and lowest in {weakest}.")

    if not explanation.origin_is_base:
        sentences.append(
            f"The recipe has no base, so mergegate measures task vectors from its first model, {explanation.origin}."
        )
    sentences += [
        f"{skipped.tensors} tensor{'s are' if skipped.tensors > 1 else ' is'} not compared: "
        f"{skipped.reason} ({skipped.example})."
        for skipped in interference.skipped
    ]
    return tuple(sentences)


def recipe_diff(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the changed settings of a recipe in plain data: removed lines with '-', then added lines with '+'.

    The result is empty if nothing changed, or for a recipe with several documents, which is None.
    """
    if before is None or after is None:
        return ()
    old, new = _setting_lines(before), _setting_lines(after)
    return (
        *(f"- {line}" for line in old if line not in new),
        *(f"+ {line}" for line in new if line not in old),
    )


def remedy_diff(content: ReportContent, remedy: Remedy) -> tuple[str, ...]:
    """Return the changes that a remedy makes to the recipe of the report. See ``recipe_diff``."""
    if remedy.kind == "profile":
        return ()
    try:
        recipe = yaml.safe_load(content.recipe)
        return recipe_diff(recipe, apply_overrides(recipe, remedy.change, "the proposed remedy"))
    except (yaml.YAMLError, MergegateError):  # a recipe of several documents
        return ()


def _setting_lines(recipe: Mapping[str, Any]) -> list[str]:
    """Return one line per setting, per parameter and per item of a list, as 'parameters.lambda: 0.5'."""
    lines = []
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            lines += [f"{key}.{name}: {flow_yaml(inner)}" for name, inner in value.items()]
        elif isinstance(value, list):
            lines += [f"{key}: {flow_yaml(item)}" for item in value]
        else:
            lines.append(f"{key}: {flow_yaml(value)}")
    return lines


def vector_rows(explanation: Explanation) -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """Return one row per task vector, or none if the weights could not be compared.

    A row has the name of the model, the length, the cosine with each model and the distance from the merge. Lengths are
    relative to the origin's norm.
    """
    if explanation.interference is None:
        return ()
    total, rows = explanation.interference.network_tally, []
    for index, name in enumerate(explanation.vectors):
        cosines = enumerate(total.cosine(index, column) for column in range(total.vectors))
        texts = tuple("1" if at == index else NONE if each is None else number(each, 2) for at, each in cosines)
        rows.append((name, _relative(total.length(index)), texts, _relative(total.merge_distance(index))))
    return tuple(rows)


def merge_length(explanation: Explanation) -> str:
    """Return the distance of the merge from the origin, relative to the origin's norm. Empty if it is unknown."""
    interference = explanation.interference
    return _relative(interference.network_tally.merge_length) if interference and interference.has_merge else ""


def ensemble_sentence(content: ReportContent) -> str:
    """Return a sentence about the gain of a parents' ensemble and the merge's share of it. Empty if not measured."""
    merge = next((model.likelihoods for model in content.models if model.role == "merge"), None)
    members = [model.likelihoods for model in content.models if model.role == "parent" and model.likelihoods]
    ensemble = content.ensemble
    if ensemble is None or ensemble.perplexity is None or merge is None or not members:
        return ""
    start = f"An ensemble that averages the token probabilities of all parents has perplexity {ensemble.perplexity:.3f}"
    share = ensemble_gain_share(members, ensemble, merge)
    if share is None:
        return f"{start}. This is no better than the better parent, so on this text the parents have nothing to share."
    if share <= 0:
        return f"{start}. The merge keeps none of this gain over the better parent."
    return f"{start}. The merge keeps {100 * share:.0f} % of this gain over the better parent."


def expert_sentences(content: ReportContent) -> tuple[str, ...]:
    """Return one sentence per parent that compares its experts and routers with those of the donor.

    The donor is the model that provides the layout of the merged model. If the routers were repaired, the effect
    follows.
    """
    repair = (content.routers.sentences,) if content.routers else ()
    distances = (
        f"{row.model}: its experts have a mean cosine of {row.diagonal:.3f} with the experts of the donor at the same "
        f"position. In the best order the cosine is {row.best:.3f}, and that order differs in {row.moved} of "
        f"{row.layers} layers. Its merged routers have a cosine of {row.routers:.3f} and differ by up to "
        f"{100 * row.distance:.0f} %."
        for row in content.experts
    )
    return (*distances, *repair)


def judge_numbers(judge: JudgeVerdict) -> str:
    """Return the win rate with its interval: 'win rate 52.0 % [47.1, 56.9]'."""
    return f"win rate {number(100 * judge.win_rate, 1)} % {interval(100 * judge.low, 100 * judge.high, 1)}"


def _relative(value: float | None) -> str:
    return NONE if value is None else f"{plain(float(f'{100 * value:.2g}'))} %"
