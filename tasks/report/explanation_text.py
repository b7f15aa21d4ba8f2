"""Explain in sentences and table rows why a merge did not pass, based on its weights. All functions are pure."""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.tasks.explain import CHANCE, Explanation, relative_movement
from mergegate.tasks.perplexity import ensemble_gain_share
from mergegate.tasks.report.content import ReportContent, ReportedJudge
from mergegate.tasks.report.wording import NONE, interval, number, plain

# Layers whose sign conflicts differ by less count as equal.
_EQUAL_CONFLICT = 0.03
# A movement that would be displayed as 0.00 counts as none.
_UNMOVED = 0.005


@dataclass(frozen=True)
class VectorRow:
    """One model in the table of task vectors, as displayed. Lengths are relative to the origin's norm."""

    name: str
    length: str
    cosines: tuple[str, ...]  # cosine with each model; '1' with itself
    distance: str  # distance from the merge


def why(explanation: Explanation) -> tuple[str, ...]:
    """Return sentences that explain the outcome from the weights, the most important first."""
    interference = explanation.interference
    if interference is None:
        return ("The weights of these models could not be compared.",)
    total, names, sentences = interference.network_tally, explanation.vectors, []

    ratio = relative_movement(total)
    if ratio is not None and ratio < _UNMOVED:
        sentences.append(f"In the weights that could be compared the merge is {explanation.origin}: it moved nowhere.")
    elif ratio is not None:
        farthest = names[max(range(total.vectors), key=total.norm)]
        far = f"The merge moved {number(ratio, 2)} times as far from {explanation.origin} as {farthest}"
        far += ", the parent that moved farthest" if len(names) > 1 else ""
        distances = [total.merge_distance(index) or 0.0 for index in range(total.vectors)]
        nearest = min(range(len(names)), key=distances.__getitem__)
        remotest = max(range(len(names)), key=distances.__getitem__)
        if distances[remotest] > 1.05 * distances[nearest]:
            far += f"; it is nearest to {names[nearest]} and farthest from {names[remotest]}"
        sentences.append(f"{far}.")

    if total.conflict is not None and total.vectors >= 2:
        share = f"{100 * total.conflict:.0f} % are moved in opposite directions"
        chance = f"{100 * CHANCE:.0f} %"
        if total.vectors == 2:
            sentences.append(
                f"Of the weights that both {names[0]} and {names[1]} move noticeably, {share}; for parents that have "
                f"nothing to do with each other it would be {chance}."
            )
        else:
            pairs = {pair: total.pair_conflict(*pair) or 0.0 for pair in total.pairs}
            first, second = max(pairs, key=lambda pair: pairs[pair])
            sentences.append(
                f"Of the weights that two or more parents move noticeably, {share}. The pair that conflicts most is "
                f"{names[first]} and {names[second]}, with {100 * pairs[first, second]:.0f} %, where {chance} would be "
                "chance."
            )

    by_layer = {layer: tally.conflict for (_, layer), tally in interference.layers().items()}
    measured = {layer: conflict for layer, conflict in by_layer.items() if conflict is not None}
    ranked = sorted(measured, key=lambda layer: (-measured[layer], layer))
    if len(ranked) >= 2 and measured[ranked[0]] - measured[ranked[-1]] < _EQUAL_CONFLICT:
        sentences.append(f"The conflict is much the same in all {len(measured)} layers.")
    elif len(ranked) >= 2:
        *worst, last = [f"{layer} ({100 * measured[layer]:.0f} %)" for layer in ranked[: min(3, len(ranked) - 1)]]
        strongest = f"layers {', '.join(worst)} and {last}" if worst else f"layer {last}"
        weakest = f"layer {ranked[-1]} ({100 * measured[ranked[-1]]:.0f} %)"
        sentences.append(f"The conflict is strongest in {strongest}, and weakest in {weakest}.")

    sentences += [
        f"Task vectors are the differences of the parents to {explanation.origin}, the base of the recipe."
        if explanation.origin_is_base
        else f"The recipe names no base: differences are measured from its first model, {explanation.origin}.",
        *(
            f"{skipped.tensors} tensor{'s were' if skipped.tensors > 1 else ' was'} left out: "
            f"{skipped.reason} ({skipped.example})."
            for skipped in interference.skipped
        ),
    ]
    return tuple(sentences)


def vector_rows(explanation: Explanation) -> tuple[VectorRow, ...]:
    """Return one row per task vector, or none if the weights could not be compared."""
    if explanation.interference is None:
        return ()
    total = explanation.interference.network_tally
    return tuple(
        VectorRow(
            name=name,
            length=_relative(total.length(index)),
            cosines=tuple(
                "1" if column == index else NONE if cosine is None else number(cosine, 2)
                for column, cosine in ((column, total.cosine(index, column)) for column in range(total.vectors))
            ),
            distance=_relative(total.merge_distance(index)),
        )
        for index, name in enumerate(explanation.vectors)
    )


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
    start = f"The mean of the parents' probabilities, token by token, has perplexity {ensemble.perplexity:.3f}"
    share = ensemble_gain_share(members, ensemble, merge)
    if share is None:
        return f"{start}, no better than the better parent: on this text they have nothing to give each other."
    if share <= 0:
        return f"{start}; the merge keeps nothing of that gain over the better parent."
    return f"{start}; the merge keeps {100 * share:.0f} % of that gain over the better parent."


def expert_sentences(content: ReportContent) -> tuple[str, ...]:
    """Return one sentence per parent that compares its experts and routers with those of the donor.

    The donor is the model that provides the layout of the merged model.
    """
    return tuple(
        f"{row.model}: expert by expert its weights have a mean cosine of {row.diagonal:.3f} with those of the model "
        f"that gives the layout ({row.best:.3f} in the best order, which is another in {row.moved} of {row.layers} "
        f"layers); its routers, as they were merged, {row.routers:.3f}, and are up to {100 * row.distance:.0f} % apart."
        for row in content.experts
    )


def judge_numbers(judge: ReportedJudge) -> str:
    """Return the win rate with its interval: 'win rate 52.0 % [47.1, 56.9]'."""
    return f"win rate {number(100 * judge.win_rate, 1)} % {interval(100 * judge.low, 100 * judge.high, 1)}"


def _relative(value: float | None) -> str:
    return NONE if value is None else f"{plain(float(f'{100 * value:.2g}'))} %"
