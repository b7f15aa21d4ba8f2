"""Rebuild a release and compare every byte, or export its results as logs of inspect_ai."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import new_directory
from mergegate.merge_core.parsing import require_printable
from mergegate.tasks.release.publish import Signer, SignerPolicy
from mergegate.tasks.release.publish.releases import (
    ReproducedRelease,
    check_release,
    inspect_logs,
    read_release_results,
)
from mergegate.tasks.release.publish.targets import find_release

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


def signer_policy(
    identity: str | None, issuer: str | None, trust_config: Path | None, *, offline: bool
) -> SignerPolicy | None:
    """Return the signer that a keyless signature must have, or None if it is not verified.

    Raises:
        InvalidInput: An option is missing.
    """
    if identity and issuer:
        return SignerPolicy(Signer(identity, issuer), trust_config, offline)
    options = {"--identity": identity, "--issuer": issuer, "--trust-config": trust_config, "--offline": offline}
    if present := [name for name, value in options.items() if value or value == ""]:
        raise InvalidInput(
            " and ".join(present),
            found=f"no value for {' and '.join(name for name in ('--identity', '--issuer') if not options[name])}",
            expected="both the identity and the issuer, because several issuers may confirm the same identity",
            remedy="pass --identity ID --issuer URL; get them from the publisher, but not from the release",
        )
    return None


def reproduce_release(
    release: str, parents: Path | None, device: str, console: Console, merge: str | None = None
) -> ReproducedRelease:
    """Verify a release, build its weights again in a temporary directory, and compare every file.

    Raises:
        InvalidInput: The release, a parent, the device or the merge of quantized variants does not exist.
        Refused: The release is not as published, or the rebuilt weights differ.
    """
    from mergegate.tasks.release.publish.releases import rebuild_release, rebuild_variants

    published = find_release(release)
    verified = check_release(published, merge=merge)
    if verified.merge:
        with TemporaryDirectory(prefix="mergegate-reproduce-") as scratch, console.status("quantizing again"):
            return rebuild_variants(published, verified, Path(scratch), merge=merge, directory=parents)
    columns = (TextColumn("merging again"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with TemporaryDirectory(prefix="mergegate-reproduce-") as scratch, Progress(*columns, console=console) as bar:
        job = bar.add_task("merge", total=None)
        return rebuild_release(
            published,
            verified,
            Path(scratch) / "merged",
            directory=parents,
            device=device,
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
        )
