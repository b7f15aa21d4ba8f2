"""``mergegate export``: write the results in a release as logs of inspect_ai."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from mergegate.flows.cli.command import JsonOption, ReleaseArgument, command_context
from mergegate.flows.cli.output import print_created, short_path
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import new_directory
from mergegate.merge_core.parsing import require_printable
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.publish.exchange import inspect_logs, read_release_results
from mergegate.tasks.publish.releases import check_release
from mergegate.tasks.publish.targets import find_release

_LONGEST_NAME = 200  # characters of an organization


@dataclass(frozen=True)
class ExportResult:
    """Files with the results of a release, as ``mergegate export`` writes them.

    Attributes:
        output: Directory of the files.
        files: Number of files.
        bytes: Size of all files in bytes.
        models: Number of models with results.
        tasks: Number of results of a model on a task.
    """

    output: Path
    files: int
    bytes: int
    models: int
    tasks: int


def export_command(
    release: ReleaseArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    format: Annotated[
        Literal["inspect"], typer.Option(help="Format of the files: inspect for logs of inspect_ai.")
    ] = "inspect",
    organization: Annotated[
        str,
        typer.Option(
            help="Organization that publishes the results. Default: the supplier that the release states, or its "
            "namespace on the Hub."
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Export the results of a release to another tool.

    mergegate verifies the release first. The export has the scores of all models in its evidence, by document, without
    texts. Its date is the time of the export, because a release contains none.
    """
    with command_context(as_json) as console:
        result = export_release(release, output, organization)
        if as_json:
            counts = {"files": result.files, "bytes": result.bytes, "models": result.models, "tasks": result.tasks}
            print_created({"where": str(output), **counts})
            return
        models = format_count(result.models, "model")
        console.print(
            f"{short_path(output)}: {format_count(result.files, 'file')}, {format_bytes(result.bytes)}, the results of "
            f"{models}"
        )


def export_release(reference: str, output: Path, organization: str = "") -> ExportResult:
    """Verify a release, and write its results to the new directory ``output``.

    Raises:
        InvalidInput: There is no such release, it has no results, ``output`` exists, or ``organization`` is not a name.
        Refused: The release differs from its records.
    """
    require_printable(organization, "--organization")
    if len(organization) > _LONGEST_NAME or organization != organization.strip():
        raise InvalidInput(
            "--organization",
            found=f"{organization!r:.60}",
            expected=f"a name of at most {_LONGEST_NAME} characters without spaces around it",
        )
    published = find_release(reference)
    verified = check_release(published)
    results = read_release_results(published, verified.listing, verified.statement, organization or None)
    files, size = 0, 0
    with new_directory(output) as directory:
        for path, content in inspect_logs(results, datetime.now(UTC)):
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            files, size = files + 1, size + len(content)
    return ExportResult(output, files, size, len(results.models), sum(len(model.tasks) for model in results.models))
