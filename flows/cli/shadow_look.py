"""``mergegate shadow look``, ``status``, ``promote``, ``rollback``: show a watched release on one screen."""

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


def print_look(facts: Mapping[str, Any] | None, outcome: RunOutcome, console: Console) -> None:
    """Print the outcome of an interim look.

    Args:
        facts: The outcome as JSON, without users' texts. None to print lines for users.
    """
    if facts is not None:
        state = state_json(outcome.shadow) if outcome.shadow else {}
        stopped = [outcome.stopped_by] if outcome.stopped_by else []
        print_answer(outcome.status, outcome.message, {**facts, **state}, stopped)
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
    """Print which model serves users now, and the evidence so far.

    Raises:
        InvalidInput: The profile has no section ``shadow``, or no release is watched yet.
    """
    content = shadow_state(load_profile(profile))
    page = home() / "reports" / f"{content.name}.shadow.html"
    status = _STATUS.get(content.serving, content.serving)
    if as_json:
        report = str(page) if page.is_file() else None
        print_answer(status, shadow_sentence(content), {**state_json(content), "report": report})
        return
    console.print(Text(f"{content.name} {content.candidate}: {status}", style=OUTCOME_STYLES[shadow_outcome(content)]))
    console.print(Text(f"  {shadow_sentence(content)}"))
    _print_lines(content, console)
    if page.is_file():
        console.print(Text("  report    ", style="dim"), Text(short_path(page)), sep="")


def state_json(content: ShadowContent) -> dict[str, object]:
    """Return the state as JSON, without the curve and without users' texts."""
    content_json = content.model_dump(mode="json", exclude={"points", "examples"})
    return {
        "shadow": {**content_json, "pairs": content.pairs, "now": content.now.model_dump() if content.now else None}
    }


def require_reason(why: str) -> None:
    """Check that the reason is not empty.

    Raises:
        InvalidInput: The reason is empty.
    """
    if not why.strip():
        raise InvalidInput("--why", found="no reason", expected="--why TEXT: it is kept beside what was decided")


def _print_lines(content: ShadowContent, console: Console) -> None:
    for label, value in shadow_rows(content):
        console.print(Text(f"  {label:<17}", style="dim"), Text(value), sep="")
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
    for title, counts in (("not judged", content.left_out), ("not recorded", content.not_recorded)):
        if counts:
            yield f"{title}: {'; '.join(f'{count:,} {reason}' for reason, count in counts)}"
