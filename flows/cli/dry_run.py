"""``mergegate run --dry-run``: all checks, what the merge needs, what is cached stage by stage, what is left to make.

No weight is read and nothing is made, but for what ``mergegate check`` counts and measures. How long it takes says
``flows.cli.night``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.check import print_findings
from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.plan import Forecast, forecast_of, named_prices, print_forecast
from mergegate.flows.cli.run_plan import PlannedRun, PlannedStage, plan_night
from mergegate.flows.preflight import ClearedCandidate, Problems, preflight_profile
from mergegate.flows.profile import Profile
from mergegate.merge_core.wording import format_duration, format_roughly
from mergegate.tasks.preflight import plan_cached


def dry_run(profile: Profile, console: Console, as_json: bool, prices: Sequence[str]) -> int:
    """Say all that is known before the run, and return the exit code that its checks would give.

    Raises:
        InvalidInput: for a recipe that cannot mean anything.
    """
    named = named_prices(prices)
    problems = Problems(stop_at_once=False)
    ready = preflight_profile(profile, problems)
    night = plan_night(profile, ready, problems.examples)
    seconds = night.seconds if night else None
    cost = {name: seconds / 3600 * price for name, price in named.items()} if seconds is not None else {}
    message = night.sentence() if night else "its checks say no; see the findings"
    findings = problems.worst_first()
    if as_json:
        status = "ready" if problems.status == "passed" else problems.status
        more = {
            "stages": [asdict(one) for one in night.stages] if night else [],
            "seconds": seconds,
            "rough": night.rough if night else False,
            "cost": cost,
            "attempts": len(profile.candidates()) + profile.proposed,
            "overrides": profile.overrides,
        }
        print_answer(status, message, more, findings)
        return problems.exit_code
    print_findings(findings, problems, console)
    if night:
        own = next(one for one in ready.cleared if one.candidate is profile.candidates()[0])
        if (forecast := _forecast(profile, own, named)) is not None:
            print_forecast(forecast, console)
        console.print()
        console.print(_table(night))
        console.print()
    console.print(Text(f"dry run: {message}", style="bold"))
    for line in _further(profile):
        console.print(f"  {line}")
    for name, dollars in cost.items():
        console.print(f"  {name}: ${dollars:.2f}")
    return problems.exit_code


def _further(profile: Profile) -> Iterator[str]:
    """What a refusal would be followed by, each with a merge of its own to be made and measured."""
    written = len(profile.candidates()) - 1
    if written:
        yield f"when the gate refuses: {written} written {'remedy' if written == 1 else 'remedies'}, not counted above"
    if profile.tuning:
        yield f"{'then' if written else 'when the gate refuses:'} a search for the scale, not counted above"
    if profile.proposed:
        then = "then" if written or profile.tuning else "when the gate refuses:"
        yield f"{then} up to {profile.proposed} that the refusal proposes, not counted above"


def _forecast(profile: Profile, own: ClearedCandidate, prices: dict[str, float]) -> Forecast | None:
    """What the merge needs; by the plan that the check has made, where it was made now."""
    recipe = own.candidate.recipe
    planned, _ = plan_cached(recipe, own.found, own.headers, profile.checks.tokenizer.accepted)
    if planned.plan is None:
        return None
    return forecast_of(recipe, own.found, planned.plan, Path(), "auto", prices, None)


def _table(night: PlannedRun) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("stage", "of", "in the store", "takes"):
        table.add_column(column)
    for one in night.stages:
        there = "to be made" if one.stage != "evaluate" else f"{one.missing:,} documents to ask"
        state = Text("cached", "cyan") if one.cached else Text(there, "yellow")
        table.add_row(one.stage, Text(one.subject), state, _takes(one))
    return table


def _takes(one: PlannedStage) -> str:
    if one.seconds is None:
        return ""
    return f"roughly {format_roughly(one.seconds)}" if one.rough else format_duration(one.seconds)
