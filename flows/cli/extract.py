"""``mergegate extract-lora``: extract an adapter from a fine-tune and its base, and print the error of each module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_created
from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter
from mergegate.merge_core.files import new_directory
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.checkpoints import find_checkpoint, identify_parents, open_parent, require_same_files
from mergegate.tasks.checkpoints.hub import download_snapshots
from mergegate.tasks.stage import store

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
