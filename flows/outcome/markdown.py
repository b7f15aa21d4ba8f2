"""Render the end of a run as Markdown, for Prefect's page about it and for pull requests."""

from __future__ import annotations

from mergegate.flows.outcome.ending import RunOutcome
from mergegate.tasks.report import as_markdown, shadow_rows

# Prefect accepts more, but its pages become slow.
_MOST_OF_A_PAGE = 90_000  # bytes of an artifact


def prefect_page(outcome: RunOutcome, name: str) -> str:
    """Render the page with the status first and the report's path last. Long evidence is cut."""
    mark = "✓" if outcome.exit_code == 0 else "✗"
    head = f"## {mark} {outcome.status}: {name}\n\n"
    evidence = as_markdown(outcome.content) if outcome.content else _fenced(outcome.message)
    if outcome.shadow:
        evidence += "\n" + "".join(f"* {label}: {value}\n" for label, value in shadow_rows(outcome.shadow))
    foot = f"\nReport: `{outcome.report}`\n" if outcome.report else ""
    room = _MOST_OF_A_PAGE - len((head + foot).encode())
    if len(evidence.encode()) > room:
        whole_lines = evidence.encode()[: room - 100].decode(errors="ignore").rpartition("\n")[0]
        evidence = f"{whole_lines}\n\nThe rest stands in the report.\n"
    return head + evidence + foot


def _fenced(message: str) -> str:
    """Return untrusted text in a code fence that no line of it can close."""
    fence = "```"
    while fence in message:
        fence += "`"
    return f"{fence}\n{message}\n{fence}\n"
