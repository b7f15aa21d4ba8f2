"""``mergegate merge``, ``extract-lora`` and ``transplant-tokenizer``: write a checkpoint or an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.operations.console import print_created
from mergegate.flows.operations.merge import MergeOptions, merge_recipe
from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter
from mergegate.merge_core.checkpoint.vocabulary import METHODS, TransplantMethod
from mergegate.merge_core.engine import TransplantSettings, transplant_tokenizer
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import new_directory
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.checkpoints import find_checkpoint, identify_parents, open_parent, require_same_files
from mergegate.tasks.checkpoints.hub import download_snapshots
from mergegate.tasks.stage import store


def merge_command(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML, mergekit's dialect).")],
    out: Annotated[Path, typer.Argument(help="Directory for the merged checkpoint: new, or with this same merge.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random masks (DARE, DELLA).")] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda (all of them) or cuda:N.")] = "auto",
    share: Annotated[
        bool, typer.Option("--share", help="Divide the work among all processes that were started in the same way.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge a recipe into a directory, without evaluation.

    Only headers are checked. An existing identical merge is reused.
    """
    with command_context(as_json) as console:
        record = merge_recipe(recipe, MergeOptions(out, seed, device, share), console)
        if as_json:
            print_created(record)


_MOST_SHOWN = 5  # modules with the largest errors


def extract_lora_command(
    fine_tune: Annotated[
        str, typer.Argument(metavar="FINETUNED", help="Fine-tune: a directory, or org/name@revision.")
    ],
    base: Annotated[str, typer.Argument(help="Model that it was fine-tuned from.")],
    rank: Annotated[int, typer.Option(help="Largest rank of a factor.")],
    out: Annotated[Path, typer.Option(help="Directory for the adapter. It must not exist.")] = Path("adapter"),
    epsilon: Annotated[
        float, typer.Option(help="Leave out directions whose singular value is at most this large.")
    ] = 0.0,
    save_module: Annotated[
        list[str] | None,
        typer.Option(help="Save modules whose name ends like this (for example lm_head) in full. Repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Format of the factors: float32, bfloat16 or float16.")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Extract a LoRA adapter from a fine-tune and its base.

    mergegate prints the share of the change that the adapter misses.
    """
    with command_context(as_json) as console:
        settings = ExtractionSettings(rank, epsilon, tuple(save_module or ()), dtype)
        with new_directory(out) as directory:
            checkpoints = [find_checkpoint(name) for name in (fine_tune, base)]
            if snapshots := [snapshot for parent in checkpoints for snapshot in parent.snapshots]:
                with console.status("fetching weights"):
                    download_snapshots(snapshots, store().hashes)
            identities = identify_parents(checkpoints)
            with console.status("reading headers") as status:
                extracted = extract_adapter(
                    open_parent(checkpoints[0]),
                    open_parent(checkpoints[1]),
                    base,
                    settings,
                    lambda done, total: status.update(f"factoring: {done / max(total, 1):.0%}"),
                )
            write_adapter(extracted.adapter, directory)
            require_same_files(identities)
        worst = sorted(extracted.errors, key=lambda module_error: -module_error.error)
        for module_error in worst[:_MOST_SHOWN]:
            rest = f"rank {module_error.rank} misses {100 * module_error.error:.1f} % of the change"
            console.print(f"  {module_error.module}: {rest}")
        if len(worst) > _MOST_SHOWN:
            rest = format_count(len(worst) - _MOST_SHOWN, "module")
            console.print(f"  and {rest} with smaller errors")
        size = sum(file.stat().st_size for file in out.iterdir())
        full = len(extracted.adapter.full_tensors)
        console.print(
            f"{out}: {format_bytes(size)}, {format_count(len(extracted.errors), 'module')} with factors, "
            f"{full} saved in full, {format_count(extracted.unchanged, 'tensor')} unchanged"
        )
        console.print(f"  the adapter misses {100 * extracted.error:.1f} % of the change")
        if as_json:
            modules = {item.module: {"rank": item.rank, "error": item.error} for item in extracted.errors}
            facts = {"out": str(out), "error": extracted.error, "unchanged": extracted.unchanged}
            print_created({**facts, "saved_whole": sorted(extracted.adapter.full_tensors), "modules": modules})


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
