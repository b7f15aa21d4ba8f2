"""How the report explains a merge that did not pass: sentences and rows about weights. Pure functions of values."""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.merge_core.analysis import Tally
from mergegate.tasks.explain import CHANCE, Explanation, relative_movement
from mergegate.tasks.perplexity import ensemble_gain_share
from mergegate.tasks.report.content import ReportContent, ReportedJudge
from mergegate.tasks.report.wording import NONE, interval, number, plain

# Layers whose sign conflict differs by less are alike.
_ALIKE = 0.03
# A movement that would be told as 0.00 is none.
_UNMOVED = 0.005


@dataclass(frozen=True)
class VectorRow:
    """One model in the table of task vectors, as it is shown. Lengths are over the origin's norm."""

    name: str
    length: str
    cosines: tuple[str, ...]  # with each of the models; '1' with itself
    distance: str  # of the merge from it


def why(explanation: Explanation) -> tuple[str, ...]:
    """What the weights say, a sentence each; the most telling first."""
    found = explanation.interference
    if found is None:
        return ("The weights of these models could not be compared.",)
    whole = found.whole
    sentences = [
        *_movement(explanation, whole),
        *_conflict(explanation, whole),
        *_layers({layer: tally.conflict for (_, layer), tally in found.layers().items()}),
        *_origin(explanation),
        *(
            f"{skipped.tensors} tensor{'s were' if skipped.tensors > 1 else ' was'} left out: "
            f"{skipped.reason} ({skipped.example})."
            for skipped in found.skipped
        ),
    ]
    return tuple(sentences)


def vector_rows(explanation: Explanation) -> tuple[VectorRow, ...]:
    """A row for each task vector; empty where weights could not be compared."""
    if explanation.interference is None:
        return ()
    whole = explanation.interference.whole
    return tuple(
        VectorRow(
            name=name,
            length=_relative(whole.length(at)),
            cosines=tuple("1" if other == at else _cosine(whole, at, other) for other in range(whole.vectors)),
            distance=_relative(whole.merge_distance(at)),
        )
        for at, name in enumerate(explanation.vectors)
    )


def merge_length(explanation: Explanation) -> str:
    """How far the merge moved from the origin, over the origin's norm; empty where that is not known."""
    found = explanation.interference
    return _relative(found.whole.merge_length) if found and found.has_merge else ""


def ensemble_sentence(content: ReportContent) -> str:
    """What the parents together would have gained, and how much of it the merge keeps; empty where not measured."""
    merge = next((model.likelihoods for model in content.models if model.role == "merge"), None)
    members = [model.likelihoods for model in content.models if model.role == "parent" and model.likelihoods]
    together = content.ensemble
    if together is None or together.perplexity is None or merge is None or not members:
        return ""
    said = f"The mean of the parents' probabilities, token by token, has perplexity {together.perplexity:.3f}"
    kept = ensemble_gain_share(members, together, merge)
    if kept is None:
        return f"{said}, no better than the better parent: on this text they have nothing to give each other."
    if kept <= 0:
        return f"{said}; the merge keeps nothing of that gain over the better parent."
    return f"{said}; the merge keeps {100 * kept:.0f} % of that gain over the better parent."


def expert_sentences(content: ReportContent) -> tuple[str, ...]:
    """How the experts of each parent correspond to those of the donor, and how far their routers are apart."""
    return tuple(
        f"{one.model}: expert by expert its weights have a mean cosine of {one.diagonal:.3f} with those of the model "
        f"that gives the layout ({one.best:.3f} in the best order, which is another in {one.moved} of {one.layers} "
        f"layers); its routers, as they were merged, {one.routers:.3f}, and are up to {100 * one.distance:.0f} % apart."
        for one in content.experts
    )


def judge_numbers(judge: ReportedJudge) -> str:
    """'win rate 52.0 % [47.1, 56.9]'."""
    return f"win rate {number(100 * judge.win_rate, 1)} % {interval(100 * judge.low, 100 * judge.high, 1)}"


def _origin(explanation: Explanation) -> list[str]:
    if explanation.origin_is_base:
        return [f"Task vectors are the differences of the parents to {explanation.origin}, the base of the recipe."]
    return [f"The recipe names no base: differences are measured from its first model, {explanation.origin}."]


def _conflict(explanation: Explanation, whole: Tally) -> list[str]:
    if whole.conflict is None or whole.vectors < 2:
        return []
    share = f"{100 * whole.conflict:.0f} % are moved in opposite directions"
    chance = f"{100 * CHANCE:.0f} %"
    names = explanation.vectors
    if whole.vectors == 2:
        return [
            f"Of the weights that both {names[0]} and {names[1]} move noticeably, {share}; for parents that have "
            f"nothing to do with each other it would be {chance}."
        ]
    pairs = {pair: whole.pair_conflict(*pair) or 0.0 for pair in whole.pairs}
    one, other = max(pairs, key=lambda pair: pairs[pair])
    return [
        f"Of the weights that two or more parents move noticeably, {share}. The pair that conflicts most is "
        f"{names[one]} and {names[other]}, with {100 * pairs[one, other]:.0f} %, where {chance} would be chance."
    ]


def _layers(conflicts: dict[int, float | None]) -> list[str]:
    known = {layer: conflict for layer, conflict in conflicts.items() if conflict is not None}
    if len(known) < 2:
        return []
    ranked = sorted(known, key=lambda layer: (-known[layer], layer))
    if known[ranked[0]] - known[ranked[-1]] < _ALIKE:
        return [f"The conflict is much the same in all {len(known)} layers."]
    worst = [f"{layer} ({100 * known[layer]:.0f} %)" for layer in ranked[: min(3, len(known) - 1)]]
    listed = worst[0] if len(worst) == 1 else f"{', '.join(worst[:-1])} and {worst[-1]}"
    least = ranked[-1]
    plural = "s" if len(worst) > 1 else ""
    lowest = f"layer {least} ({100 * known[least]:.0f} %)"
    return [f"The conflict is strongest in layer{plural} {listed}, and weakest in {lowest}."]


def _movement(explanation: Explanation, whole: Tally) -> list[str]:
    ratio = relative_movement(whole)
    if ratio is None:
        return []
    names = explanation.vectors
    farthest = max(range(whole.vectors), key=whole.norm)
    if ratio < _UNMOVED:
        return [f"In the weights that could be compared the merge is {explanation.origin}: it moved nowhere."]
    far = f"The merge moved {number(ratio, 2)} times as far from {explanation.origin} as {names[farthest]}"
    far += ", the parent that moved farthest" if len(names) > 1 else ""
    distances = [whole.merge_distance(at) or 0.0 for at in range(whole.vectors)]
    nearest, away = min(range(len(names)), key=distances.__getitem__), max(range(len(names)), key=distances.__getitem__)
    if distances[away] <= 1.05 * distances[nearest]:
        return [f"{far}."]
    return [f"{far}; it is nearest to {names[nearest]} and farthest from {names[away]}."]


def _relative(value: float | None) -> str:
    return NONE if value is None else f"{plain(float(f'{100 * value:.2g}'))} %"


def _cosine(whole: Tally, one: int, other: int) -> str:
    cosine = whole.cosine(one, other)
    return NONE if cosine is None else number(cosine, 2)
