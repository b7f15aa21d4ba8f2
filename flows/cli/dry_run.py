"""``mergegate run --dry-run``: all checks, what the merge needs, what is cached stage by stage, what is left to make.

No weight is read and nothing is made, but for what ``mergegate check`` counts and measures. How long a stage takes is
taken from the last run of the profile that made it here; where there was none, that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.answer import print_answer
from flows.cli.check import print_findings
from flows.cli.plan import forecast_of, named_prices, print_forecast
from flows.preflight import ClearedCandidate, Problems, preflight_profile
from flows.profile import Profile
from merge_core.units import format_duration
from tasks.checkpoints import Model, PinnedRecipe, pinned_before
from tasks.evaluation import known_scores, unknown_documents
from tasks.merge import merge, merged_model, numerics
from tasks.perplexity import perplexity
from tasks.preflight import Evidence, planned_looks
from tasks.report import read_history
from tasks.stage import home, runtime, store

MERGE = "merge"


@dataclass(frozen=True)
class PlannedStage:
    """A call of a stage that the run would make.

    Attributes:
        missing: Documents of a task that have to be asked; 1 of another stage that is not cached.
        seconds: That a call took when it was last made for this profile; None: not known.
    """

    stage: str
    subject: str
    cached: bool
    missing: int = 0
    seconds: float | None = None


def dry_run(profile: Profile, console: Console, as_json: bool, prices: Sequence[str]) -> int:
    """Say all that is known before the run, and return the exit code that its checks would give.

    Raises:
        InvalidInput: for a recipe that cannot mean anything.
    """
    named = named_prices(prices)
    problems = Problems(stop_at_once=False)
    ready = preflight_profile(profile, problems)
    own = next((one for one in ready.cleared if one.candidate is profile.candidates()[0]), None)
    planned = tuple(_planned(profile, own, ready.evidence)) if own and ready.evidence else ()
    left = [one for one in planned if not one.cached]
    known = [one.seconds for one in left if one.seconds is not None]
    seconds = sum(known) if len(known) == len(left) else None
    cost = {name: seconds / 3600 * price for name, price in named.items()} if seconds is not None else {}
    message = _message(planned, seconds) if planned else "its checks say no; see the findings"
    findings = problems.worst_first()
    if as_json:
        status = "ready" if problems.status == "passed" else problems.status
        more = {
            "stages": [asdict(one) for one in planned],
            "seconds": seconds,
            "cost": cost,
            "overrides": profile.overrides,
        }
        print_answer(status, message, more, findings)
        return problems.exit_code
    print_findings(findings, problems, console)
    if own:
        print_forecast(forecast_of(own.candidate.recipe, Path(), "auto", named, None), console)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("stage", "of", "in the store", "took last time"):
        table.add_column(column)
    for one in planned:
        there = (
            Text("cached", "cyan")
            if one.cached
            else Text("to be made" if one.stage != "evaluate" else f"{one.missing:,} documents to ask", "yellow")
        )
        table.add_row(
            one.stage,
            Text(one.subject),
            there,
            format_duration(one.seconds) if one.seconds is not None and not one.cached else "",
        )
    if planned:
        console.print()
        console.print(table)
        console.print()
    console.print(Text(f"dry run: {message}", style="bold"))
    for name, dollars in cost.items():
        console.print(f"  {name}: ${dollars:.2f}")
    return problems.exit_code


def _message(planned: Sequence[PlannedStage], seconds: float | None) -> str:
    left = sum(not one.cached for one in planned)
    if not left:
        return f"all {len(planned)} stages that cost something are cached; nothing is made anew"
    took = f"about {format_duration(seconds)}" if seconds is not None else "not known yet: no run has made them here"
    return f"{left} of {len(planned)} stages that cost something are to be made; time: {took}"


def _planned(profile: Profile, own: ClearedCandidate, evidence: Evidence) -> Iterator[PlannedStage]:
    """The calls of the profile's own recipe, up to the first look at each task."""
    took = _last_times(profile.name)
    parents = pinned_before(own.found, store().hashes)
    by_name = {parent.name: parent for parent in parents}
    whole = len(parents) == len(own.found) and not any(parent.adapter for parent in parents)
    pinned = PinnedRecipe(own.candidate.recipe, parents)
    merged = merge.find(pinned, numerics(profile.merge)) if whole else None
    yield PlannedStage(MERGE, "", merged is not None, 0 if merged else 1, took.get(MERGE))
    models: dict[str, Model | None] = {one.name: by_name.get(one.name) if whole else None for one in own.found}
    models[MERGE] = merged_model(merged, pinned) if merged else None
    if evidence.documents is not None and evidence.windows is not None:
        for name, model in models.items():
            there = (
                model is not None
                and perplexity.find(model, evidence.documents, evidence.windows, runtime()) is not None
            )
            yield PlannedStage("perplexity", name, there, 0 if there else 1, took.get("perplexity"))
    for task in evidence.tasks:
        if task.data is None:
            continue  # the findings say why it could not be counted
        first = planned_looks(task, evidence)[0]
        for name, model in models.items():
            known = known_scores(model, task, evidence.scoring, runtime()) if model else ()
            missing = unknown_documents(task, evidence.scoring, first, known)
            yield PlannedStage("evaluate", f"{name}, {task.name}", missing == 0, missing, took.get("evaluate"))


def _last_times(profile: str) -> Mapping[str, float]:
    """Seconds that one call of a stage took when it was last made for the profile."""
    found: dict[str, float] = {}
    for record in read_history(home() / "reports").records:
        if record.profile == profile:
            found |= {
                one.name: one.seconds / (one.calls - one.cached) for one in record.stages if one.calls > one.cached
            }
    return found
