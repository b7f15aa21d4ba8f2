"""A search for what to merge: everything that its candidates need, looked at before; the search and the confirmation as
stages that people watch; and the remedy that comes out of one.

Every scored trial is kept: a search that was killed goes on where it was, with the same trials and the same winner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mergegate.flows.candidates import SCALE, Candidate, candidate_recipes, changed_candidate, searched_recipe
from mergegate.flows.preflight import ClearedCandidate, Problems, clear_further, preflight_profile
from mergegate.flows.profile import Profile
from mergegate.merge_core import plan_merge
from mergegate.merge_core.engine import usable_cores
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import PinnedCheckpoint, fetch_weights, pin_checkpoints
from mergegate.tasks.merge import numerics, prepare_recipe
from mergegate.tasks.perplexity import WindowSettings
from mergegate.tasks.report import sweep_line
from mergegate.tasks.runners import Runner
from mergegate.tasks.stage import announce, report_stage, require_work_allowed, runtime, say_progress, store
from mergegate.tasks.sweep import (
    Confirmation,
    HandWritten,
    NothingToConfirm,
    PreparedSearch,
    Study,
    Trial,
    TrialPool,
    TrialSetting,
    count_layers,
    cumulative_shares,
    enumerate_recipes,
    hand_written_recipes,
    make_space,
    objective_of,
    open_ledger,
    reference_parent,
    relocate_recipe,
    start_recipe,
    study_key,
    trial_sets,
)


def _nobody(trials: Sequence[Trial]) -> None:
    """Who looks on where nobody does."""


@contextmanager
def open_trial_pool(search: PreparedSearch, profile: Profile, runner: Runner) -> Iterator[TrialPool]:
    """Where the trials of ``search`` are scored and kept; another search for the same waits."""
    scoring, same_search = search.setting.digest(), study_key(search.space, search.settings)
    with open_ledger(scoring, same_search, on_wait=_say_waiting) as ledger:
        yield TrialPool(search, runner, ledger, workers=profile.runner.at_a_time)


def prepare_search(profile: Profile) -> PreparedSearch:
    """Everything that a search needs, after all that can be wrong with any of its candidates: parents that may be
    merged, fetched and pinned; documents divided; a space, an objective, hand-written recipes.

    Raises:
        InvalidInput: for a profile that cannot be searched.
        Refused: for a licence, a tokenizer, a machine that forbids one of the recipes.
    """
    if (settings := profile.sweep) is None:
        raise InvalidInput(
            f"profile {profile.name}",
            found="no 'sweep'",
            expected="what is free in its recipe, and what it is searched for",
            remedy="see docs/sweep.md; profiles/demo-sweep.yaml is an example",
        )
    recipe, named = profile.searched_recipe(), sweep_candidates(profile)
    ready = preflight_profile(profile, Problems(stop_at_once=True), named.searched, named.by_hand)
    assert ready.evidence is not None
    parents = fetch_parents(ready.cleared, profile)
    swept = profile.pin_sweep(ready.evidence, store().hashes)
    objective = objective_of(settings, swept.names)
    if by_distance := next((one.recipe for one in named.searched if one.recipe.needs_distances), None):
        raise InvalidInput(
            by_distance.where,
            found="models that are chosen, or weighed, by how far they are from each other",
            expected="models that are the same in every trial",
            remedy="search without leave_out_beyond, or geometric_median",
        )
    by_ref = {parent.ref: parent for parent in parents}
    first = plan_merge(named.searched[0].recipe, {parent.ref: parent.open() for parent in parents})
    # What a candidate is merged from beside weights, whatever its values: texts are read once, before the search.
    read = [prepare_recipe(one.recipe, by_ref.__getitem__, in_flow=True) for one in (*named.searched, *named.by_hand)]
    space = make_space(recipe.document, settings, count_layers(job.output.name for job in first.jobs), recipe.where)
    by_hand = [
        HandWritten(label, one.document or {}, recipe.directory)
        for label, one in zip(recipe_labels(profile), named.by_hand, strict=True)
    ]
    return PreparedSearch(
        settings=settings,
        method=named.searched[0].recipe.summary(),
        directory=recipe.directory,
        space=space,
        objective=objective,
        hand_written=hand_written_recipes(space, profile.name, recipe.directory, by_hand),
        for_the_gate={task.name: task.documents or 0 for task in ready.evidence.tasks},
        setting=TrialSetting(
            parents=parents,
            sets=trial_sets(swept, ready.evidence.windows or WindowSettings(), ready.evidence.scoring.time_limit),
            asked=objective.asked,
            scoring=ready.evidence.scoring,
            windows=ready.evidence.windows or WindowSettings(),
            device=runtime().device,
            merge_device=numerics(profile.merge).where,
            seed=profile.merge.seed,
            base=reference_parent(parents) if settings.change_penalty else "",
            looks=cumulative_shares(settings.racing),
            threads=max(1, usable_cores() // profile.runner.at_a_time),
            measured={what: found for recipe in read for what, found in recipe.calibration_results().items()},
        ),
    )


class NamedCandidates(NamedTuple):
    """Recipes that together name all that is merged in a sweep.

    Args:
        searched: The one with the holes at their start values; then it with another choice in one place.
        by_hand: Those that a winner must beat, in the order of the profile, with paths as in the searched one.
    """

    searched: tuple[Candidate, ...]
    by_hand: tuple[Candidate, ...]


def sweep_candidates(profile: Profile) -> NamedCandidates:
    """What a sweep has to be allowed to merge.

    Raises:
        InvalidInput: for a recipe that cannot mean anything, or holes and parameters that do not fit.
    """
    assert profile.sweep is not None
    recipe = profile.searched_recipe()
    choices = list(enumerate_recipes(recipe.document, profile.sweep))
    files = [searched_recipe(Path(file), profile.root, "sweep.hand_written") for file in profile.sweep.hand_written]
    others = [relocate_recipe(one.document, one.directory, recipe.directory) for one in files]
    read = candidate_recipes(
        replace(recipe, document=start_recipe(recipe.document, profile.sweep, recipe.where)),
        [replace(recipe, document=document) for document in (*choices, *others)],
        profile.root,
        f"profile {profile.name}",
    )
    return NamedCandidates(read[: 1 + len(choices)], read[1 + len(choices) :])


def recipe_labels(profile: Profile) -> list[str]:
    """What people call the further recipes that a winner must beat: their files' names, or where two are alike all of
    what the profile says."""
    assert profile.sweep is not None
    files = profile.sweep.hand_written
    names = [profile.name, *(Path(file).stem for file in files)]
    return [file if names.count(Path(file).stem) > 1 else Path(file).stem for file in files]


def fetch_parents(cleared: Sequence[ClearedCandidate], profile: Profile) -> tuple[PinnedCheckpoint, ...]:
    """All models that a candidate may be made of, each once, with their weights here."""
    found = tuple({one.ref: one for each in cleared for one in each.found}.values())
    fetch_weights(found, store().hashes)
    return pin_checkpoints(found, store().hashes, profile.checks.code.trusted)


def run_search(workshop: TrialPool, on_generation: Callable[[Sequence[Trial]], object] = _nobody) -> Study:
    """The search, as a stage that people watch."""
    with report_stage("search", "") as said:
        study = workshop.search_all(lambda progress: say_progress(partial(sweep_line, progress)), on_generation)
        said.status, said.summary = "made" if study.new else "cached", study.summary()
    return study


def run_confirmation(workshop: TrialPool, study: Study) -> Confirmation | NothingToConfirm:
    """The one test, as a stage that people watch."""
    with report_stage("confirm", "") as said:
        verdict = workshop.confirm(study)
        said.status, said.summary = "made" if verdict.confirmed else "refused", verdict.sentence()
    return verdict


def tuned_remedy(cleared: ClearedCandidate, profile: Profile, runner: Runner) -> ClearedCandidate | None:
    """A profile's own recipe at the scale that a search found, after all checks; None where none was confirmed.

    Args:
        cleared: The recipe.
        profile: Has the remedy ``tune: scale``.
        runner: Who scores the trials.
    """
    assert profile.tuning is not None
    require_work_allowed("search for a scale")
    announce("remedy: a search for the scale")
    search = prepare_search(profile.tuning)
    with open_trial_pool(search, profile.tuning, runner) as workshop:
        study = run_search(workshop)
        verdict = run_confirmation(workshop, study)
    if not isinstance(verdict, Confirmation) or not verdict.confirmed:
        return None
    change = {SCALE: study.recipes[verdict.winner]["parameters"][SCALE]}
    candidate = changed_candidate(cleared.candidate, change, profile.root, f"profile {profile.name}: tune: scale")
    return clear_further(replace(candidate, remedy=f"{candidate.remedy}, which a search found"), profile)


def _say_waiting() -> None:
    announce("another sweep is scoring the same candidates; waiting for it")
