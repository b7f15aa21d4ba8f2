"""Search a soup, the average of the models that improve it, and confirm the contribution of each ingredient.

The search follows Wortsman et al. 2022 (https://arxiv.org/abs/2203.05482): sort the models by their score, start with
the best one, and add each of the others if the score of the average does not fall. This greedy choice partly follows
chance, so the search only proposes ingredients. Other documents, which no trial has read, decide about each of them.

The *contribution* of an ingredient is the change of the true score when it joins the soup. The contributions of all
ingredients add up to the lead of the soup over its first ingredient. They are tested in the order of the search, each
at the full confidence, until one is not shown to be above minus the margin. The soup ends before that ingredient::

    S_1 = {best model},  S_j = S_{j-1} + ingredient j        kept while  lower bound of score(S_j) - score(S_{j-1}) > -m

Tests in a fixed order that end with the first failure need no correction (Maurer, Hothorn & Lehmacher 1995; Westfall &
Krishen 2001, J. Stat. Plan. Inference 99:25). A soup with an ingredient whose true contribution is at most ``-m``
requires that the first such test in the order is passed by chance, so its probability is at most ``1 - confidence``,
for any number of ingredients and in any order.

The confirmed soup must then beat the best model and the best other hand-written recipe. The confirmation documents
chose it among ``k - 1`` soups, so this test has the error ``(1 - confidence) / (k - 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.tasks.sweep.confirmation import (
    Confirmation,
    IngredientResult,
    NothingToConfirm,
    SoupResult,
    combine_parts,
    confirm,
    make_parts,
)
from mergegate.tasks.sweep.ledger import Ledger, ScoreAll, score_once
from mergegate.tasks.sweep.objective import MetricKey, ScoresByMetric
from mergegate.tasks.sweep.recipes import SoupRecipe
from mergegate.tasks.sweep.search import SearchProblem, score_hand_written
from mergegate.tasks.sweep.space import recipe_key
from mergegate.tasks.sweep.study import (
    SearchProgress,
    SoupSearch,
    SoupStep,
    Study,
    Trial,
    TrialRequest,
    TrialScores,
    best_of,
)

INGREDIENT, SOUP = "ingredient", "soup"  # origins of trials


def search_soup(
    problem: SearchProblem,
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    workers: int = 1,
    on_progress: Callable[[SearchProgress], None] = lambda progress: None,
    on_generation: Callable[[Sequence[Trial]], object] = lambda trials: None,
) -> Study:
    """Search the ingredients of a soup. See :func:`.search` for the arguments.

    It scores ``n`` models alone and at most ``n - 1`` soups.

    Raises:
        Refused: A hand-written recipe or every model alone has no score, or every candidate crashes its process.
    """
    if problem.soup is None:
        raise ValueError("the problem has no ingredients")
    return _SoupSearch(problem, problem.soup, score_all, ledger, on_progress, on_generation, ledger.used_seconds).run()


@dataclass
class _SoupSearch:
    problem: SearchProblem
    recipe: SoupRecipe
    score_all: ScoreAll
    ledger: Ledger
    on_progress: Callable[[SearchProgress], None]
    on_generation: Callable[[Sequence[Trial]], object]
    begun: float  # seconds that the ledger had used before this search
    trials: list[Trial] = field(default_factory=list)
    tables: dict[int, ScoresByMetric] = field(default_factory=dict)
    recipes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)  # number of the first trial of each recipe, by recipe key
    seconds: dict[str, float] = field(default_factory=dict)
    new_count: int = 0

    def run(self) -> Study:
        objective, settings = self.problem.objective, self.problem.settings
        results = score_hand_written(self.problem, self.score_all, self.ledger)
        for by_hand, scores in zip(self.problem.hand_written, results, strict=True):
            self._add(by_hand.recipe, scores, "hand-written", by_hand.label)
        count = len(self.recipe.names)
        alone = self._score([{index} for index in range(count)], INGREDIENT)
        ranked = sorted(alone, key=lambda number: (-_score_of(self.trials[number]), number))
        if not (best := self.trials[ranked[0]]).is_complete:
            raise Refused(
                "sweep: the ingredients of the soup",
                found=f"no score for any of {count} models: {best.problem}",
                expected="at least one model with a score",
                remedy="evaluate one of the models alone (mergegate run) to find the cause",
            )
        index_of = {number: index for index, number in enumerate(alone)}
        if settings.soup == "uniform":
            steps = [SoupStep(self.recipe.labels[index_of[number]], number, None, True) for number in ranked]
            (whole,) = self._score([set(range(count))], SOUP)
            chain = [ranked[0], whole]
        else:
            steps, chain = self._choose_greedily(ranked, index_of)
        self.on_generation(tuple(self.trials))
        largest = self.trials[chain[-1]]
        kept = {trial.number for trial in self.trials if trial.origin == "hand-written"} | set(chain)
        return Study(
            settings=settings,
            objective=objective,
            coordinates=(),
            trials=tuple(self.trials),
            best=largest if len(chain) > 1 and largest.is_complete else None,
            front=(),
            sizes={key: len(results[0].table[key]) for key in objective.metric_keys},
            tables={number: table for number, table in self.tables.items() if number in kept},
            recipes={number: recipe for number, recipe in self.recipes.items() if number in kept},
            population=0,
            scored_count=len(self.number_of),
            new_count=self.new_count,
            seconds={**self.seconds, "wall": self.ledger.used_seconds},
            spent=None,
            stop_reason="trials",
            soup=SoupSearch(settings.soup or "greedy", tuple(steps), tuple(chain)),
        )

    def _choose_greedily(self, numbers: Sequence[int], index_of: Mapping[int, int]) -> tuple[list[SoupStep], list[int]]:
        """Return a step for each model, best first, and the numbers of the trials of the growing soup.

        ``numbers`` are the trials of the models alone, best first.
        """
        labels = self.recipe.labels
        steps = [SoupStep(labels[index_of[numbers[0]]], numbers[0], None, True)]
        soup, chain = {index_of[numbers[0]]}, [numbers[0]]
        for number in numbers[1:]:
            gain = None
            if self.trials[number].is_complete:
                (candidate,) = self._score([soup | {index_of[number]}], SOUP)
                if self.trials[candidate].is_complete:
                    gain = _score_of(self.trials[candidate]) - _score_of(self.trials[chain[-1]])
            chosen = gain is not None and gain >= 0
            if chosen:
                soup.add(index_of[number])
                chain.append(candidate)
            steps.append(SoupStep(labels[index_of[number]], number, gain, chosen))
        return steps, chain

    def _key(self, indices: set[int]) -> str:
        return recipe_key(self.recipe.soup_of(indices))

    def _score(self, sets: Sequence[set[int]], origin: str) -> list[int]:
        """Score the soups of sets of ingredients that have no trial yet, and return the number of each soup's trial."""
        new = {key: chosen for chosen in sets if (key := self._key(chosen)) not in self.number_of}
        requests = [
            TrialRequest(self.recipe.soup_of(chosen), directory=self.problem.directory) for chosen in new.values()
        ]
        finished = 0

        def count(scores: TrialScores) -> None:
            nonlocal finished
            self.new_count, finished = self.new_count + 1, finished + 1
            self._report_progress(finished)

        results = score_once(requests, self.score_all, self.ledger, directory=self.problem.directory, on_scored=count)
        for request, chosen, scores in zip(requests, new.values(), results, strict=True):
            label = self.recipe.labels[min(chosen)] if origin == INGREDIENT else ""
            self._add(request.recipe, scores, origin, label)
        self._report_progress(0)
        return [self.number_of[self._key(chosen)] for chosen in sets]

    def _add(self, recipe: Mapping[str, Any], scores: TrialScores, origin: str, label: str) -> None:
        number = len(self.trials)
        values: tuple[float, ...] = (math.nan,)
        if not scores.problem:
            values = self.problem.objective.scores(scores.table)
        self.trials.append(
            Trial(
                number,
                -1 if origin == "hand-written" else 0 if origin == INGREDIENT else 1,
                origin,
                label,
                {},
                values,
                seconds=sum((scores.seconds or {}).values()),
                problem=scores.problem,
            )
        )
        self.tables[number], self.recipes[number] = scores.table, recipe
        self.number_of.setdefault(recipe_key(recipe), number)
        for activity, seconds in (scores.seconds or {}).items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def _report_progress(self, extra: int) -> None:
        best, total = best_of(self.trials, self.problem.objective), self.problem.objective.total
        by_hand = best_of([trial for trial in self.trials if trial.origin == "hand-written"], self.problem.objective)
        count, used = len(self.trials) + extra, self.ledger.used_seconds - self.begun
        most = len(self.problem.hand_written) + 2 * len(self.recipe.names) - 1
        self.on_progress(
            SearchProgress(
                trials=min(count, most),
                budget=max(count, most),
                generation=0,
                best=total(best.scores) if best else None,
                best_number=best.number if best else None,
                hand_written=total(by_hand.scores) if by_hand else None,
                seconds_left=used / self.new_count * max(0, most - count) if self.new_count else None,
            )
        )


