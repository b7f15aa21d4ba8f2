"""A sweep: the free numbers of a recipe are searched, the winner is confirmed on documents that no trial saw, and then
released like any other recipe; or no candidate is confirmed, and nothing is.

::

    mergegate sweep profiles/demo-sweep.yaml

Every scored trial is kept: a sweep that was killed goes on where it was, with the same trials and the same winner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State

from flows.candidates import Candidate, candidate_recipes, searched_recipe
from flows.outcome import RunOutcome, concluded, in_time, keep_sweep, name_run, profile_name, sweep_report
from flows.preflight import ClearedCandidate, Problems, preflight_profile
from flows.profile import Profile, load_profile
from flows.release import make_release
from merge_core import plan_merge
from merge_core.engine import usable_cores
from merge_core.errors import InvalidInput
from merge_core.store import state_directory, write_state
from tasks.checkpoints import PinnedCheckpoint, fetch_weights, pin_checkpoints
from tasks.merge import numerics, prepared
from tasks.outside import open_runner
from tasks.perplexity import WindowSettings
from tasks.report import sweep_line, sweep_sentence
from tasks.stage import announce, home, report_stage, runtime, say_progress, store
from tasks.sweep import (
    Confirmation,
    HandWritten,
    PreparedSearch,
    Study,
    Trial,
    TrialSetting,
    Unconfirmed,
    Workshop,
    at_start,
    base_of,
    hand_written_recipes,
    layers_among,
    make_space,
    named_by,
    objective_of,
    open_ledger,
    open_view,
    recipe_text,
    relocated,
    shares_after_looks,
    study_key,
    trial_sets,
)


@flow(name="sweep", flow_run_name=name_run)
def sweep(profile: Path | Profile, release: bool = True, view: str | None = None) -> State[RunOutcome]:
    """Search the free parameters of a profile's recipe, confirm the winner, and release it.

    Args:
        profile: A profile file with a section ``sweep``, relative to the project, or a whole profile.
        release: Whether a winner that is confirmed goes through the release flow.
        view: Where the study is written for Optuna's dashboard, if not where the profile says.
    """
    make = partial(make_sweep, release=release, view=view)
    return concluded(lambda: in_time(make, load_profile(profile)), profile_name(profile))


def make_sweep(profile: Profile, *, release: bool = True, view: str | None = None) -> RunOutcome:
    """The story. Raises whatever a check refuses; that no candidate was confirmed comes back with its report."""
    search = prepare_search(profile)
    scoring, same_search = search.setting.digest(), study_key(search.space, search.settings)
    with open_runner(profile.runner) as runner, open_ledger(scoring, same_search, on_wait=_say_waiting) as ledger:
        workshop = Workshop(search, runner, ledger, workers=profile.runner.at_a_time)
        power = workshop.power()
        announce(power.brief())
        study = watched_search(workshop, study_view(profile, search, same_search, view or profile.sweep_view()))
        verdict = watched_confirmation(workshop, study)
    content = sweep_report(profile, search, study, verdict, power)
    page = keep_sweep(content)
    if not isinstance(verdict, Confirmation) or not verdict.confirmed:
        message = f"no candidate confirmed\n{sweep_sentence(content)}"
        return RunOutcome(status="refused", message=message, report=page, sweep=content)
    winner = study.recipes[verdict.winner]
    file = keep_winner(profile.name, winner, search.directory, sweep_sentence(content))
    announce(f"confirmed: the winner is {file}")
    if not release:
        return RunOutcome(status="passed", message=sweep_sentence(content), location=file, report=page, sweep=content)
    released = make_release(profile.with_recipe(relocated(winner, search.directory, profile.root)))
    return released.model_copy(update={"sweep": content})


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
    recipe, named = profile.searched_recipe(), all_candidates(profile)
    ready = preflight_profile(profile, Problems(stop_at_once=True), named.searched, named.by_hand)
    assert ready.evidence is not None
    parents = fetch_parents(ready.cleared, profile)
    swept = profile.pin_sweep(ready.evidence, store().hashes)
    objective = objective_of(settings, swept.names)
    if by_distance := next((one.recipe for one in named.searched if one.recipe.asks_distances), None):
        raise InvalidInput(
            by_distance.where,
            found="models that are chosen, or weighed, by how far they are from each other",
            expected="models that are the same in every trial",
            remedy="search without leave_out_beyond, or geometric_median",
        )
    by_ref = {parent.ref: parent for parent in parents}
    first = plan_merge(named.searched[0].recipe, {parent.ref: parent.open() for parent in parents})
    # What a candidate is merged from beside weights, whatever its values: texts are read once, before the search.
    read = [prepared(one.recipe, by_ref.__getitem__, in_flow=True) for one in (*named.searched, *named.by_hand)]
    space = make_space(recipe.document, settings, layers_among(job.output.name for job in first.jobs), recipe.where)
    by_hand = [
        HandWritten(label, one.document or {}, recipe.directory)
        for label, one in zip(labels_of(profile), named.by_hand, strict=True)
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
            base=base_of(parents) if settings.change_penalty else "",
            looks=shares_after_looks(settings.racing),
            threads=max(1, usable_cores() // profile.runner.at_a_time),
            measured={what: found for recipe in read for what, found in recipe.what_was_read().items()},
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


def all_candidates(profile: Profile) -> NamedCandidates:
    """What a sweep has to be allowed to merge.

    Raises:
        InvalidInput: for a recipe that cannot mean anything, or holes and parameters that do not fit.
    """
    assert profile.sweep is not None
    recipe = profile.searched_recipe()
    choices = list(named_by(recipe.document, profile.sweep))
    files = [searched_recipe(Path(file), profile.root, "sweep.hand_written") for file in profile.sweep.hand_written]
    others = [relocated(one.document, one.directory, recipe.directory) for one in files]
    read = candidate_recipes(
        replace(recipe, document=at_start(recipe.document, profile.sweep, recipe.where)),
        [replace(recipe, document=document) for document in (*choices, *others)],
        profile.root,
        f"profile {profile.name}",
    )
    return NamedCandidates(read[: 1 + len(choices)], read[1 + len(choices) :])


def labels_of(profile: Profile) -> list[str]:
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


def study_view(
    profile: Profile, search: PreparedSearch, same_search: str, place: str | None
) -> Callable[[Sequence[Trial]], object]:
    """Who is told of each generation: Optuna's study, where somebody wants to look at it."""
    if place is None:
        return lambda trials: None
    name = f"{profile.name} {same_search[:8]}"
    return open_view(place, name, search.space.coordinates, search.objective).record


def watched_search(workshop: Workshop, on_generation: Callable[[Sequence[Trial]], object]) -> Study:
    """The search, as a stage that people watch."""
    with report_stage("search", "") as said:
        study = workshop.search_all(lambda progress: say_progress(partial(sweep_line, progress)), on_generation)
        said.status, said.summary = "made" if study.new else "cached", study.summary()
    return study


def watched_confirmation(workshop: Workshop, study: Study) -> Confirmation | Unconfirmed:
    """The one test, as a stage that people watch."""
    with report_stage("confirm", "") as said:
        verdict = workshop.confirm(study)
        said.status, said.summary = "made" if verdict.confirmed else "refused", verdict.sentence()
    return verdict


def keep_winner(name: str, winner: Mapping[str, Any], directory: Path, why: str) -> Path:
    """The winner as a recipe file that can be merged, read and moved into a project."""
    place = state_directory(home() / "sweeps")
    file = place / f"{name}-winner.yaml"
    write_state(file, recipe_text(relocated(winner, directory, place), f"Found by `mergegate sweep`. {why}").encode())
    return file


def _say_waiting() -> None:
    announce("another sweep is scoring the same candidates; waiting for it")
