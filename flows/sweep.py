"""A sweep: the free numbers of a recipe are searched, the winner is confirmed on documents that no trial saw, and then
released like any other recipe; or no candidate is confirmed, and nothing is.

::

    mergegate sweep profiles/demo-sweep.yaml

Every scored trial is kept: a sweep that was killed goes on where it was, with the same trials and the same winner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.attempt import open_trial_pool, prepare_search, run_confirmation, run_search
from mergegate.flows.outcome import (
    RunOutcome,
    conclude_flow,
    name_run,
    profile_name,
    store_sweep_page,
    sweep_report,
    within_limits,
)
from mergegate.flows.profile import Profile, load_profile
from mergegate.flows.release import make_release
from mergegate.merge_core.files import state_directory, write_state
from mergegate.tasks.report import sweep_sentence
from mergegate.tasks.runners import open_runner
from mergegate.tasks.stage import announce, home
from mergegate.tasks.sweep import (
    Confirmation,
    PreparedSearch,
    Trial,
    open_view,
    recipe_text,
    relocate_recipe,
    study_key,
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
    return conclude_flow(lambda: within_limits(make, load_profile(profile)), profile_name(profile))


def make_sweep(profile: Profile, *, release: bool = True, view: str | None = None) -> RunOutcome:
    """The story. Raises whatever a check refuses; that no candidate was confirmed comes back with its report."""
    search = prepare_search(profile)
    with open_runner(profile.runner) as runner, open_trial_pool(search, profile, runner) as workshop:
        power = workshop.power()
        announce(power.brief())
        study = run_search(workshop, study_view(profile, search, view or profile.sweep_view()))
        verdict = run_confirmation(workshop, study)
    content = sweep_report(profile, search, study, verdict, power)
    page = store_sweep_page(content)
    if not isinstance(verdict, Confirmation) or not verdict.confirmed:
        message = f"no candidate confirmed\n{sweep_sentence(content)}"
        return RunOutcome(status="refused", message=message, report=page, sweep=content)
    winner = study.recipes[verdict.winner]
    file = keep_winner(profile.name, winner, search.directory, sweep_sentence(content))
    announce(f"confirmed: the winner is {file}")
    if not release:
        return RunOutcome(status="passed", message=sweep_sentence(content), location=file, report=page, sweep=content)
    released = make_release(profile.with_recipe(relocate_recipe(winner, search.directory, profile.root)))
    return released.model_copy(update={"sweep": content})


def study_view(profile: Profile, search: PreparedSearch, place: str | None) -> Callable[[Sequence[Trial]], object]:
    """Who is told of each generation: Optuna's study, where somebody wants to look at it."""
    if place is None:
        return lambda trials: None
    name = f"{profile.name} {study_key(search.space, search.settings)[:8]}"
    return open_view(place, name, search.space.coordinates, search.objective).record


def keep_winner(name: str, winner: Mapping[str, Any], directory: Path, why: str) -> Path:
    """The winner as a recipe file that can be merged, read and moved into a project."""
    place = state_directory(home() / "sweeps")
    file = place / f"{name}-winner.yaml"
    write_state(
        file, recipe_text(relocate_recipe(winner, directory, place), f"Found by `mergegate sweep`. {why}").encode()
    )
    return file