def _score_of(trial: Trial) -> float:
    """Return the score of a trial, or minus infinity if it has none."""
    return trial.scores[0] if trial.is_complete else -math.inf


def confirm_soup(
    study: Study,
    score: Callable[[Trial], ScoresByMetric],
    clusters: Mapping[MetricKey, Sequence[str]] | None = None,
) -> Confirmation | NothingToConfirm:
    """Test the contribution of each chosen ingredient in order, then test the lead of the soup.

    Args:
        study: Search of a soup that has ended.
        score: Function that returns the scores of a trial on the confirmation documents. It is called only for soups
            that are tested, and at most once for each trial.
        clusters: See :func:`.confirm`.
    """
    if (soup := study.soup) is None:
        raise ValueError("the study is not a search of a soup")
    tables: dict[int, ScoresByMetric] = {}

    def table_of(number: int) -> ScoresByMetric:
        if number not in tables:
            tables[number] = score(study.trials[number])
        return tables[number]

    margin, confidence = study.settings.margin / 100, study.settings.confidence
    results = [_search_result(study, step, position) for position, step in enumerate(soup.steps)]
    winner = soup.chain[0]
    if soup.rule == "uniform":  # The rule chooses all models, so only the lead of the soup is tested.
        winner = soup.chain[-1]
        results = [result.model_copy(update={"outcome": "kept"}) for result in results]
    chosen = [position for position, step in enumerate(soup.steps) if step.chosen]
    for position, number in zip(chosen[1:], soup.chain[1:] if soup.rule == "greedy" else (), strict=False):
        parts = make_parts(study.objective, table_of(number), table_of(winner), clusters)
        gain, low, _ = combine_parts(parts, confidence)
        is_kept = low > -margin
        change = {"outcome": "kept" if is_kept else "removed", "contribution": gain, "low": low}
        results[position] = results[position].model_copy(update=change)
        if not is_kept:
            break
        winner = number
    result = SoupResult(rule=soup.rule, margin=margin, confidence=confidence, ingredients=tuple(results))
    best_model = soup.steps[0].ingredient
    if study.best is None:
        why = f"no other model improves {best_model} on the search documents"
        if problem := next((trial.problem for trial in study.trials if trial.origin == SOUP and trial.problem), ""):
            why = f"a soup has no score: {problem}"
        return NothingToConfirm(why=why, soup=result)
    if winner == soup.chain[0]:
        why = f"no other model is shown to improve {best_model} on the held-out documents"
        return NothingToConfirm(why=why, soup=result)
    # The soup must also beat the best hand-written recipe. It can be that recipe itself.
    own_recipe = recipe_key(study.recipes[winner])
    others = [trial for trial in study.hand_written if recipe_key(study.recipes[trial.number]) != own_recipe]
    best_other = best_of(others, study.objective)
    rivals = [study.trials[soup.chain[0]], *([best_other] if best_other else [])]
    settings = study.settings.model_copy(update={"confidence": 1 - (1 - confidence) / (len(soup.chain) - 1)})
    tested = replace(study, best=study.trials[winner], settings=settings)
    comparisons = [
        confirm(tested, table_of(winner), table_of(rival.number), clusters, against=rival) for rival in rivals
    ]
    return min(comparisons, key=lambda comparison: comparison.low).model_copy(update={"soup": result})


def _search_result(study: Study, step: SoupStep, position: int) -> IngredientResult:
    """Return the result of one ingredient before the confirmation."""
    trial = study.trials[step.trial]
    outcome = "first" if position == 0 else "not tested" if step.chosen else "not added"
    return IngredientResult(
        ingredient=step.ingredient,
        outcome=outcome if trial.is_complete else "no score",
        alone=trial.scores[0] if trial.is_complete else None,
        searched=step.gain,
        problem=trial.problem,
    )
