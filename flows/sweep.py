"""Search the free values of a recipe, confirm the winner on documents that no trial saw, and release it.

::

    mergegate sweep profiles/demo-sweep.yaml

If no candidate is confirmed, nothing is released. Every scored trial is stored. A sweep that was killed continues with
the same trials and finds the same winner.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import yaml
from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.attempt import open_trial_pool, prepare_search, run_confirmation, run_search
from mergegate.flows.outcome import LIBRARIES, RunOutcome, conclude_flow, name_run, store_page, within_limits
from mergegate.flows.profile import Profile, load_profile, profile_name
from mergegate.flows.release import make_release
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import state_directory, write_state
from mergegate.tasks.base.runners import open_runner
from mergegate.tasks.base.stage import announce, home, versions
from mergegate.tasks.release.report import sweep_content, sweep_sentence
from mergegate.tasks.sweep import Confirmation, open_view, parameter_importances, relocate_recipe, study_key


@flow(name="sweep", flow_run_name=name_run)
def sweep(profile: Path | Profile, release: bool = True, view: str | None = None) -> State[RunOutcome]:
    """Search the free parameters of a profile's recipe, confirm the winner, and release it.

    Args:
        profile: Profile file with a section ``sweep``, relative to the project directory, or a parsed profile.
        release: Whether to release a confirmed winner. If false, only its recipe is stored.
        view: File or URL of the study for Optuna's dashboard. Default: the setting in the profile.
    """
    story = partial(make_sweep, release=release, view=view)
    return conclude_flow(lambda: within_limits(story, load_profile(profile)), profile_name(profile))


def make_sweep(profile: Profile, *, release: bool = True, view: str | None = None) -> RunOutcome:
    """Search, confirm the winner and release it, and return the outcome of the run.

    A check that refuses raises its error. If no candidate is confirmed, the outcome contains the report.
    """
    search = prepare_search(profile)
    with open_runner(profile.runner) as runner, open_trial_pool(search, profile, runner) as pool:
        power = pool.power()
        announce(power.brief())
        recorder = None  # Optuna's study of the search, if it has a location
        if location := view or profile.sweep_storage():
            problem = search.problem
            name = f"{profile.name} {study_key(problem.space, problem.settings)[:8]}"
            recorder = open_view(location, name, problem.space.coordinates, problem.objective)
        study = run_search(pool, recorder)
        verdict = run_confirmation(pool, study)

    shares: Mapping[str, float] = {}
    try:
        shares, why_none = parameter_importances(study)
    except InvalidInput as error:
        why_none = f"{error.found}: {error.remedy}"
    content = sweep_content(
        study,
        verdict,
        name=profile.name,
        method=search.method,
        power=power,
        sizes=search.sizes(),
        runner=str(profile.runner),
        importances=shares,
        no_importances=why_none,
        reproduce=("mergegate sweep PROFILE",),
        versions=tuple(f"{name} {version}" for name, version in versions(*LIBRARIES).items()),
    )
    page = store_page(content)
    if not isinstance(verdict, Confirmation) or not verdict.confirmed:
        return RunOutcome(
            status="refused",
            message="no candidate confirmed",
            reasons=(sweep_sentence(content),),
            report=page,
            sweep=content,
        )
    winner = study.recipes[verdict.winner]
    directory = state_directory(home() / "sweeps")
    file = directory / f"{profile.name}-winner.yaml"
    origin = f"Found by `mergegate sweep`. {sweep_sentence(content)}"
    comment = textwrap.fill(origin, 118, initial_indent="# ", subsequent_indent="# ")
    recipe = relocate_recipe(winner, search.directory, directory)
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    write_state(file, f"{comment}\n{text}".encode())
    announce(f"confirmed: the winner is {file}")
    if not release:
        return RunOutcome(status="passed", message=sweep_sentence(content), location=file, report=page, sweep=content)
    outcome = make_release(profile.with_recipe(relocate_recipe(winner, search.directory, profile.root)))
    return outcome.model_copy(update={"sweep": content})
