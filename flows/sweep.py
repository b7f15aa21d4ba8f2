"""A sweep: the free numbers of a recipe are searched, the winner is confirmed on documents that no trial saw, and then
released like any other recipe; or no candidate is confirmed, and nothing is.

::

    mergegate sweep profiles/demo-sweep.yaml

Every scored trial is kept: a sweep that was killed goes on where it was, with the same trials and the same winner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.candidates import SearchedRecipe, candidate_recipes, searched_recipe
from flows.outcome import RunOutcome, concluded, keep_sweep
from flows.preflight import Problems, preflight_profile
from flows.profile import Profile, load_profile
from flows.release import make_release
from merge_core.errors import InvalidInput
from merge_core.store import state_directory, write_state
from tasks.checkpoints import PinnedCheckpoint, fetch_weights, pin_checkpoints
from tasks.evaluation import Scoring
from tasks.merge import numerics
from tasks.outside import Runner, open_runner
from tasks.perplexity import WindowSettings
from tasks.preflight import Evidence
from tasks.report import sweep_content, sweep_line, sweep_sentence
from tasks.stage import announce, home, report_stage, runtime, say_progress, store
from tasks.sweep import (
    Confirmation,
    HandWritten,
    Ledger,
    Study,
    SweepSettings,
    TrialSetting,
    Unconfirmed,
    Workshop,
    at_start,
    choices_once,
    documents_seen_after,
    hand_written_recipes,
    layers_of,
    make_space,
    objective_of,
    open_ledger,
    recipe_text,
    relocated,
    study_key,
    trial_sets,
)


@flow(name="sweep")
def sweep(profile: Path | Profile, release: bool = True) -> State[RunOutcome]:
    """Search the free parameters of a profile's recipe, confirm the winner, and release it.

    Args:
        profile: A profile file with a section ``sweep``, relative to the project, or a whole profile.
        release: Whether a winner that is confirmed goes through the release flow.
    """
    name = profile.name if isinstance(profile, Profile) else profile.stem
    return concluded(lambda: make_sweep(load_profile(profile), release=release), name)


def make_sweep(profile: Profile, *, release: bool = True) -> RunOutcome:
    """The story. Raises whatever a check refuses; that no candidate was confirmed comes back with its report."""
    prepared = prepare_search(profile)
    with open_runner(profile.runner) as runner:
        scoring, study_of = prepared.setting.digest(), study_key(prepared.space, prepared.settings)
        with open_ledger(scoring, study_of, on_wait=lambda: announce("another sweep has these trials; waiting")) as ledger:
            workshop = replace(prepared, runner=runner, ledger=ledger)
            power = workshop.power()
            announce(power.sentence())
            study = search_for(workshop)
            verdict = confirm_winner(workshop, study)
    content = sweep_content(study, verdict, power, workshop, name=profile.name, runner=profile.runner.said())
    page = keep_sweep(content)
    if not isinstance(verdict, Confirmation) or not verdict.confirmed:
        return RunOutcome(status="refused", message=f"no candidate confirmed\n{sweep_sentence(content)}", report=page)
    winner = study.recipes[verdict.winner]
    file = keep_winner(profile.name, winner, workshop.directory, sweep_sentence(content))
    announce(f"confirmed: {sweep_sentence(content)} The winner is {file}")
    if not release:
        return RunOutcome(status="passed", message=sweep_sentence(content), location=file, report=page)
    return make_release(profile.with_recipe(relocated(winner, workshop.directory, profile.root)))


def search_for(workshop: Workshop) -> Study:
    """The search, as a stage that people watch."""
    with report_stage("search", "") as said:
        study = workshop.search(lambda progress: say_progress(lambda width: sweep_line(progress, workshop, width)))
        said.status = "made" if study.scored_now else "cached"
        said.summary = study.summary()
    return study


def confirm_winner(workshop: Workshop, study: Study) -> Confirmation | Unconfirmed:
    """The one test, as a stage that people watch."""
    with report_stage("confirm", "") as said:
        verdict = workshop.confirm(study)
        said.status = "made" if verdict.as_verdict().publishable else "refused"
        said.summary = verdict.sentence()
    return verdict
