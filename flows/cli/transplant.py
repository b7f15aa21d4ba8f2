"""``mergegate transplant-tokenizer``: write a model with another model's tokenizer into a new directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_created
from mergegate.merge_core.checkpoint.vocabulary import METHODS, TransplantMethod
from mergegate.merge_core.engine import TransplantSettings, transplant_tokenizer
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import new_directory
from mergegate.tasks.checkpoints import find_checkpoint, open_parent
from mergegate.tasks.checkpoints.hub import download_snapshots
from mergegate.tasks.stage import store


def transplant_tokenizer_command(
    model: Annotated[str, typer.Argument(help="Model with the weights: a directory, or org/name@revision.")],
    donor: Annotated[
        str, typer.Argument(help="Model with the tokenizer. Its embeddings define the meaning of new tokens.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory for the new checkpoint. It must not exist.")],
    method: Annotated[str, typer.Option(help="Method that computes the rows of new tokens: omp or mean.")] = "omp",
    k: Annotated[int, typer.Option("-k", help="Maximum number of shared tokens that omp combines into one row.")] = 64,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Give a model the tokenizer of another model.

    Shared tokens keep their rows. The rows of other tokens are combinations of shared ones.
    """
    with command_context(as_json) as console:
        if method not in METHODS:
            raise InvalidInput(
                "--method", found=f"{method!r:.40}", expected=" or ".join(METHODS), remedy=suggest(method[:40], METHODS)
            )
        if k < 1:
            raise InvalidInput("-k", found=f"{k}", expected="a number from 1")
        method_name: TransplantMethod = "omp" if method == "omp" else "mean"
        with new_directory(out) as directory:
            checkpoints = [find_checkpoint(text) for text in (model, donor)]
            if snapshots := [snapshot for checkpoint in checkpoints for snapshot in checkpoint.snapshots]:
                download_snapshots(snapshots, store().hashes, lambda done, total: None)
            first, second = (open_parent(checkpoint) for checkpoint in checkpoints)
            scratch = directory.with_name("rows.partial")
            columns = (TextColumn("transplant"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            try:
                with Progress(*columns, console=console) as bar:
                    job = bar.add_task("transplant", total=None)
                    result = transplant_tokenizer(
                        first,
                        second,
                        directory,
                        scratch,
                        TransplantSettings(method_name, k, device),
                        on_progress=lambda done, total: bar.update(job, completed=done, total=total),
                    )
            finally:
                scratch.unlink(missing_ok=True)
        console.print(f"{out}: {result.tokens} tokens, {result.shared} of them shared, the others computed by {method}")
        for name, error in result.errors.items():
            console.print(f"{name}: combinations deviate from the donor's own rows by {error:.1%}")
        if as_json:
            counts = {"tokens": result.tokens, "shared": result.shared, "errors": result.errors}
            print_created({"out": str(out), **counts, "files": dict(result.record.files)})
