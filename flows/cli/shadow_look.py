"""``mergegate shadow look``, ``status``, ``promote``, ``rollback``: the state of a watched release on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.score_table import print_table
from mergegate.flows.cli.styles import OUTCOME_STYLES, short_path
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import load_profile
from mergegate.flows.shadow import shadow_state
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.report import ARM_COLUMNS, ShadowContent, arm_cells, shadow_outcome, shadow_rows, shadow_sentence
from mergegate.tasks.stage import home

_STATUS = {"watch": "watching"}


def print_look(told: Mapping[str, Any] | None, outcome: RunOutcome, console: Console) -> None:
    """The end of a look.

    Args:
        told: The same for machines, where one of them asks; without what users wrote.
    """
    if told is not None:
        state = told_state(outcome.shadow) if outcome.shadow else {}
        stopped = [outcome.stopped_by] if outcome.stopped_by else []
        print_answer(outcome.status, outcome.message, {**told, **state}, stopped)
        return
    console.print()
    if outcome.shadow is not None:
        _print_lines(outcome.shadow, console)
        console.print()
    style = "bold red" if outcome.exit_code else "bold green"
    console.print(Text(outcome.message, style=style))
    if outcome.report is not None:
        console.print(Text("  report  ", style="dim"), Text(short_path(outcome.report)), sep="")


def print_state(profile: Path, console: Console, as_json: bool) -> None:
    """What serves users now, and what is shown so far.

    Raises:
        InvalidInput: when the profile watches nothing, or nothing is watched yet.
    """
    content = shadow_state(load_profile(profile))
    page = home() / "reports" / f"{content.name}.shadow.html"
    status = _STATUS.get(content.serving, content.serving)
    if as_json:
        report = str(page) if page.is_file() else None
        print_answer(status, shadow_sentence(content), {**told_state(content), "report": report})
        return
    console.print(Text(f"{content.name} {content.candidate}: {status}", style=OUTCOME_STYLES[shadow_outcome(content)]))
    console.print(Text(f"  {shadow_sentence(content)}"))
    _print_lines(content, console)
    if page.is_file():
        console.print(Text("  report    ", style="dim"), Text(short_path(page)), sep="")


def told_state(content: ShadowContent) -> dict[str, object]:
    """The state for machines: the content without its course and without what users wrote."""
    told = content.model_dump(mode="json", exclude={"points", "examples"})
    return {"shadow": {**told, "pairs": content.pairs, "now": content.now.model_dump() if content.now else None}}


def require_reason(why: str) -> None:
    """See that somebody says why.

    Raises:
        InvalidInput: when nobody does.
    """
    if not why.strip():
        raise InvalidInput("--why", found="no reason", expected="--why TEXT: it is kept beside what was decided")


def _print_lines(content: ShadowContent, console: Console) -> None:
    for what, value in shadow_rows(content):
        console.print(Text(f"  {what:<17}", style="dim"), Text(value), sep="")
    arms = (("parent", content.parent_arm), ("candidate", content.candidate_arm))
    console.print()
    print_table(
        console, ("", *map(str.lower, ARM_COLUMNS)), [(name, *arm_cells(arm)) for name, arm in arms], numbers=True
    )
    for line in _left_out(content):
        console.print(Text(f"  {line}", style="dim"))


def _left_out(content: ShadowContent) -> Iterator[str]:
    if content.waiting:
        yield f"waits    {content.waiting:,} pairs for the next look"
    for what, counted in (("not judged", content.left_out), ("not recorded", content.not_recorded)):
        if counted:
            yield f"{what}: {'; '.join(f'{count:,} {reason}' for reason, count in counted)}"
