"""``mergegate smoke``: serve a checkpoint or use a running server, and print a table of test results."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import (
    Model,
    PinnedCheckpoint,
    apply_adapters_outside_flow,
    find_checkpoint,
    pin_checkpoints,
)
from mergegate.tasks.checkpoints.hub import download_snapshots
from mergegate.tasks.serve import STEPS, ServeSettings, ServeVerdict, find_server, smoke_checkpoint, smoke_url
from mergegate.tasks.stage import device_kind, home, store
from mergegate.tasks.store import digest

_MARKS = {"pass": ("✓", "green"), "fail": ("✗", "bold red"), "not offered": ("·", "dim")}


def smoke_target(
    target: str,
    console: Console,
    as_json: bool,
    *,
    profile: Path | None,
    checkpoint: Path | None,
    model: str | None,
    key: str,
) -> int:
    """Smoke-test ``target``, print the results, and return the exit code: 0 passed, 3 refused.

    Args:
        target: Checkpoint (directory, or ``org/name`` on the Hub), or the URL of a server.
        profile: Profile whose section ``serve`` applies. Default: an empty section.
        checkpoint: For a URL: checkpoint that the server should serve.
        model: For a URL: name of the model on the server.
        key: For a URL: bearer token.

    Raises:
        InvalidInput: The target is neither, or options do not apply to it.
        Refused: The server cannot run on this machine.
    """
    loaded = load_profile(profile) if profile else None
    settings = (loaded.serve if loaded else None) or ServeSettings()
    root = loaded.root if loaded else Path()
    is_url = target.startswith(("http://", "https://"))
    if not is_url and (checkpoint or model):
        option = "--checkpoint" if checkpoint else "--model"
        raise InvalidInput(option, found="given with a checkpoint", expected="a URL", remedy=f"leave {option} out")
    log: Path | None = None
    with console.status("reading headers") as status:

        def show(done: int, doing: str) -> None:
            status.update(f"{done} of {STEPS}: {doing}")

        if is_url:
            verdict = smoke_url(
                target,
                settings,
                model=model,
                checkpoint=_local(str(checkpoint)) if checkpoint else None,
                device=device_kind(),
                key=key,
                on_progress=show,
            )
        else:
            server = find_server(settings, root)  # a missing server is reported before a checkpoint is downloaded
            served, adapted = _pinned(target)
            log = home() / "logs" / f"smoke-{served.directory.name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)  # log of an earlier run
            verdict = smoke_checkpoint(
                served, settings, server, device=device_kind(), log=log, adapted=adapted, on_progress=show
            )
    if as_json:
        print_answer(
            str(verdict.outcome) if hasattr(verdict, "outcome") else "asked",
            verdict.summary(),
            verdict.model_dump(mode="json"),
        )
    else:
        _print(verdict, console, log if log and log.exists() else None)
    return 3 if verdict.refuses() else 0


def _local(reference: str) -> Model:
    return _pinned(reference)[0]


def _pinned(reference: str) -> tuple[Model, PinnedCheckpoint | None]:
    """Return the checkpoint as a model, and for ``model+adapter`` also both parts. Hub checkpoints are downloaded."""
    checkpoint = find_checkpoint(reference)
    if checkpoint.snapshots:
        download_snapshots(checkpoint.snapshots, store().hashes)
    if checkpoint.adapter:
        (adapted,) = pin_checkpoints([checkpoint], store().hashes)
        return apply_adapters_outside_flow([adapted])[0], adapted
    # This command has no cache, so the path identifies the model.
    return Model(name=checkpoint.name, digest=digest(str(checkpoint.directory)), directory=checkpoint.directory), None


def _print(verdict: ServeVerdict, console: Console, log: Path | None) -> None:
    """Print the checks, the serving costs, and the verdict with remedies."""
    checks = _table("", "check", "seen", "right is")
    for check in verdict.checks:
        mark, style = _MARKS[check.outcome]
        seen = f"{check.where}: {check.seen}" if check.where else check.seen
        if check.outcome == "not offered":
            seen = f"not offered: {seen}"
        checks.add_row(
            Text(mark, style), Text(check.name, style, no_wrap=True), Text(seen), Text(check.expected, "dim")
        )
    console.print(checks)
    console.print()
    if quantities := verdict.measured.quantities():
        numbers = Table.grid(padding=(0, 2, 0, 0))
        for name, value in quantities:
            numbers.add_row(Text(f"   {name}", "dim"), Text(value))
        console.print(numbers)
        how = "; one request at a time, the quickest of three" if verdict.measured.throughput else ""
        console.print(Text(f"   {verdict.measured.occasion}{how}", "dim"))
        console.print()
    line = f"{verdict.model} on {verdict.server}: {'refused, ' if verdict.refuses() else ''}{verdict.count()}"
    console.print(Text(line, "bold red" if verdict.refuses() else "bold green"))
    for check in verdict.failures:
        if check.remedy:
            console.print(Text(f"  {check.name}: {check.remedy}"))
    if verdict.refuses() and log:
        console.print(Text("  log      ", "dim"), Text(os.path.relpath(log)), sep="")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
