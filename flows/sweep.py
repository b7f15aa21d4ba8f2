"""A sweep: the free numbers of a recipe are searched, the winner is confirmed on documents that no trial saw, and then
released like any other recipe; or no candidate is confirmed, and nothing is.

::

    mergegate sweep profiles/demo-sweep.yaml

Every scored trial is kept: a sweep that was killed goes on where it was, with the same trials and the same winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from flows.candidates import SearchedRecipe, candidate_recipes, searched_recipe
from flows.outcome import RunOutcome, concluded, keep_sweep_page
from flows.preflight import ClearedCandidate, Problems, preflight_profile
from flows.profile import Profile, load_profile
from flows.release import make_release
from merge_core.errors import InvalidInput
from merge_core.store import state_directory, write_state
from tasks.checkpoints import PinnedCheckpoint, fetch_weights, pin_checkpoints
from tasks.evaluation import Scoring
from tasks.merge import numerics
from tasks.outside import open_runner
from tasks.perplexity import WindowSettings
from tasks.report import SearchStatus, search_line, sweep_content, sweep_sentence
from tasks.stage import announce, home, report_stage, runtime, say_progress, store
from tasks.sweep import (
    Confirmation,
    HandWritten,
    SearchProgress,
    Study,
    SweepSettings,
    TrialSetting,
    Unconfirmed,
    Workshop,
    at_start,
    choices_once,
    doubling_looks,
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
    settings, recipe = searched_in(profile)
    cleared = clear_candidates(profile, settings, recipe)
    ...
