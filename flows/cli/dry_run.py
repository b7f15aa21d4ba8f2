"""``mergegate run --dry-run``: run all checks, and show for each stage whether it is cached.

This reads no weights and stores only the counts and measurements that ``mergegate check`` also stores. The module
``flows.cli.run_plan`` estimates the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.output import print_answer, print_findings
from mergegate.flows.cli.plan import PlanOptions, forecast_of, named_prices, print_forecast
from mergegate.flows.cli.run_plan import plan_run
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import Profile
from mergegate.merge_core.wording import format_duration, format_roughly
from mergegate.tasks.preflight import plan_cached


def dry_run(profile: Profile, console: Console, as_json: bool, prices: Sequence[str]) -> int:
    """Print the findings, the stages of the run with their times and costs, and return the exit code of the checks.

    Raises:
        InvalidInput: The recipe is invalid.
    """
    prices_by_name = named_prices(prices)
    problems = Problems(stop_at_once=False)
    preflight = preflight_profile(profile, problems)
    planned = plan_run(profile, preflight, problems.examples)
    seconds = planned.seconds if planned else None
    cost = {name: seconds / 3600 * price for name, price in prices_by_name.items()} if seconds is not None else {}
    message = planned.sentence() if planned else "a check refuses the run; see the findings"
    findings = problems.worst_first()
    if as_json:
        status = "ready" if problems.status == "passed" else problems.status
        more = {
            "stages": [asdict(stage) for stage in planned.stages] if planned else [],
            "seconds": seconds,
            "further_documents": planned.further_documents if planned else 0,
            "rough": planned.rough if planned else False,
            "cost": cost,
            "attempts": len(profile.candidates()) + profile.max_further_attempts,
            "overrides": profile.overrides,
            "credentials": [credential.model_dump() for credential in problems.credentials],
        }
        print_answer(status, message, more, findings)
        return problems.exit_code
    print_findings(findings, problems, console)
    if planned:
        cleared = next(item for item in preflight.cleared if item.candidate is profile.candidates()[0])
        recipe, accepted = cleared.candidate.recipe, profile.checks.tokenizer.accepted
        merge_plan = plan_cached(recipe, cleared.parents, cleared.headers, accepted)[0].plan
        if merge_plan is not None:
            options = PlanOptions(Path(), "auto", prices_by_name, None)
            print_forecast(forecast_of(recipe, cleared.parents, merge_plan, options), console)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("stage", "of", "in the store", "takes"):
            table.add_column(column)
        for stage in planned.stages:
            open_work = "must run" if stage.stage != "evaluate" else f"{stage.missing:,} documents to evaluate"
            state = Text("cached", "cyan") if stage.cached else Text(open_work, "yellow")
            duration = ""
            if stage.seconds is not None:
                rough, exact = f"roughly {format_roughly(stage.seconds)}", format_duration(stage.seconds)
                duration = rough if stage.rough else exact
            table.add_row(stage.stage, Text(stage.subject), state, duration)
        console.print()
        console.print(table)
        console.print()
    console.print(Text(f"dry run: {message}", style="bold"))
    # Each attempt that follows a refusal costs a merge and an evaluation of its own.
    written = len(profile.candidates()) - 1
    attempts = [f"{written} written {'remedy' if written == 1 else 'remedies'}"] if written else []
    attempts += ["a search for the scale"] if profile.scale_search else []
    if profile.max_proposed_remedies:
        attempts.append(f"up to {profile.max_proposed_remedies} proposed remedies")
    for number, attempt in enumerate(attempts):
        console.print(f"  {'then' if number else 'if the gate refuses:'} {attempt}, not counted above")
    for name, dollars in cost.items():
        console.print(f"  {name}: ${dollars:.2f}")
    return problems.exit_code
