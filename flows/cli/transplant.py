"""``mergegate transplant-tokenizer``: write a model with another model's tokenizer into a new directory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mergegate.merge_core.checkpoint.vocabulary import METHODS, TransplantMethod
from mergegate.merge_core.engine import Transplant, TransplantSettings, transplant_tokenizer
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import new_directory
from mergegate.tasks.checkpoints import find_checkpoint, open_parent
from mergegate.tasks.checkpoints.hub import download_snapshots
from mergegate.tasks.stage import store


def transplant_to(
    model: str, donor: str, out: Path, *, method: str, k: int, device: str, console: Console
) -> dict[str, object]:
    """Write ``model`` with the tokenizer of ``donor`` into ``out``, and return the result as plain data.

    The directory is either complete or does not exist.

    Raises:
        InvalidInput: A model cannot be read, ``out`` exists, or the method does not exist.
    """
    if method not in METHODS:
        raise InvalidInput(
            "--method", found=f"{method!r:.40}", expected=" or ".join(METHODS), remedy=suggest(method[:40], METHODS)
        )
    if k < 1:
        raise InvalidInput("-k", found=f"{k}", expected="from 1")
    method_name: TransplantMethod = "omp" if method == "omp" else "mean"
    with new_directory(out) as directory:
        transplant = _transplant(model, donor, directory, method_name, k, device, console)
    console.print(
        f"{out}: {transplant.tokens} tokens, {transplant.shared} of them with rows of their own, the others by {method}"
    )
    for name, error in transplant.errors.items():
        console.print(f"{name}: combinations are {error:.1%} off the donor's own rows")
    return {
        "out": str(out),
        "tokens": transplant.tokens,
        "shared": transplant.shared,
        "errors": transplant.errors,
        "files": dict(transplant.record.files),
    }


def _transplant(
    model: str, donor: str, directory: Path, method: TransplantMethod, k: int, device: str, console: Console
) -> Transplant:
    checkpoints = [find_checkpoint(text) for text in (model, donor)]
    if snapshots := [snapshot for checkpoint in checkpoints for snapshot in checkpoint.snapshots]:
        download_snapshots(snapshots, store().hashes, lambda done, total: None)
    first, second = (open_parent(checkpoint) for checkpoint in checkpoints)
    scratch = directory.with_name("rows.partial")
    columns = (TextColumn("transplant"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as bar:
            job = bar.add_task("transplant", total=None)
            return transplant_tokenizer(
                first,
                second,
                directory,
                scratch,
                TransplantSettings(method, k, device),
                on_progress=lambda done, total: bar.update(job, completed=done, total=total),
            )
    finally:
        scratch.unlink(missing_ok=True)
