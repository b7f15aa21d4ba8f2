"""``mergegate verify`` and ``mergegate reproduce``: verify a release, and rebuild it byte by byte."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mergegate.flows.cli.output import print_answer
from mergegate.tasks.publish.releases import ReproducedRelease, VerifiedRelease, check_release
from mergegate.tasks.publish.targets import find_release

_SIGNED = {
    "valid": "the signature is valid",
    "not checked": "it is signed; name the public key with --key to check by whom",
    "none": "it is not signed",
}


def verify_release(release: str, key: Path | None, console: Console, as_json: bool) -> None:
    """Verify a release against its own claims.

    Raises:
        InvalidInput: The input is not a release or not a key.
        Refused: Any part does not match.
    """
    verified = check_release(find_release(release), key)
    if as_json:
        print_answer("verified", f"{release} is as it was published", _plain(verified))
        return
    console.print(f"{verified.reference}: {verified.files} files, {verified.bytes / 1e6:,.1f} MB, all as published")
    if verified.version:
        console.print(f"  its version {verified.version} is its content")
    else:
        console.print("  its name is not its content: compared with itself only")
    console.print(f"  {_SIGNED[verified.signed]}")


def reproduce_release(release: str, parents: Path | None, device: str, console: Console, as_json: bool) -> None:
    """Verify a release, rebuild its weights in a temporary directory, and compare them.

    Raises:
        InvalidInput: The input is not a release, or a parent cannot be found.
        Refused: Any part does not match, or the rebuilt weights differ.
    """
    from mergegate.tasks.publish.releases import rebuild_release

    published = find_release(release)
    verified = check_release(published)
    columns = (TextColumn("merging again"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with TemporaryDirectory(prefix="mergegate-reproduce-") as directory, Progress(*columns, console=console) as bar:
        job = bar.add_task("merge", total=None)
        rebuilt = rebuild_release(
            published,
            verified,
            Path(directory) / "merged",
            directory=parents,
            device=device,
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
        )
    if as_json:
        print_answer("reproduced", f"{release} was made again to the byte", _plain(rebuilt))
        return
    how = f"made again in {rebuilt.seconds:.1f} s on {rebuilt.device}"
    console.print(f"{rebuilt.reference}: {how}; {len(rebuilt.files)} files, all equal to the byte")
    for name in rebuilt.files:
        console.print(f"  = {name}")


def _plain(result: VerifiedRelease | ReproducedRelease) -> dict[str, object]:
    fields = asdict(result)
    return {"where": fields.pop("reference")} | {name: value for name, value in fields.items() if name != "statement"}
