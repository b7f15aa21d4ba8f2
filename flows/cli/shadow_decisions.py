"""``mergegate shadow evaluate``, ``status``, ``promote`` and ``rollback``: show or decide which model serves users."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.approve import current_user
from mergegate.flows.cli.command import ApproveOption, JsonOption, command_context
from mergegate.flows.cli.output import OUTCOME_STYLES, print_answer, short_path
from mergegate.flows.cli.run import RunView, load_for_flow, run_flow
from mergegate.flows.cli.run_summary import outcome_json
from mergegate.flows.cli.score_table import print_table
from mergegate.flows.cli.shadow import ShadowProfile
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import load_profile
from mergegate.flows.shadow_watch import open_watch
from mergegate.tasks.report import ARM_COLUMNS, ShadowContent, arm_cells, shadow_outcome, shadow_rows, shadow_sentence
from mergegate.tasks.stage import home

ReasonOption = Annotated[str, typer.Option(help="Reason for the decision, which is stored. Required.")]


def shadow_evaluate_command(
    profile: ShadowProfile, approve: ApproveOption = False, as_json: JsonOption = False
) -> None:
    """Judge new pairs, then promote, roll back or wait."""
    _run_flow(profile, "look", "", as_json, approve=approve)


def shadow_promote_command(profile: ShadowProfile, reason: ReasonOption = "", as_json: JsonOption = False) -> None:
    """Promote the candidate, regardless of the evidence."""
    _run_flow(profile, "promote", reason, as_json)


def shadow_rollback_command(profile: ShadowProfile, reason: ReasonOption = "", as_json: JsonOption = False) -> None:
    """Return all users to the parent, regardless of evidence."""
    _run_flow(profile, "roll back", reason, as_json)


def _run_flow(
    profile: Path, decision: Literal["look", "promote", "roll back"], reason: str, as_json: bool, approve: bool = False
) -> None:
    with command_context(as_json, with_state=True) as console:
        from mergegate.flows.shadow import require_reason, shadow

        if by_hand := decision != "look":
            require_reason(reason)
        by = current_user() if by_hand else ""
        loaded = load_for_flow(profile)
        flow = partial(shadow, profile, say=decision, why=reason, by=by, return_state=True)
        headline = (f"{loaded.name} on users' traffic", f"profile {profile}")
        outcome = run_flow(flow, headline, RunView(approve=approve), console)
        _print_outcome(outcome, console, as_json)
        # A manual decision did its job, even if that was a rollback.
        raise typer.Exit(0 if by_hand and outcome.status in ("promoted", "rolled back") else outcome.exit_code)


def shadow_status_command(profile: ShadowProfile, as_json: JsonOption = False) -> None:
    """Show which model serves users, and the evidence so far.

    This neither judges nor changes anything.
    """
    with command_context(as_json, with_state=True) as console:
        content = open_watch(load_profile(profile)).current_content()
        page = home() / "reports" / f"{content.name}.shadow.html"
        status = "watching" if content.serving == "watch" else content.serving
        if as_json:
            report = str(page) if page.is_file() else None
            print_answer(status, shadow_sentence(content), {**_state_json(content), "report": report})
            return
        style = OUTCOME_STYLES[shadow_outcome(content)]
        console.print(Text(f"{content.name} {content.candidate}: {status}", style=style))
        console.print(Text(f"  {shadow_sentence(content)}"))
        _print_evidence(content, console)
        if page.is_file():
            console.print(Text("  report    ", style="dim"), Text(short_path(page)), sep="")


def _print_outcome(outcome: RunOutcome, console: Console, as_json: bool) -> None:
    if as_json:
        state = _state_json(outcome.shadow) if outcome.shadow else {}
        findings = [outcome.stopped_by] if outcome.stopped_by else []
        print_answer(outcome.status, outcome.text, {**outcome_json(outcome), **state}, findings)
        return
    console.print()
    if outcome.shadow is not None:
        _print_evidence(outcome.shadow, console)
        console.print()
    style = "bold red" if outcome.exit_code else "bold green"
    console.print(Text(outcome.text, style=style))
    if outcome.report is not None:
        console.print(Text("  report  ", style="dim"), Text(short_path(outcome.report)), sep="")


def _state_json(content: ShadowContent) -> dict[str, object]:
    """Return the state of the test as plain data, without the curve and without users' texts."""
    content_json = content.model_dump(mode="json", exclude={"points", "examples"})
    return {
        "shadow": {**content_json, "pairs": content.pairs, "now": content.now.model_dump() if content.now else None}
    }


def _print_evidence(content: ShadowContent, console: Console) -> None:
    for label, value in shadow_rows(content):
        console.print(Text(f"  {label:<17}", style="dim"), Text(value), sep="")
    arms = (("parent", content.parent_arm), ("candidate", content.candidate_arm))
    console.print()
    print_table(
        console, ("", *map(str.lower, ARM_COLUMNS)), [(name, *arm_cells(arm)) for name, arm in arms], numbers=True
    )
    lines = [f"waiting  {content.waiting:,} pairs for the next look"] if content.waiting else []
    for title, counts in (("not judged", content.left_out), ("not recorded", content.not_recorded)):
        if counts:
            lines.append(f"{title}: {'; '.join(f'{count:,} {reason}' for reason, count in counts)}")
    for line in lines:
        console.print(Text(f"  {line}", style="dim"))
