"""Search for a recipe to merge.

mergegate first checks everything that the candidates need. The search and the confirmation test then run as stages. A
confirmed recipe can become a remedy.

Every scored trial is stored. A search that was killed continues with the same trials and finds the same winner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mergegate.flows.candidates import SCALE, Candidate, candidate_recipes, changed_candidate, searched_recipe
from mergegate.flows.preflight import ClearedCandidate, Problems, clear_further, pin_profile_sweep, preflight_profile
from mergegate.flows.profile import Profile
from mergegate.merge_core import plan_merge
from mergegate.merge_core.errors import CannotDecide, InvalidInput, MergegateError
from mergegate.merge_core.system import cores_of_process
from mergegate.tasks.base.runners import Runner
from mergegate.tasks.base.stage import announce, describe_progress, report_stage, require_work_allowed, runtime, store
from mergegate.tasks.merge import numerics, prepare_recipe
from mergegate.tasks.models.checkpoints import fetch_weights, pin_checkpoints
from mergegate.tasks.quality.perplexity import WindowSettings
from mergegate.tasks.release.report import search_line
from mergegate.tasks.sweep import (
    Confirmation,
    HandWritten,
    NothingToConfirm,
    PreparedSearch,
    SearchProblem,
    Study,
    Trial,
    TrialPool,
    TrialSetting,
    count_layers,
    cumulative_shares,
    enumerate_recipes,
    make_objective,
    make_space,
    open_ledger,
    read_soup_recipe,
    relocate_recipe,
    start_recipe,
    study_key,
    trial_sets,
)

UNIFORM_SOUP = "uniform soup"  # label of the average of all ingredients


@contextmanager
def open_trial_pool(search: PreparedSearch, profile: Profile, runner: Runner) -> Iterator[TrialPool]:
    """Open the pool that scores the trials of ``search`` and stores their results.

    If another process searches the same candidates, wait until it is done.
    """
    scoring, same_search = search.setting.digest(), study_key(search.problem.space, search.problem.settings)
    wait = partial(announce, "another sweep is scoring the same candidates; waiting for it")
    with open_ledger(scoring, same_search, on_wait=wait) as ledger:
        yield TrialPool(search, runner, ledger, workers=profile.runner.parallel_items)


def prepare_search(profile: Profile) -> PreparedSearch:
    """Check all candidates of a search, fetch and pin their parents, and prepare the inputs of the trials."""
    if (settings := profile.sweep) is None:
        raise InvalidInput(
            f"profile {profile.name}",
            found="it has no section 'sweep'",
            expected="free values of the recipe or a soup, and an objective",
            remedy="see docs/how-to/search-a-recipe.md; profiles/demo-sweep.yaml is an example",
        )
    recipe, candidates = profile.searched_recipe, sweep_candidates(profile)
    ready = preflight_profile(profile, Problems(stop_at_once=True), candidates.searched, candidates.by_hand)
    assert ready.evidence is not None
    # Every model that a candidate may use, once each.
    resolved = tuple({parent.ref: parent for candidate in ready.cleared for parent in candidate.parents}.values())
    fetch_weights(resolved, store().hashes)
    parents = pin_checkpoints(resolved, store().hashes, profile.checks.code.trusted)
    sweep_evidence = pin_profile_sweep(profile, ready.evidence, store().hashes)
    objective = make_objective(settings, sweep_evidence.names)
    if by_distance := next(
        (candidate.recipe for candidate in candidates.searched if candidate.recipe.needs_distances), None
    ):
        raise InvalidInput(
            by_distance.location,
            found="models that are chosen or weighted by their distances",
            expected="the same models in every trial",
            remedy="search without leave_out_beyond and without geometric_median",
        )
    if repaired := next((each.recipe for each in candidates.searched if each.recipe.router_repair), None):
        raise InvalidInput(
            f"{repaired.location}: router_repair",
            found="a repair of the routers in a search",
            expected="trials that are merged in memory: a repair needs the finished merge",
            remedy="search without router_repair, then add it to the recipe that wins",
        )
    by_ref = {parent.ref: parent for parent in parents}
    first = plan_merge(candidates.searched[0].recipe, {parent.ref: parent.open() for parent in parents})
    # A candidate may need calibration texts in addition to weights. Read them once, before the search.
    prepared = [
        prepare_recipe(candidate.recipe, by_ref.__getitem__, in_flow=True)
        for candidate in (*candidates.searched, *candidates.by_hand)
    ]
    space = make_space(recipe.document, settings, count_layers(job.output.name for job in first.jobs), recipe.location)
    written = [(profile.name, space.fill_recipe(space.start))]
    soup = read_soup_recipe(recipe.document, recipe.location) if settings.soup else None
    if soup:
        average = (UNIFORM_SOUP, soup.soup_of(range(len(soup.names))))
        written = [average] if soup.is_uniform else [*written, average]
    hand_written = (
        *(HandWritten(label, document, recipe.directory) for label, document in written),
        *(
            HandWritten(label, candidate.document or {}, recipe.directory)
            for label, candidate in zip(candidates.labels, candidates.by_hand, strict=True)
        ),
    )
    # Changes are measured from the base or, without a base, from the first parent.
    base = next((parent.name for parent in parents if parent.is_base), parents[0].name)
    return PreparedSearch(
        problem=SearchProblem(space, settings, objective, hand_written, soup=soup),
        method=f"{settings.soup} soup of {len(soup.names)}" if soup else candidates.searched[0].recipe.summary(),
        directory=recipe.directory,
        gate_documents={task.name: task.documents or 0 for task in ready.evidence.tasks},
        setting=TrialSetting(
            parents=parents,
            sets=trial_sets(
                sweep_evidence, ready.evidence.windows or WindowSettings(), ready.evidence.scoring.time_limit
            ),
            metric_keys=objective.metric_keys,
            scoring=ready.evidence.scoring,
            windows=ready.evidence.windows or WindowSettings(),
            device=runtime().device,
            merge_device=numerics(profile.merge).where,
            seed=profile.merge.seed,
            base=base if settings.change_penalty else "",
            looks=cumulative_shares(settings.racing),
            threads=max(1, cores_of_process() // profile.runner.parallel_items),
            measured={source: digest for recipe in prepared for source, digest in recipe.calibration_results().items()},
        ),
    )


class NamedCandidates(NamedTuple):
    """Recipes that together contain every model a sweep may merge.

    ``searched`` contains the recipe with each placeholder at its start value, then one variant for each other choice. A
    winner must beat the recipes ``by_hand``, which are in profile order, with paths relative to the searched recipe.
    ``labels`` are the stems of their file names, or paths as in the profile if two files share a stem.
    """

    searched: tuple[Candidate, ...]
    by_hand: tuple[Candidate, ...]
    labels: tuple[str, ...]


def sweep_candidates(profile: Profile) -> NamedCandidates:
    """Return recipes that contain every model a sweep may merge."""
    assert profile.sweep is not None
    recipe = profile.searched_recipe
    choices = list(enumerate_recipes(recipe.document, profile.sweep))
    files = [searched_recipe(Path(file), profile.root, "sweep.baselines") for file in profile.sweep.baselines]
    hand_written = [
        relocate_recipe(recipe_file.document, recipe_file.directory, recipe.directory) for recipe_file in files
    ]
    recipes = candidate_recipes(
        replace(recipe, document=start_recipe(recipe.document, profile.sweep, recipe.location)),
        [replace(recipe, document=document) for document in (*choices, *hand_written)],
        profile.root,
        f"profile {profile.name}",
    )
    stems = [Path(file).stem for file in profile.sweep.baselines]
    labels = tuple(
        file if [profile.name, *stems].count(stem) > 1 else stem
        for file, stem in zip(profile.sweep.baselines, stems, strict=True)
    )
    return NamedCandidates(recipes[: 1 + len(choices)], recipes[1 + len(choices) :], labels)


def run_search(pool: TrialPool, on_generation: Callable[[Sequence[Trial]], object] | None = None) -> Study:
    """Run the search as a stage with progress, and call ``on_generation`` with the trials of each generation."""
    with report_stage("search", "") as stage:
        record = on_generation or (lambda trials: None)
        study = pool.search_all(lambda progress: describe_progress(partial(search_line, progress)), record)
        stage.status, stage.summary = "made" if study.new_count else "cached", study.summary()
    return study


def run_confirmation(pool: TrialPool, study: Study) -> Confirmation | NothingToConfirm:
    """Run the confirmation test of a search as a stage with progress."""
    with report_stage("confirm", "") as stage:
        verdict = pool.confirm(study)
        stage.status, stage.summary = "made" if verdict.confirmed else "refused", verdict.sentence()
    return verdict


def with_tuned_candidate(
    candidates: Sequence[ClearedCandidate], profile: Profile, runner: Runner
) -> Iterator[ClearedCandidate]:
    """Yield ``candidates``, then the profile's recipe at the scale that a search finds and confirms.

    The candidates are the recipe and its written remedies. The search runs only if the profile has the remedy
    ``tune: scale``, and only after all candidates were refused. ``runner`` scores its trials.
    """
    yield from candidates
    if profile.scale_search is None:
        return
    require_work_allowed("search for a scale")
    announce("remedy: a search for the scale")
    try:
        search = prepare_search(profile.scale_search)
        with open_trial_pool(search, profile.scale_search, runner) as pool:
            study = run_search(pool)
            verdict = run_confirmation(pool, study)
        if not (isinstance(verdict, Confirmation) and verdict.confirmed):
            return
        change = {SCALE: study.recipes[verdict.winner]["parameters"][SCALE]}
        location = f"profile {profile.name}: tune: scale"
        candidate = changed_candidate(candidates[0].candidate, change, profile.root, location)
        tuned = clear_further(replace(candidate, remedy=f"{candidate.remedy}, which a search found"), profile)
    except CannotDecide:
        raise
    except MergegateError as error:  # The verdicts on the other candidates are still the result of the run.
        announce(f"skipped the search for a scale: {error.found}")
        return
    yield tuned
